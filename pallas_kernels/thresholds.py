"""The score that a token must reach to survive top-k, then top-p among those, then min-p.

For a row `s [V]` of scores over the temperature:

    a = the k-th highest score, minus infinity without top-k
    b = the largest t with  sum(e(s_i), s_i >= t) >= p · sum(e(s_i), s_i >= a),  where it is p < 1
    threshold = max(a, b, max(s) + log(min_p)),      e(s) = exp(s - max(s))

which `jaxinfer.engine.filters.keep` says in plain JAX. Nothing is sorted. Scores are compared as
integers (`ordered`), and a threshold is found digit by digit: counts are exact, sums have an order
that depends on the vocabulary alone.

Few tokens decide in most rows. Scores come in groups of 64; the `NARROW` groups with the highest
maxima hold every score above the next group's maximum, and if the threshold lies up there, one
program finds it in its registers. Only rows where it lies lower (flat distributions, a large k)
go over the whole vocabulary, sixteen times. Which way a row goes depends on its scores alone.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call

GROUP = 64
"""Scores that share a maximum."""
NARROW = 128
"""Groups that are searched in one program."""
LOWEST = np.int32(np.iinfo(np.int32).min)
"""Below what any score maps to."""

_NARROW_DIGIT = 2
_WIDE_DIGIT = 4
_WIDE_BLOCK = 4096


class Scaled(NamedTuple):
    """Scores over the temperature of `R` rows, and what is known of their parts.

    Attributes:
        scores: `[R, V]` float32; of rows that sample, the others are not filled.
        groups: `[R, G]` int32, `ordered` maxima of groups of 64; `LOWEST` behind the last one.
        peaks: `[R, N]` float32, maxima of parts.
        masses: `[R, N]` float32, sums over parts of exp(score - the part's maximum).
    """

    scores: jax.Array
    groups: jax.Array
    peaks: jax.Array
    masses: jax.Array


class Filters(NamedTuple):
    """How each of `B` slots is filtered, and the slots of the rows.

    Attributes:
        temperature: `[B]` float32; rows of slots at 0 do not sample.
        top_k: `[B]` int32, 0 for no limit.
        top_p: `[B]` float32, 1 for no limit.
        min_p: `[B]` float32, 0 for no limit.
        slots: `[b]` int32, of which `R / b` consecutive rows are.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    slots: jax.Array


def ordered(x: jax.Array) -> jax.Array:
    """float32 -> int32 that compares the same way."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Zero has two signs, which are equal.
    return jnp.where(x == 0, 0, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def unordered(order: jax.Array) -> jax.Array:
    """The float32 that `ordered` maps to this."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def power(size: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def total(peaks: jax.Array, masses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From maxima of parts and sums of exp(x - its maximum): the same of the whole."""
    peak = jnp.max(peaks)
    return peak, jnp.sum(masses * jnp.exp(peaks - jnp.where(peak == -jnp.inf, 0.0, peak)))


def thresholds(scaled: Scaled, filters: Filters, *, impl: Impl, warps: int = 8) -> jax.Array:
    """The threshold of every row, `ordered`.

    Args:
        scaled: of all rows.
        filters: of all rows.
        impl: "kernel" or "interpret".
        warps: of a program that looks at a row's groups.

    Returns:
        `[R]` int32; of rows that do not sample it means nothing.
    """
    R = scaled.scores.shape[0]
    call = partial(triton_call, impl=impl, warps=warps, grid=(R,))
    whole, number = (jax.ShapeDtypeStruct((R,), dtype) for dtype in (jnp.int32, jnp.float32))
    chosen = jax.ShapeDtypeStruct((R, power(scaled.groups.shape[1])), jnp.int32)
    nominated = call(
        _nominate_body,
        *scaled,
        *filters,
        out_shape=(chosen, whole, whole),
        name="sampling_nominate",
    )
    found, peak, limited, k, nucleus, p = call(
        _narrow_body,
        *scaled,
        *filters,
        *nominated,
        out_shape=(whole, number, whole, number, whole, number),
        name="sampling_narrow",
    )

    def wide() -> jax.Array:
        above = _wide(scaled.scores, peak, None, k, limited, impl)
        mass = _wide(scaled.scores, peak, above, p, nucleus, impl)
        return jnp.maximum(found, jnp.maximum(above, mass))

    return lax.cond(jnp.any(limited + nucleus > 0), wide, lambda: found)


def _named(refs: Any) -> tuple[Any, Any]:
    """The first arguments of these kernels, as what they are."""
    return Scaled(*refs[:4]), Filters(*refs[4:9])


def _wanted(filters: Any, row: Any, rows: int, size: int) -> tuple[Any, ...]:
    """Whether this row is limited by top-k and by top-p, and by how many and how much."""
    slot = plt.load(filters.slots.at[row // (rows // filters.slots.shape[0])])
    sampled = plt.load(filters.temperature.at[slot]) > 0
    k, p = plt.load(filters.top_k.at[slot]), plt.load(filters.top_p.at[slot])
    limited = sampled & (k > 0) & (k < size)
    return limited, sampled & (p < 1), k.astype(jnp.float32), p, plt.load(filters.min_p.at[slot])


def _largest(order: jax.Array, weight: jax.Array, goal: jax.Array, active: jax.Array) -> jax.Array:
    """The largest int32 at or above which the weights sum to `goal`; `LOWEST` if not active."""

    def refine(step: jax.Array, low: jax.Array) -> jax.Array:
        unit = jnp.left_shift(1, 32 - _NARROW_DIGIT * (step + 1)).astype(jnp.int32)
        digit = jnp.int32(0)
        for each in range(1, 1 << _NARROW_DIGIT):
            mass = jnp.sum(jnp.where(order >= low + unit * each, weight, 0.0))
            digit += (mass >= goal).astype(jnp.int32)
        return low + unit * digit

    turns = active.astype(jnp.int32) * (32 // _NARROW_DIGIT)
    return lax.fori_loop(0, turns, refine, jnp.int32(LOWEST))


def _nominate_body(*refs: Any) -> None:
    """A row's groups, the `NARROW` with the highest maxima first, and the next highest maximum."""
    scaled, filters = _named(refs)
    chosen, number, bound = refs[9:]
    row, count = pl.program_id(0), scaled.groups.shape[1]
    limited, nucleus, *_ = _wanted(filters, row, *scaled.scores.shape)
    each = jnp.arange(power(count))
    mask = (each < count) & (limited | nucleus)
    peaks = plt.load(scaled.groups.at[row, each], mask=mask, other=LOWEST)
    ones = jnp.ones(each.shape, jnp.float32)
    # Where there are no more groups than that, this is `LOWEST`.
    least = _largest(peaks, ones, jnp.float32(NARROW + 1), (limited | nucleus) & (count > NARROW))
    above = (peaks > least).astype(jnp.int32)
    before, these = lax.cumsum(above) - above, jnp.sum(above)
    place = jnp.where(above > 0, before, these + each - before)
    plt.store(chosen.at[row, place], each, mask=(each >= 0) & (limited | nucleus))
    plt.store(number.at[row], these)
    plt.store(bound.at[row], least)


def _narrow_body(*refs: Any) -> None:
    """A row's threshold if it lies above `bound`; if not that of min-p, and what is to be found."""
    scaled, filters = _named(refs)
    chosen, number, bound, found, top, far_k, goal_k, far_p, goal_p = refs[9:]
    row, (rows, size) = pl.program_id(0), scaled.scores.shape
    each = jnp.arange(power(scaled.peaks.shape[1]))
    mask = each < scaled.peaks.shape[1]
    peak, everything = total(
        plt.load(scaled.peaks.at[row, each], mask=mask, other=-jnp.inf),
        plt.load(scaled.masses.at[row, each], mask=mask, other=0.0),
    )
    limited, nucleus, k, p, min_p = _wanted(filters, row, rows, size)
    least = plt.load(bound.at[row])

    place = jnp.arange(NARROW)
    mine = (place < plt.load(number.at[row])) & (limited | nucleus)
    group = plt.load(chosen.at[row, place], mask=mine, other=0)
    ids = group[:, None] * GROUP + jnp.arange(GROUP)[None]
    inside = mine[:, None] & (ids < size)
    s = plt.load(scaled.scores.at[row, ids], mask=inside, other=-jnp.inf)
    order = jnp.where(inside, ordered(s), LOWEST)

    above = _largest(order, inside.astype(jnp.float32), k, limited)
    e = jnp.where(order >= above, jnp.exp(s - peak), 0.0)
    mass = _largest(order, e, p * jnp.where(limited, jnp.sum(e), everything), nucleus)
    far = (jnp.where(limited, above, mass) <= least) & (least > LOWEST)
    floor = ordered(peak + jnp.log(min_p))
    plt.store(found.at[row], jnp.maximum(floor, jnp.where(far, LOWEST, jnp.maximum(above, mass))))
    plt.store(top.at[row], peak)
    plt.store(far_k.at[row], (far & limited).astype(jnp.int32))
    plt.store(far_p.at[row], (far & nucleus).astype(jnp.int32))
    plt.store(goal_k.at[row], k)
    plt.store(goal_p.at[row], p)


def _wide(
    scores: jax.Array,
    peak: jax.Array,
    above: jax.Array | None,
    goal: jax.Array,
    needed: jax.Array,
    impl: Impl,
) -> jax.Array:
    """`_largest` over whole rows: a kernel a digit, each of which first reads the last one's sums.

    Args:
        scores: `[R, V]` float32.
        peak: `[R]` float32, their maxima.
        above: `[R]` int32: weights are exp(score - peak) of scores not below this, and `goal` is
            a share of their sum. None: weights are one.
        goal: `[R]` float32.
        needed: `[R]` int32, 1 or 0; of other rows the answer is `LOWEST`.
        impl: "kernel" or "interpret".
    """
    digits = 32 // _WIDE_DIGIT
    given: Any = (goal,)
    for turn in range(digits + 1):
        # Which digit it is about is part of what is given: most turns are one program.
        kind = min(turn, 2)
        given = _turn(
            scores, peak, needed, above, *given, turn=kind, last=turn == digits, impl=impl
        )
    return given[1]


@partial(jax.jit, static_argnames=("turn", "last", "impl"))
def _turn(
    scores: jax.Array,
    peak: jax.Array,
    needed: jax.Array,
    above: jax.Array | None,
    *given: jax.Array,
    turn: int,
    last: bool,
    impl: Impl,
) -> tuple[jax.Array, ...]:
    """One kernel of `_wide`: goals, the digits so far, the next digit's unit, and its sums."""
    R, size = scores.shape
    parts = math.ceil(size / _WIDE_BLOCK)
    whole, number = (jax.ShapeDtypeStruct((R,), dtype) for dtype in (jnp.int32, jnp.float32))
    sums = jax.ShapeDtypeStruct((R, power(parts), 1 << _WIDE_DIGIT), jnp.float32)
    share = () if above is None else (above,)
    return triton_call(
        partial(_wide_body, turn=turn, last=last, share=len(share)),
        scores,
        peak,
        needed,
        *share,
        *given,
        grid=(R, 1 if last else parts),
        out_shape=(number, whole, whole, sums),
        impl=impl,
        name="sampling_wide",
    )


def _wide_body(scores, peak, needed, *refs, turn, last, share) -> None:
    """Take the digit that the last sums say, then sum for all values of the next one."""
    above, given, (new_goal, new_low, new_unit, new_sums) = refs[0], refs[share:-4], refs[-4:]
    row, part, size = pl.program_id(0), pl.program_id(1), scores.shape[1]
    parts, width = math.ceil(size / _WIDE_BLOCK), new_sums.shape[2]
    active = plt.load(needed.at[row]) > 0
    goal = plt.load(given[0].at[row])
    low, unit = jnp.int32(LOWEST), jnp.int32(1 << (32 - _WIDE_DIGIT))
    if turn:
        _, old_low, old_unit, sums = given
        low, unit = plt.load(old_low.at[row]), plt.load(old_unit.at[row])
        each, digit = jnp.arange(sums.shape[1])[:, None], jnp.arange(width)
        at = sums.at[row, each, digit[None]]
        mass = jnp.sum(plt.load(at, mask=(each < parts) & active, other=0.0), axis=0)
        if share and turn == 1:
            goal = goal * jnp.max(mass)
        held = active & (digit > 0) & (mass >= goal)
        low = low + unit * jnp.sum(held.astype(jnp.int32))
        unit = unit >> _WIDE_DIGIT

    @pl.when(part == 0)
    def _() -> None:
        plt.store(new_goal.at[row], goal)
        plt.store(new_low.at[row], low)
        plt.store(new_unit.at[row], unit)

    if last:
        return

    @pl.when(active)
    def _() -> None:
        ids = part * _WIDE_BLOCK + jnp.arange(_WIDE_BLOCK)
        inside = ids < size
        s = plt.load(scores.at[row, ids], mask=inside, other=-jnp.inf)
        order = jnp.where(inside, ordered(s), LOWEST)
        if share:
            weight = jnp.exp(s - plt.load(peak.at[row]))
            weight = jnp.where(order >= plt.load(above.at[row]), weight, 0.0)
        else:
            weight = inside.astype(jnp.float32)

        def hold(digit: jax.Array, _: None) -> None:
            held = jnp.sum(jnp.where(order >= low + unit * digit, weight, 0.0))
            plt.store(new_sums.at[row, part, digit], held)

        lax.fori_loop(0, width, hold, None)
