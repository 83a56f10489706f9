"""Gated attention of pieces of prompts, a page of tokens each, over pages of keys and values.

The formula is that of `paged_attention`. A program takes the queries of one piece for a few heads
and goes through the pages up to its own, from the first to the last, with the running maximum of a
streamed softmax; so neither the other pieces of a call nor the size of the table show in its bits.
Where shapes are those of `prefill_attention_mosaic`, the kernel may be that one.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.normed import Form, form_type, formed, store
from pallas_kernels.paged_attention import attend, gated, streamed
from pallas_kernels.prefill_attention_mosaic import Tiles, fits, prefill_attention_mosaic
from pallas_kernels.rotary_cache import rotary_cache


def prefill_attention(
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
    form: Form | None = None,
    kernel: Literal["mosaic", "triton"] = "mosaic",
    tiles: Tiles | None = None,
    heads: int = 2,
    block: int = 32,
    warps: int = 8,
    stages: int = 3,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write keys and values of `P` pieces, and attend to all up to each token.

    A piece may see what another one of the same call writes.

    Args:
        q_gate: `[P, page, H·2·d]`, query and gate side by side within each head.
        k: `[P, page, Hkv·d]`.
        v: the same.
        cos: `[P, page, r]` float32.
        sin: the same.
        q_norm: `[La, d]`, zero-centred weights of all layers.
        k_norm: the same.
        layer: which of them.
        pool_layer: which layer of the pages.
        k_pages: `[L, N, page, Hkv, d]`, in the type of `k` or float8_e4m3fn.
        v_pages: the same.
        table: `[P, M]` int32, pages of each piece's sequence.
        start: `[P]` int32, index of its first token, a multiple of the page.
        valid: `[P]` int32, how many of its tokens are written: none where its page has them
            already. All of them are attended for.
        eps: of the norms.
        impl: see `Impl`.
        form: in which the output projection wants `y`; None for as it is.
        kernel: which one; on Triton if shapes or types do not fit the other, which is the faster.
        tiles: how the one on Mosaic cuts its work.
        heads: of the one on Triton, as what follows: query heads a program; they share a key head.
            With the page it makes the rows of a matrix product, and so decides about bits.
        block: tokens that are attended to together, a page or an even part of it; decides about
            bits.
        warps: warps a program of the attention kernel.
        stages: blocks in flight in it.

    Returns:
        `y [P, page, H·d]` in the type of `q_gate`, or in a form; `k_pages`,
        `v_pages`.
    """
    P, T = k.shape[:2]
    page, Hkv = k_pages.shape[2:4]
    if page != T:
        raise ValueError(f"a piece has {T} tokens, a page {page}; they must be as long")
    q, k_pages, v_pages = rotary_cache(
        q_gate,
        k,
        v,
        cos,
        sin,
        q_norm,
        k_norm,
        layer,
        pool_layer,
        k_pages,
        v_pages,
        table,
        start,
        valid,
        eps=eps,
        impl=impl,
    )
    if impl == "plain":
        count = jnp.full(P, T)
        y = attend(q, q_gate, pool_layer, k_pages, v_pages, table, start, count)
        return (y if form is None else formed(y, form)), k_pages, v_pages

    if kernel == "mosaic" and fits(q, k_pages):
        args = as_data(pool_layer), q, q_gate, k_pages, v_pages, table, start
        y = prefill_attention_mosaic(*args, impl=impl, tiles=tiles)
        return (y if form is None else formed(y, form)), k_pages, v_pages

    heads = min(heads, q.shape[2] // Hkv)
    # Numbers of layers as data: the kernel is traced and compiled once for all of them.
    index = as_data(pool_layer, form.index if form else 0)
    args = index, q, q_gate, k_pages, v_pages, table, start, form and form.scale
    cut = {"heads": heads, "block": block, "warps": warps, "stages": stages}
    return _launch(*args, kind=form and form.kind, impl=impl, **cut), k_pages, v_pages


@partial(jax.jit, static_argnames=("kind", "impl", "heads", "block", "warps", "stages"))
def _launch(
    index: jax.Array,
    q: jax.Array,
    q_gate: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    scales: jax.Array | None,
    *,
    kind: type | None,
    impl: Impl,
    heads: int,
    block: int,
    warps: int,
    stages: int,
) -> jax.Array:
    P, T, H, d = q.shape
    form = None if kind is None else Form(kind, scales)
    rows = q.reshape(P * T, H, d), q_gate.reshape(P * T, H, 2 * d)
    args, tree = jax.tree.flatten((index, *rows, k_pages, v_pages, table, start, scales))

    def body(*refs: Any) -> None:
        ins = jax.tree.unflatten(tree, refs[:-1])
        _attend(*ins, y=refs[-1], heads=heads, block=block, form=form)

    y = triton_call(
        body,
        *args,
        grid=(H // heads, P),
        out_shape=jax.ShapeDtypeStruct((P * T, H * d), form_type(form, q.dtype)),
        impl=impl,
        name="prefill_attention",
        warps=warps,
        stages=stages,
    )
    return y.reshape(P, T, H * d)


def _attend(
    index: Any,
    q: Any,
    q_gate: Any,
    k_pages: Any,
    v_pages: Any,
    table: Any,
    start: Any,
    scales: Any,
    *,
    y: Any,
    heads: int,
    block: int,
    form: Form | None,
) -> None:
    """Program `(h, n)`: some heads of the piece `P - 1 - n`."""
    # The longest way to go is mostly that of the last piece, which therefore begins first.
    piece = pl.num_programs(1) - 1 - pl.program_id(1)
    first_head, pool_layer = pl.program_id(0) * heads, index[0]
    size, Hkv, d = k_pages.shape[2:]
    g = lax.div(first_head, q.shape[1] // Hkv)

    rows, whole = jnp.arange(heads * size), jnp.arange(d)
    token = lax.rem(rows, size)
    row = (piece * size + token)[:, None]
    head = (first_head + lax.div(rows, size))[:, None]
    queries = plt.load(q.at[row, head, whole[None, :]])

    last = jnp.minimum(lax.div(plt.load(start.at[piece]), size), table.shape[1] - 1)
    parts = size // block

    def attend_block(number: jax.Array, carry: Any) -> Any:
        page, *carry = carry
        part = pl.ds(lax.rem(number, parts) * block, block)
        k = plt.load(k_pages.at[pool_layer, page, part, g, :])
        v = plt.load(v_pages.at[pool_layer, page, part, g, :])
        # A block ahead: looked up on the spot it would hold up the loads of its page.
        following = plt.load(table.at[piece, jnp.minimum(lax.div(number + 1, parts), last)])
        ahead = number * block - last * size
        seen = ahead + jnp.arange(block)[None, :] <= token[:, None]
        return following, *streamed(carry, queries, k.astype(q.dtype), v.astype(q.dtype), seen)

    first = (
        plt.load(table.at[piece, np.int32(0)]),
        jnp.full(heads * size, -jnp.inf, jnp.float32),
        jnp.zeros(heads * size, jnp.float32),
        jnp.zeros((heads * size, d), jnp.float32),
    )
    _, _, total, o = lax.fori_loop(0, (last + 1) * parts, attend_block, first)
    gate = plt.load(q_gate.at[row, head, d + whole[None, :]])
    opened = gated(o / total[:, None], gate)
    store(y, (row,), head * d + whole[None, :], opened, form, scales, index[1])
