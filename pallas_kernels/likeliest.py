"""The likeliest tokens of each row of scores `[R, V]`, without a sort.

Both functions look at parts of a row in one kernel and put them together in a second one; of equal
scores the lower id comes first. `argmax_rows` is `jnp.argmax`, `likeliest_rows` is, row by row,
`jaxinfer.engine.filters.likeliest` with log probabilities.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.thresholds import GROUP, LOWEST, ordered, power, unordered

BLOCK = 2048
"""Tokens of a part of a row. It decides the order of sums."""


def argmax_rows(scores: jax.Array, *, impl: Impl = "plain", warps: int = 4) -> jax.Array:
    """The highest of each row's scores `[R, V]` (float32), of equal ones the lowest id: `[R]`."""
    if impl == "plain":
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    R, parts = scores.shape[0], math.ceil(scores.shape[1] / BLOCK)
    each = [jax.ShapeDtypeStruct((R, parts), dtype) for dtype in (jnp.float32, jnp.int32)]
    best = triton_call(
        _peak_body,
        scores,
        grid=(R, parts),
        out_shape=each,
        impl=impl,
        warps=warps,
        name="argmax_parts",
    )
    return triton_call(
        _join_body,
        *best,
        grid=(R,),
        out_shape=jax.ShapeDtypeStruct((R,), jnp.int32),
        impl=impl,
        warps=1,
        name="argmax_rows",
    )


def likeliest_rows(
    scores: jax.Array, everything: jax.Array, count: int, *, impl: Impl, warps: int = 8
) -> tuple[jax.Array, jax.Array]:
    """The `count` highest of each row's scores, highest first; of equal ones the lower id.

    Args:
        scores: `[R, V]` float32.
        everything: `[R]` float32, their logsumexp.
        count: at most `V`.
        impl: "kernel" or "interpret".
        warps: of the program that looks at all groups of a row.

    Returns:
        Tokens `[R, count]` int32 and their log probabilities.
    """
    R, size = scores.shape
    parts = math.ceil(size / BLOCK)
    if not count:
        return jnp.zeros((R, 0), jnp.int32), jnp.zeros((R, 0))
    groups = triton_call(
        _groups_body,
        scores,
        grid=(R, parts),
        out_shape=jax.ShapeDtypeStruct((R, parts * (BLOCK // GROUP)), jnp.int32),
        impl=impl,
        name="likeliest_groups",
    )
    out = [jax.ShapeDtypeStruct((R, count), dtype) for dtype in (jnp.int32, jnp.float32)]
    return triton_call(
        _likeliest_body,
        scores,
        groups,
        everything,
        grid=(R,),
        out_shape=out,
        impl=impl,
        warps=warps,
        name="likeliest_rows",
    )


def part_of(scores: Any) -> tuple[Any, Any, jax.Array, jax.Array]:
    """What this program looks at: row, part, the part's ids, and which of them there are."""
    row, part = pl.program_id(0), pl.program_id(1)
    ids = part * BLOCK + jnp.arange(BLOCK)
    return row, part, ids, ids < scores.shape[1]


def highest(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest value and the lowest id that has it."""
    best = jnp.max(values)
    return best, jnp.min(jnp.where(values == best, ids, jnp.iinfo(jnp.int32).max))


def store_groups(groups: Any, row: Any, part: Any, s: jax.Array, inside: jax.Array) -> None:
    """Write the `ordered` maxima of a part's groups of 64 scores."""
    number = BLOCK // GROUP
    order = jnp.where(inside, ordered(s), LOWEST)
    maxima = jnp.max(order.reshape(number, GROUP), axis=1)
    plt.store(groups.at[row, part * number + jnp.arange(number)], maxima)


def _peak_body(scores, best, at) -> None:
    row, part, ids, inside = part_of(scores)
    value, token = highest(plt.load(scores.at[row, ids], mask=inside, other=-jnp.inf), ids)
    plt.store(best.at[row, part], value)
    plt.store(at.at[row, part], token)


def _join_body(best, at, token) -> None:
    row, parts = pl.program_id(0), best.shape[1]
    each = jnp.arange(power(parts))
    mask = each < parts
    values = plt.load(best.at[row, each], mask=mask, other=-jnp.inf)
    first = plt.load(at.at[row, each], mask=mask, other=jnp.iinfo(jnp.int32).max)
    plt.store(token.at[row], highest(values, first)[1])


def _groups_body(scores, groups) -> None:
    row, part, ids, inside = part_of(scores)
    s = plt.load(scores.at[row, ids], mask=inside, other=-jnp.inf)
    store_groups(groups, row, part, s, inside)


def _likeliest_body(scores, groups, everything, tokens, logprobs) -> None:
    """A tournament: the best group's best token, again and again."""
    row, count, size = pl.program_id(0), groups.shape[1], scores.shape[1]
    each = jnp.arange(power(count))
    peaks = plt.load(groups.at[row, each], mask=each < count, other=LOWEST)
    known = plt.load(everything.at[row])

    def take(place: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        peaks, last, taken = state
        best, group = highest(peaks, each)
        ids = group * GROUP + jnp.arange(GROUP)
        inside = ids < size
        s = plt.load(scores.at[row, ids], mask=inside, other=-jnp.inf)
        order = jnp.where(inside, ordered(s), LOWEST)
        # Of equal ones those up to the last one are taken.
        left = (order == best) & ((best < last) | (ids > taken))
        token = jnp.min(jnp.where(left, ids, size - 1))
        plt.store(tokens.at[row, place], token)
        plt.store(logprobs.at[row, place], unordered(best) - known)
        behind = (order < best) | ((order == best) & (ids > token))
        peak = jnp.max(jnp.where(behind, order, LOWEST))
        return jnp.where(each == group, peak, peaks), best, token

    start = peaks, jnp.int32(2**31 - 1), jnp.int32(-1)
    lax.fori_loop(0, tokens.shape[1], take, start)
