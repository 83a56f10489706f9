"""Norm and rotary embedding of queries and keys, and the writing of keys and values into pages.

For each head `x [d]` of a query or key, with zero-centred weights `w` and the rotary angles of its
token (rotary dimensions `2r`, half against half; the rest pass through):

    x̂ = cast(x · rsqrt(mean(x²) + eps) · (1 + w))
    [a, b, rest] = split(x̂, [r, 2r])
    y = [cast(a · cos − b · sin), cast(b · cos + a · sin), rest]

Statistics and products are float32, the casts are to the type of `x`. Token `t` of sequence `s`
stands at index `start[s] + t`; its key `y` and its value go to row `index % page` of page
`table[s, index // page]`, unless `t ≥ valid[s]` or the table ends before.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call


def rotary_cache(
    q_gate: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    layer: int,
    pool_layer: int,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    *,
    eps: float,
    impl: Impl,
    warps: int = 4,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries ready for their dot products, and the pages with keys and values written in place.

    Args:
        q_gate: `[b, T, H·2·d]`, query and gate side by side within each head; gates are not read.
        k: `[b, T, Hkv·d]`.
        v: the same.
        cos: `[b, T, r]` float32.
        sin: the same.
        q_norm: `[La, d]`, weights of all layers.
        k_norm: the same.
        layer: which of them.
        pool_layer: which layer of the pages.
        k_pages: `[L, N, page, Hkv, d]`, in the type of `k` or float8_e4m3fn.
        v_pages: the same.
        table: `[b, M]` int32, pages of each sequence.
        start: `[b]` int32, index of its first token in this call.
        valid: `[b]` int32, how many of its tokens are written.
        eps: of the norms.
        impl: see `Impl`.
        warps: warps a program; one program does a token's heads of one key head.

    Returns:
        Queries `[b, T, H, d]`, `k_pages`, `v_pages`.
    """
    b, T = k.shape[:2]
    Hkv, d = k_pages.shape[3:]
    rows = b * T
    q_gate = q_gate.reshape(rows, -1, 2 * d)
    k, v = (a.reshape(rows, Hkv, d) for a in (k, v))
    H = q_gate.shape[1]
    if impl == "plain":
        q = _turned(q_gate[..., :d], q_norm[layer], cos, sin, eps)
        k = _turned(k, k_norm[layer], cos, sin, eps)
        at = (pool_layer, *_places(k_pages, table, start, valid, T))
        k_pages = k_pages.at[at].set(stored(k, k_pages.dtype), mode="drop")
        v_pages = v_pages.at[at].set(stored(v, v_pages.dtype), mode="drop")
        return q.reshape(b, T, H, d), k_pages, v_pages

    check_addressable(k_pages)
    half = cos.shape[-1]
    turn = cos.reshape(rows, half), sin.reshape(rows, half)
    index = as_data(layer, pool_layer)
    args = index, q_gate, k, v, *turn, q_norm, k_norm, table, start, valid, k_pages, v_pages
    q, k_pages, v_pages = _launch(*args, T=T, eps=eps, impl=impl, warps=warps)
    return q.reshape(b, T, H, d), k_pages, v_pages


@partial(jax.jit, static_argnames=("T", "eps", "impl", "warps"))
def _launch(
    *args: jax.Array, T: int, eps: float, impl: Impl, warps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_gate, k_pages, v_pages = args[1], *args[-2:]
    (rows, H, both), Hkv = q_gate.shape, k_pages.shape[3]
    return triton_call(
        partial(_kernel, T=T, eps=eps),
        *args,
        grid=(rows, Hkv),
        out_shape=(
            jax.ShapeDtypeStruct((rows, H, both // 2), q_gate.dtype),
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        impl=impl,
        name="rotary_cache",
        warps=warps,
        aliases={11: 1, 12: 2},
    )


def _kernel(
    layers: Any,
    q_gate: Any,
    k: Any,
    v: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    table: Any,
    start: Any,
    valid: Any,
    _k_in: Any,
    _v_in: Any,
    q_out: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    T: int,
    eps: float,
) -> None:
    """Program `(row, g)`: key head `g` of one token, its value, and the queries that read it."""
    row, g, layer, pool_layer = pl.program_id(0), pl.program_id(1), layers[0], layers[1]
    s, t = lax.div(row, T), lax.rem(row, T)
    _, _, page_size, Hkv, d = k_pages.shape
    half = cos.shape[1]
    group = q_out.shape[1] // Hkv
    width = table.shape[1]

    index = plt.load(start.at[s]) + t
    number, offset = lax.div(index, page_size), lax.rem(index, page_size)
    kept = (t < plt.load(valid.at[s])) & (number < width)
    page = plt.load(table.at[s, jnp.minimum(number, width - 1)])

    low, high, whole = pl.ds(0, half), pl.ds(half, half), pl.ds(0, d)
    c, n = plt.load(cos.at[row, :]), plt.load(sin.at[row, :])
    passing = jnp.arange(d) >= 2 * half

    def turned(x: Any, heads: Any, norm: Any) -> list[tuple[Any, jax.Array, Any]]:
        """Which dimensions, their values, and which of these count."""

        def normed(part: Any) -> jax.Array:
            values = plt.load(x.at[row, heads, part])
            weight = 1.0 + plt.load(norm.at[layer, part]).astype(jnp.float32)
            return (values.astype(jnp.float32) * scale * weight).astype(values.dtype)

        squares = plt.load(x.at[row, heads, whole]).astype(jnp.float32) ** 2
        scale = lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / d + eps)
        a, b = (normed(part).astype(jnp.float32) for part in (low, high))
        return [
            (low, (a * c - b * n).astype(x.dtype), True),
            (high, (b * c + a * n).astype(x.dtype), True),
            (whole, normed(whole), passing),
        ]

    def store(to: Any, values: jax.Array, mask: Any) -> None:
        plt.store(to, stored(values, to.dtype), mask=jnp.broadcast_to(mask, values.shape))

    heads, head = pl.ds(g * group, group), pl.ds(g, 1)
    for part, values, counts in turned(q_gate, heads, q_norm):
        store(q_out.at[row, heads, part], values, counts)
    for part, values, counts in turned(k, head, k_norm):
        store(k_pages.at[pool_layer, page, offset, head, part], values, kept & counts)
    values = plt.load(v.at[row, head, whole])
    store(v_pages.at[pool_layer, page, offset, head, whole], values, kept)


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` in the type of the pages; E4M3 has no infinity, and rounds what is too large to NaN."""
    if dtype == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _turned(
    x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> jax.Array:
    """Heads `[rows, heads, d]`, normed and rotated: the formula above."""
    half = cos.shape[-1]
    cos, sin = (a.reshape(-1, 1, half) for a in (cos, sin))
    f = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
    y = (f * scale * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    turned = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + [rest], axis=-1)


def _places(
    pages: jax.Array, table: jax.Array, start: jax.Array, valid: jax.Array, T: int
) -> tuple[jax.Array, jax.Array]:
    """Page and row in it of `T` tokens of each sequence `[b·T]`; no page for what is dropped."""
    count, size = pages.shape[1:3]
    width = table.shape[1]
    index = start[:, None] + jnp.arange(T)
    number = index // size
    page = jnp.take_along_axis(table, jnp.minimum(number, width - 1), axis=1)
    kept = (jnp.arange(T) < valid[:, None]) & (number < width)
    return jnp.where(kept, page, count).reshape(-1), (index % size).reshape(-1)


def check_addressable(pages: jax.Array) -> None:
    """Raise ValueError for pages whose elements the Triton backend would miscount.

    It reckons in 32 bits up to 4 GiB, but an array of single bytes has more than 2³¹ of them then.
    """
    if pages.size > 2**31 and pages.size * pages.dtype.itemsize <= 2**32:
        raise ValueError(
            f"pages of {pages.size / 2**30:.2f} GiB in {pages.dtype} cannot be addressed: "
            "make them smaller than 2 GiB or larger than 4 GiB"
        )
