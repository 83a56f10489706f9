"""Attention to other tokens, some of them masked, or biased by row and column of a picture's cells.

With `q_i`, `k_j`, `v_j` of a head of d channels, of the queries and of the tokens of one prompt:

    p_ij = softmax over seen j of (q_i · k_j / sqrt(d) + rows_i[j div g] + columns_i[j mod g])
    y_i = Σ_j p_ij v_j

where tokens that have a bias are the cells of a grid of side g, row by row. p is rounded to the
type of the values where it meets them. The kernel gives a program the queries of one block and one
head, and goes through the tokens with the running maximum of a streamed softmax (Milakov and
Gimelshein, 2018; Dao et al., FlashAttention, 2022): neither scores nor biases are written down, and
the channels of all heads stay side by side as products of matrices leave them.
"""

from collections.abc import Sequence
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
from pallas_kernels.picture_attention import SMALLEST

UNSEEN = -(2.0**100)
"""The score of a token that is not seen: finite, so that a block of them is not NaN, and a power of
two, so that it times anything is exact."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
        queries: a program.
        keys: at a time.
        warps: a program.
        stages: blocks of keys and values in flight.
    """

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


def cross_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
    *,
    seen: jax.Array | None = None,
    bias: tuple[jax.Array, jax.Array] | None = None,
    first: tuple[int, int, int] = (0, 0, 0),
    width: int | None = None,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Attention of T queries to S tokens.

    Args:
        query: `[P, T, N]`, of which H d channels count; bfloat16 unless `impl` is "plain", then d
            is a power of two from 16.
        key: `[P, S, N']` likewise.
        value: likewise.
        heads: H.
        seen: `[P, S]` bool, True at tokens that count, which is one at least; None for all.
        bias: rows and columns, both `[P, T, H, g]` float32, S = g²; None for none.
        first: which H d channels of queries, of keys, and of values.
        width: H d; None for all channels of queries.
        impl: see `Impl`.
        tiles: how to cut the work.

    Returns:
        `[P, T, H d]` in the type of `query`.

    Raises:
        ValueError: the kernel does not know the type or the width of a head.
    """
    prompts, length, _ = query.shape
    width = width or query.shape[-1]
    d = width // heads
    parts = [a.reshape(*a.shape[:2], -1, d) for a in (query, key, value)]
    if impl == "plain":
        q, k, v = (a[:, :, i * heads : (i + 1) * heads] for a, i in zip(parts, first, strict=True))
        mask = None if seen is None else seen[:, None, None]
        added = None if bias is None else _grid(*bias).astype(query.dtype)
        out = jax.nn.dot_product_attention(q, k, v, bias=added, mask=mask, implementation="xla")
        return out.reshape(prompts, length, width)
    if not fits(query.dtype, d):
        raise ValueError(
            f"the kernel attends in bfloat16 with heads of 16, 32, 64 or 128 channels; these are "
            f"{query.dtype} with {d}, so ask for plain"
        )

    tiles = tiles or Tiles()
    begin = tuple(each * heads for each in first)
    args, tree = jax.tree.flatten((*parts, None if seen is None else seen.astype(jnp.int32), bias))

    def body(*refs: Any) -> None:
        *given, y = refs
        _attend(*jax.tree.unflatten(tree, given), y=y, begin=begin, tiles=tiles, impl=impl)

    y = triton_call(
        body,
        *args,
        grid=(pl.cdiv(length, tiles.queries), heads, prompts),
        out_shape=jax.ShapeDtypeStruct((prompts, length, heads, d), query.dtype),
        impl=impl,
        name="cross_attention",
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return y.reshape(prompts, length, width)


def fits(dtype: Any, d: int) -> bool:
    """Whether there is a kernel for heads of d channels of that type."""
    return dtype == jnp.bfloat16 and d in (16, 32, 64, 128)


def _grid(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The bias of every cell, `[P, H, T, g²]`."""
    both = rows[..., :, None] + columns[..., None, :]
    return both.reshape(*rows.shape[:3], -1).swapaxes(1, 2)


def _attend(
    query: Any,
    key: Any,
    value: Any,
    seen: Any,
    bias: Any,
    *,
    y: Any,
    begin: tuple[int, ...],
    tiles: Tiles,
    impl: Impl,
) -> None:
    """Program `(b, h, p)`: a block of queries of a head of a prompt.

    `query`: `[P, T, N/d, d]`, `key` and `value`: `[P, S, N'/d, d]`, their heads from `begin`;
    `seen`: `[P, S]` int32 or None; `bias`: two of `[P, T, H, g]`, or None.
    """
    head, prompt = pl.program_id(1), pl.program_id(2)
    (_, length, _, d), count = query.shape, key.shape[1]
    channels = jnp.arange(d)[None, :]
    # What lies behind the last query is computed as if it were that one.
    token = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)
    mine = jnp.minimum(token, length - 1)[:, None]
    q = plt.load(query.at[prompt, mine, begin[0] + head, channels])

    def load(tokens: Any, first: int, at: jax.Array) -> jax.Array:
        return plt.load(tokens.at[prompt, at[:, None], first + head, channels])

    scale = d**-0.5 * LOG2_E

    def block(start: Any, size: int, rest: int, added: Any) -> tuple[jax.Array, jax.Array]:
        """Scores and values of `rest` tokens from `start`, in a block of `size`."""
        at = start + jnp.minimum(jnp.arange(size), rest - 1)
        scores = plt.dot(q, load(key, begin[1], at), trans_b=True)
        if bias is not None:
            scores = scores * scale + added
        if rest < size:
            scores = jnp.where(jnp.arange(size)[None, :] < rest, scores, UNSEEN)
        if seen is not None:
            scores = jnp.where(plt.load(seen.at[prompt, at])[None, :] != 0, scores, UNSEEN)
        return scores, load(value, begin[2], at)

    # Tokens go line by line, a line being a row of the grid, along which one bias stays the same
    # and the other is that of any line.
    line = min(tiles.keys, count) if bias is None else bias[0].shape[-1]
    parts = _cut(line, tiles.keys)
    across: list[Any] = [None] * len(parts)
    streamed = partial(_streamed, impl=impl, scale=scale if bias is None else 1.0)
    if bias is not None:
        places = [start + jnp.minimum(jnp.arange(size), rest - 1) for start, size, rest in parts]
        across = [
            plt.load(bias[1].at[prompt, mine, head, place[None, :]]) * LOG2_E for place in places
        ]

    def step(i: jax.Array, carry: Any) -> Any:
        added = across
        if bias is not None:
            down = plt.load(bias[0].at[prompt, mine, head, i]) * LOG2_E
            added = [each + down for each in across]
        blocks = [
            block(i * line + start, size, rest, each)
            for (start, size, rest), each in zip(parts, added, strict=True)
        ]
        return streamed(carry, blocks)

    carry = (
        jnp.full(tiles.queries, UNSEEN, jnp.float32),
        jnp.zeros(tiles.queries, jnp.float32),
        jnp.zeros((tiles.queries, d), jnp.float32),
    )
    lines, over = divmod(count, line)
    carry = lax.fori_loop(0, lines, step, carry) if lines > 1 else step(jnp.int32(0), carry)
    if over:
        begins = lines * line
        blocks = [block(begins + start, size, rest, None) for start, size, rest in _cut(over, line)]
        carry = streamed(carry, blocks)
    _, total, o = carry
    out = (o / total[:, None]).astype(y.dtype)
    plt.store(y.at[prompt, token[:, None], head, channels], out, mask=(token < length)[:, None])


def _cut(count: int, most: int) -> list[tuple[int, int, int]]:
    """Blocks of up to `most` of so many tokens: where each begins, its size, how many count."""
    starts = range(0, count, most)
    rests = [min(most, count - start) for start in starts]
    return [
        (start, max(SMALLEST, pl.next_power_of_2(rest)), rest)
        for start, rest in zip(starts, rests, strict=True)
    ]


def _streamed(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    blocks: Sequence[tuple[jax.Array, jax.Array]],
    *,
    scale: float,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A step of a streamed softmax: maximum, sum and values, given more of scores and values.

    Scores and maximum are in units of `scale` log2.
    """
    peak, total, o = carry
    highest = peak
    for scores, _ in blocks:
        highest = jnp.maximum(highest, jnp.max(scores, axis=1))
    fade = _exp2(peak, highest, scale, impl)
    total, o = total * fade, o * fade[:, None]
    for scores, v in blocks:
        weights = _exp2(scores, highest[:, None], scale, impl)
        total += jnp.sum(weights, axis=1)
        o += plt.dot(weights.astype(v.dtype), v)
    return highest, total, o


def _exp2(x: jax.Array, most: jax.Array, scale: float, impl: Impl) -> jax.Array:
    """`2^(scale (x - most))` for x <= most, zero below 2^-126."""
    most = jnp.broadcast_to(-scale * most, x.shape)
    if impl == "interpret":
        return jnp.exp2(scale * x + most)
    # The instructions themselves: it would be four more for each.
    scaled = f"fma.rn.f32 t, $1, {_hexadecimal(scale)}, $2;"
    (y,) = plt.elementwise_inline_asm(
        f"{{ .reg .f32 t; {scaled} ex2.approx.ftz.f32 $0, t; }}",
        args=[x, most],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def _hexadecimal(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{np.float32(x).view(np.uint32):08X}"
