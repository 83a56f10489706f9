"""Attention among the tokens of a window, or of a picture, with rotary position embedding.

Tokens come as the projection left them, query, key and value of all heads side by side. Every n
that follow one another attend to each other. With `q_i`, `k_j`, `v_j` of a head of d channels, and
R_i turning channels (2 c, 2 c + 1) by the angle that token i of a group has for the pair c:

    p_ij = softmax over j of ((R_i q_i) · (R_j k_j) / sqrt(d))
    y_i = Σ_j p_ij v_j

Turned queries and keys are rounded to the type they came in, and so is p where it meets the values.
The kernel gives a program the queries of one block and one head, and goes through the keys with the
running maximum of a streamed softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention,
2022). A pair of bfloat16 channels is one 32-bit word there, its even channel in the lower half, so
that turning pairs rearranges nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.paged_attention import LOG2_E

SMALLEST = 16
"""Rows and columns of a product of matrices at least."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
        queries: a program.
        keys: at a time.
        warps: a program.
        stages: blocks of keys and values in flight.
        ahead: whether keys are turned once beforehand, which costs a pass over them, or by each
            program for itself, which costs arithmetic.
    """

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3
    ahead: bool = True


def picture_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    heads: int,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Attention within groups of n neighbouring tokens.

    Args:
        qkv: `[B, T, 3·H·d]`, T a multiple of n; bfloat16 unless `impl` is "plain".
        cos: `[n, d/2]` float32, of the angles by which the tokens of a group are turned.
        sin: the same.
        heads: H.
        impl: see `Impl`.
        tiles: how to cut the work.

    Returns:
        `[B, T, H·d]` in the type of `qkv`.

    Raises:
        ValueError: shapes do not fit each other, or the kernel does not know the type.
    """
    batch, length, width = qkv.shape
    n, half = cos.shape
    if width != 6 * heads * half or length % n:
        raise ValueError(
            f"qkv {list(qkv.shape)} is not [B, T, 3 H d] with {heads} heads of {2 * half} and T a "
            f"multiple of {n}"
        )
    parts = qkv.reshape(batch * length // n, n, 3, heads, 2 * half)
    if impl == "plain":
        query, key, value = (parts[:, :, i] for i in range(3))
        query, key = turn(query, cos, sin), turn(key, cos, sin)
        out = jax.nn.dot_product_attention(query, key, value, implementation="xla")
        return out.reshape(batch, length, heads * 2 * half)
    if qkv.dtype != jnp.bfloat16:
        raise ValueError(f"the kernel attends in bfloat16; qkv is {qkv.dtype}, so ask for plain")

    tiles = tiles or Tiles()
    rows = parts.reshape(batch * length, 3, heads, 2 * half)
    key = turn(parts[:, :, 1], cos, sin).reshape(-1, heads, 2 * half) if tiles.ahead else None
    pairs = lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], half, 2), jnp.uint32)
    args, tree = jax.tree.flatten((pairs, key, rows, cos, sin))

    def body(*refs: Any) -> None:
        _attend(*jax.tree.unflatten(tree, refs[:-1]), y=refs[-1], tiles=tiles)

    y = triton_call(
        body,
        *args,
        grid=(pl.cdiv(n, tiles.queries), heads, len(parts)),
        out_shape=jax.ShapeDtypeStruct((len(rows), heads, 2 * half), qkv.dtype),
        impl=impl,
        name="picture_attention",
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return y.reshape(batch, length, heads * 2 * half)


def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn channels (2 c, 2 c + 1) of `[..., n, heads, d]` by angles `[n, d/2]`, in float32."""
    # Written without putting parts together, which XLA would do with a slow kernel.
    wide = x.astype(jnp.float32)
    other = wide.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    cos = jnp.repeat(cos, 2, axis=-1)[:, None]
    sin = jnp.stack([-sin, sin], axis=-1).reshape(len(sin), 1, -1)
    return (wide * cos + other * sin).astype(x.dtype)


def _attend(
    pairs: Any, key: Any, rows: Any, cos: Any, sin: Any, *, y: Any, tiles: Tiles
) -> None:
    """Program `(b, h, g)`: a block of queries of a head in a group.

    `pairs`: `[R, 3, H, d/2]` uint32; `key`: `[R, H, d]` turned, or None; `rows`: `[R, 3, H, d]`.
    """
    head = pl.program_id(1)
    n, half = cos.shape
    first = pl.program_id(2) * n

    def turned(part: int, token: jax.Array, scale: float = 1.0) -> jax.Array:
        pair = plt.load(pairs.at[(first + token)[:, None], part, head, jnp.arange(half)[None, :]])
        even = lax.bitcast_convert_type(pair << 16, jnp.float32)
        odd = lax.bitcast_convert_type(pair & np.uint32(0xFFFF0000), jnp.float32)
        at = token[:, None], jnp.arange(half)[None, :]
        c, s = plt.load(cos.at[at]) * scale, plt.load(sin.at[at]) * scale
        both = jnp.stack([even * c - odd * s, even * s + odd * c], axis=-1)
        return both.reshape(len(token), 2 * half).astype(rows.dtype)

    # What lies behind the last token of a group is computed as if it were that one.
    token = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)
    query = turned(0, jnp.minimum(token, n - 1), (2 * half) ** -0.5 * LOG2_E)

    def attend_block(begin: Any, size: int, carry: Any, count: int | None = None) -> Any:
        at = jnp.arange(size)
        token = begin + (at if count is None else jnp.minimum(at, count - 1))
        whole = jnp.arange(2 * half)[None, :]
        if key is None:
            k = turned(1, token)
        else:
            k = plt.load(key.at[(first + token)[:, None], head, whole])
        v = plt.load(rows.at[(first + token)[:, None], 2, head, whole])
        scores = plt.dot(query, k, trans_b=True)
        if count is not None:
            scores = jnp.where(at[None, :] < count, scores, -jnp.inf)
        return _streamed(carry, scores, v)

    carry = (
        jnp.full(tiles.queries, -jnp.inf, jnp.float32),
        jnp.zeros(tiles.queries, jnp.float32),
        jnp.zeros((tiles.queries, 2 * half), jnp.float32),
    )
    whole, rest = divmod(n, tiles.keys)
    if whole:
        step = lambda i, carry: attend_block(i * tiles.keys, tiles.keys, carry)  # noqa: E731
        carry = lax.fori_loop(0, whole, step, carry)
    if rest:
        size = max(SMALLEST, pl.next_power_of_2(rest))
        carry = attend_block(whole * tiles.keys, size, carry, None if rest == size else rest)
    _, total, o = carry
    at = (first + token)[:, None], head, jnp.arange(2 * half)[None, :]
    plt.store(y.at[at], (o / total[:, None]).astype(y.dtype), mask=(token < n)[:, None])


def _streamed(
    carry: tuple[jax.Array, jax.Array, jax.Array], scores: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of a streamed softmax, with scores in units of log2: maximum, sum, values."""
    peak, total, o = carry
    highest = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights, fade = jnp.exp2(scores - highest[:, None]), jnp.exp2(peak - highest)
    o = o * fade[:, None] + plt.dot(weights.astype(v.dtype), v)
    return highest, total * fade + jnp.sum(weights, axis=1), o
