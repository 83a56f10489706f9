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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.paged_attention import LOG2_E
from pallas_kernels.weights import FP8_MAX

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

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3
    ahead: bool = True


def picture_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Attention within groups of n neighbouring tokens.

    Args:
        qkv: `[..., T, 3·H·d]`, T a multiple of n; bfloat16 unless `impl` is "plain".
        cos: `[n, d/2]` float32, of the angles by which the tokens of a group are turned.
        sin: the same.
        impl: see `Impl`.
        tiles: how to cut the work.

    Returns:
        `[..., T, H·d]` in the type of `qkv`.

    Raises:
        ValueError: shapes do not fit each other, or the kernel does not know the type.
    """
    parts = by_parts(qkv, cos)
    groups, n, _, heads, d = parts.shape
    if impl == "plain":
        query, key = (turn(parts, part, cos, sin) for part in (0, 1))
        out = jax.nn.dot_product_attention(query, key, parts[:, :, 2], implementation="xla")
        return out.reshape(*qkv.shape[:-1], heads * d)
    if qkv.dtype != jnp.bfloat16:
        raise ValueError(f"the kernel attends in bfloat16; qkv is {qkv.dtype}, so ask for plain")

    tiles = tiles or Tiles()
    rows = parts.reshape(groups * n, 3, heads, d)
    key = turn(parts, 1, cos, sin).reshape(groups * n, heads, d) if tiles.ahead else None
    args, tree = jax.tree.flatten((words(rows), key, rows, cos, sin))

    def body(*refs: Any) -> None:
        _attend(*jax.tree.unflatten(tree, refs[:-1]), y=refs[-1], tiles=tiles, impl=impl)

    y = triton_call(
        body,
        *args,
        grid=(pl.cdiv(n, tiles.queries), heads, groups),
        out_shape=jax.ShapeDtypeStruct((groups * n, heads, d), qkv.dtype),
        impl=impl,
        name="picture_attention",
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return y.reshape(*qkv.shape[:-1], heads * d)


def by_parts(qkv: jax.Array, cos: jax.Array) -> jax.Array:
    """`[..., T, 3·H·d]` by groups and heads, `[G, n, 3, H, d]`, given angles `[n, d/2]`.

    Raises:
        ValueError: T is no multiple of n, or the channels none of three heads'.
    """
    (*_, length, width), (n, half) = qkv.shape, cos.shape
    if width % (6 * half) or length % n:
        raise ValueError(
            f"qkv {list(qkv.shape)} is not [..., T, 3 H d], with T a multiple of {n} tokens and d "
            f"of {2 * half} channels, for which there are angles"
        )
    return qkv.reshape(-1, n, 3, width // (6 * half), 2 * half)


def turn(qkv: jax.Array, part: int, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries (part 0) or keys (1) of `[..., n, 3, H, d]`, turned in float32: `[..., n, H, d]`.

    Channels (2 c, 2 c + 1) turn by the angle whose cosine and sine are in `[n, d/2]`.
    """
    cos, sin = cos[:, None], sin[:, None]
    if qkv.dtype != jnp.bfloat16:
        x = qkv[..., part, :, :]
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        both = jnp.stack(turned(pairs[..., 0], pairs[..., 1], cos, sin), -1)
        return both.reshape(x.shape).astype(x.dtype)
    # As words: XLA puts even and odd channels together by a slow kernel of its own.
    even, odd = turned(*halves(words(qkv)[..., part, :, :]), cos, sin)
    even, odd = (lax.bitcast_convert_type(a.astype(qkv.dtype), jnp.uint16) for a in (even, odd))
    pairs = odd.astype(jnp.uint32) << 16 | even.astype(jnp.uint32)
    return lax.bitcast_convert_type(pairs, qkv.dtype).reshape(*pairs.shape[:-1], -1)


def turn_apart(qkv: jax.Array, part: int, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As `turn`, of bfloat16, with even channels before odd ones."""
    both = turned(*halves(words(qkv)[..., part, :, :]), cos[:, None], sin[:, None])
    return jnp.concatenate(both, -1).astype(qkv.dtype)


def rounded(x: jax.Array, step: jax.Array) -> jax.Array:
    """To E4M3 in units of `step`, a power of two, and no further than its range."""
    scaled = x * (1 / step.astype(x.dtype))
    return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)


def words(x: jax.Array) -> jax.Array:
    """Pairs of bfloat16 channels `[..., d]` as words `[..., d/2]` uint32; the same bytes."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)


def halves(word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The even channel and the odd one of words, float32."""
    even, odd = word << 16, word & np.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(even, jnp.float32), lax.bitcast_convert_type(odd, jnp.float32)


def turned(
    even: jax.Array, odd: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Even channels and odd ones, turned."""
    return even * cos - odd * sin, even * sin + odd * cos


def _attend(
    pairs: Any, key: Any, rows: Any, cos: Any, sin: Any, *, y: Any, tiles: Tiles, impl: Impl
) -> None:
    """Program `(b, h, g)`: a block of queries of a head in a group.

    `pairs`: `[R, 3, H, d/2]` uint32; `key`: `[R, H, d]` turned, or None; `rows`: `[R, 3, H, d]`.
    """
    head = pl.program_id(1)
    n, half = cos.shape
    first = pl.program_id(2) * n

    def load_turned(part: int, token: jax.Array, scale: float = 1.0) -> jax.Array:
        pair = plt.load(pairs.at[(first + token)[:, None], part, head, jnp.arange(half)[None, :]])
        at = token[:, None], jnp.arange(half)[None, :]
        both = turned(*halves(pair), plt.load(cos.at[at]) * scale, plt.load(sin.at[at]) * scale)
        return jnp.stack(both, axis=-1).reshape(len(token), 2 * half).astype(rows.dtype)

    # What lies behind the last token of a group is computed as if it were that one.
    token = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)
    query = load_turned(0, jnp.minimum(token, n - 1), (2 * half) ** -0.5 * LOG2_E)

    def attend_block(begin: Any, size: int, carry: Any, count: int | None = None) -> Any:
        at = jnp.arange(size)
        token = begin + (at if count is None else jnp.minimum(at, count - 1))
        whole = jnp.arange(2 * half)[None, :]
        if key is None:
            k = load_turned(1, token)
        else:
            k = plt.load(key.at[(first + token)[:, None], head, whole])
        v = plt.load(rows.at[(first + token)[:, None], 2, head, whole])
        scores = plt.dot(query, k, trans_b=True)
        if count is not None:
            scores = jnp.where(at[None, :] < count, scores, -jnp.inf)
        return _streamed(carry, scores, v, impl)

    carry = (
        jnp.full(tiles.queries, -jnp.inf, jnp.float32),
        jnp.zeros(tiles.queries, jnp.float32),
        jnp.zeros((tiles.queries, 2 * half), jnp.float32),
    )
    whole, rest = divmod(n, tiles.keys)
    if whole:

        def step(i: jax.Array, carry: Any) -> Any:
            return attend_block(i * tiles.keys, tiles.keys, carry)

        carry = lax.fori_loop(0, whole, step, carry)
    if rest:
        size = max(SMALLEST, pl.next_power_of_2(rest))
        carry = attend_block(whole * tiles.keys, size, carry, None if rest == size else rest)
    _, total, o = carry
    at = (first + token)[:, None], head, jnp.arange(2 * half)[None, :]
    plt.store(y.at[at], (o / total[:, None]).astype(y.dtype), mask=(token < n)[:, None])


def _streamed(
    carry: tuple[jax.Array, jax.Array, jax.Array], scores: jax.Array, v: jax.Array, impl: Impl
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of a streamed softmax, with scores in units of log2: maximum, sum, values."""
    peak, total, o = carry
    highest = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights, fade = _exp2(scores - highest[:, None], impl), _exp2(peak - highest, impl)
    o = o * fade[:, None] + plt.dot(weights.astype(v.dtype), v)
    return highest, total * fade + jnp.sum(weights, axis=1), o


def _exp2(x: jax.Array, impl: Impl) -> jax.Array:
    """`2^x` for x <= 0, zero below 2^-126."""
    if impl == "interpret":
        return jnp.exp2(x)
    # The instruction itself: what lies below would cost three more for each, a quarter of all.
    (y,) = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y
