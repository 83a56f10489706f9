"""Choosing a token from each of `R` rows of `V` scores, and the likeliest tokens of a row.

What a token is chosen by is said in plain JAX by `jaxinfer.engine.sampling.sample`, the reference
of these kernels: penalties, bias and bans make final scores `f [V]`, and

    token = argmax f                                                   at temperature 0
    token = argmax (f / temperature + Gumbel noise  where it survives the filters)

the lowest id of equal ones; its log probability is `raw[token] - logsumexp(raw)`. One kernel looks
at every part of every row, a second one puts a row's parts together: that is all that greedy rows
need, and scores are read once. Only if some row of the call samples do others follow, on device
data. A row's bits depend on nothing but the row: parts are cut by token id and combined in one
order, and what the other rows need changes which kernels run but not what they do here.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.gumbel import gumbel, noise_key
from pallas_kernels.likeliest import BLOCK, highest, part_of, store_groups
from pallas_kernels.thresholds import GROUP, Filters, Scaled, ordered, power, thresholds, total


class Requests(NamedTuple):
    """How each of `B` slots samples and what it has seen; see `jaxinfer.engine.sampling.Sampler`.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: `[B]` float32.
        top_k, earliest: `[B]` int32.
        seed: `[B]` uint32.
        stops: `[B, S]` int32, -1 pads; `S` a power of two, as are all sizes of `bad`.
        bad: `[B, W, L]` int32, right-aligned, -1 pads.
        counts: `[B, V]` int32, read only where a penalty is not neutral, as is the next.
        prompted: `[B, V]` bool.
        biased: `[B]` bool, whether the next is to be read.
        bias: `[B, V]` float32.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    stops: jax.Array
    earliest: jax.Array
    bad: jax.Array
    counts: jax.Array
    prompted: jax.Array
    biased: jax.Array
    bias: jax.Array


class Rows(NamedTuple):
    """The `R = b · T` rows of a call.

    Attributes:
        scores: `[R, V]` float32 logits.
        slots: `[b]` int32.
        tokens: `[b, T]` int32 that the rows were fed.
        tail: `[R, L - 1]` int32, the tokens before the one to choose; -1 where there is none.
        index: `[R]` int32, where the chosen token will stand.
        masks: `[R, ceil(V / 32)]` uint32, bits of what is allowed; None for everything.
    """

    scores: jax.Array
    slots: jax.Array
    tokens: jax.Array
    tail: jax.Array
    index: jax.Array
    masks: jax.Array | None


def choose(
    rows: Rows, requests: Requests, *, impl: Impl, warps: int = 4
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A token for every row.

    Args:
        rows: what is chosen from.
        requests: of all slots.
        impl: "kernel" or "interpret".
        warps: of a program that looks at `BLOCK` tokens.

    Returns:
        Tokens `[R]` int32, their log probabilities and the rows' logsumexp `[R]` float32.
    """
    R, size = rows.scores.shape
    parts = math.ceil(size / BLOCK)
    each = jax.ShapeDtypeStruct((R, parts), jnp.float32)
    ids, row = jax.ShapeDtypeStruct((R, parts), jnp.int32), jax.ShapeDtypeStruct((R,), jnp.int32)
    number = jax.ShapeDtypeStruct((R,), jnp.float32)
    inputs, tree = jax.tree.flatten((rows, requests))
    call = partial(triton_call, impl=impl, warps=warps)

    surveyed = call(
        partial(_survey_body, tree),
        *inputs,
        grid=(R, parts),
        out_shape=(each, ids, each, each),
        name="sampling_survey",
    )
    token, logprob, everything, level = call(
        partial(_settle_body, tree),
        *inputs,
        *surveyed,
        grid=(R,),
        out_shape=(row, number, number, row),
        name="sampling_settle",
    )

    def draw() -> tuple[jax.Array, jax.Array]:
        groups = jax.ShapeDtypeStruct((R, parts * (BLOCK // GROUP)), jnp.int32)
        scaled = call(
            partial(_scale_body, tree),
            *inputs,
            level,
            grid=(R, parts),
            out_shape=(jax.ShapeDtypeStruct((R, size), jnp.float32), groups, each, each),
            name="sampling_scale",
        )
        limits = requests.temperature, requests.top_k, requests.top_p, requests.min_p
        least = thresholds(Scaled(*scaled), Filters(*limits, rows.slots), impl=impl)
        drawn = call(
            _draw_body,
            requests.temperature,
            requests.seed,
            rows.slots,
            rows.index,
            *scaled[:2],
            least,
            grid=(R, parts),
            out_shape=(each, ids),
            name="sampling_draw",
        )
        return call(
            _finish_body,
            rows.scores,
            requests.temperature,
            rows.slots,
            *drawn,
            token,
            logprob,
            everything,
            grid=(R,),
            out_shape=(row, number),
            name="sampling_finish",
        )

    token, logprob = lax.cond(
        jnp.any(requests.temperature[rows.slots] > 0), draw, lambda: (token, logprob)
    )
    return token, logprob, everything


def _mass(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest of `x` and the sum of exp(x - it)."""
    peak = jnp.max(x)
    return peak, jnp.sum(jnp.exp(x - jnp.where(peak == -jnp.inf, 0.0, peak)))


def _final(
    rows: Any, q: Any, row: Any, part: Any, ids: jax.Array, raw: jax.Array, level: Any
) -> jax.Array:
    """Scores of a part's tokens after penalties, bias and bans.

    Where bans leave nothing of a row, the weaker ones of a higher level count: at 0 all, at 1 the
    bias and `masks`, at 2 `masks` alone.
    """
    T = rows.tokens.shape[1]
    slot = plt.load(rows.slots.at[row // T])
    inside = ids < rows.scores.shape[1]
    presence, frequency = plt.load(q.presence.at[slot]), plt.load(q.frequency.at[slot])
    repetition = plt.load(q.repetition.at[slot])
    # Neutral penalties leave every bit, whatever was counted: then it is not read.
    penalised = (presence != 0) | (frequency != 0) | (repetition != 1)
    counts = plt.load(q.counts.at[slot, ids], mask=inside & penalised, other=0)
    prompted = plt.load(q.prompted.at[slot, ids], mask=inside & penalised, other=False)

    def draft(j: jax.Array, counts: jax.Array) -> jax.Array:
        return counts + (ids == plt.load(rows.tokens.at[row // T, j])).astype(jnp.int32)

    counts = lax.fori_loop(1, jnp.where(penalised, row % T + 1, 1), draft, counts)
    generated = counts > 0
    repeated = raw * jnp.where(raw > 0, 1 / repetition, repetition)
    final = jnp.where(prompted | generated, repeated, raw)
    final = final - presence * generated.astype(jnp.float32)
    final = final - frequency * counts.astype(jnp.float32)

    biased = inside & plt.load(q.biased.at[slot]) & (level < 2)
    final = final + plt.load(q.bias.at[slot, ids], mask=biased, other=0.0)
    if rows.masks is not None:
        words = plt.load(rows.masks.at[row, ids // 32], mask=inside, other=0)
        allowed = (words >> (ids % 32).astype(jnp.uint32)) & 1
        final = jnp.where(allowed > 0, final, -jnp.inf)
    out = _is_among(part, ids, _completing(rows, q, row, slot))
    early = plt.load(rows.index.at[row]) < plt.load(q.earliest.at[slot])
    stops = plt.load(q.stops.at[slot, jnp.arange(q.stops.shape[1])])
    out = out + _is_among(part, ids, jnp.where(early, stops, -1))
    return jnp.where(inside & ((out == 0) | (level > 0)), final, -jnp.inf)


def _completing(rows: Any, q: Any, row: Any, slot: Any) -> jax.Array:
    """Tokens `[W]` that would complete a bad word; -1 for none."""
    _, words, length = q.bad.shape
    word, place = jnp.arange(words), jnp.arange(length)
    bad = plt.load(q.bad.at[slot, word[:, None], place[None]])
    before = place < length - 1
    tail = plt.load(rows.tail.at[row, place], mask=before, other=-1)
    unlike = before[None] & (bad >= 0) & (bad != tail[None])
    begun = jnp.sum(unlike.astype(jnp.int32), axis=1) == 0
    return jnp.where(begun, jnp.sum(jnp.where(before[None], 0, bad), axis=1), -1)


def _is_among(part: Any, ids: jax.Array, those: jax.Array) -> jax.Array:
    """Whether each of a part's `ids` is one of `those`; int32."""
    first, place = part * BLOCK, jnp.arange(those.shape[0])
    here = (those >= first) & (those < first + BLOCK)

    def look(at: jax.Array, found: jax.Array) -> jax.Array:
        that = jnp.sum(jnp.where(place == at, those, 0))
        return jnp.where(ids == that, 1, found)

    # It is rare that any of them lies here.
    some = jnp.max(here.astype(jnp.int32))
    return lax.fori_loop(0, some * those.shape[0], look, jnp.zeros(ids.shape, jnp.int32))


def _survey_body(tree: Any, *refs: Any) -> None:
    """A part's highest final score and its id, and the mass of its raw scores."""
    rows, q = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    best, at, peaks, masses = refs[tree.num_leaves :]
    row, part, ids, inside = part_of(rows.scores)
    raw = plt.load(rows.scores.at[row, ids], mask=inside, other=-jnp.inf)
    value, token = highest(_final(rows, q, row, part, ids, raw, 0), ids)
    peak, mass = _mass(raw)
    plt.store(best.at[row, part], value)
    plt.store(at.at[row, part], token)
    plt.store(peaks.at[row, part], peak)
    plt.store(masses.at[row, part], mass)


def _settle_body(tree: Any, *refs: Any) -> None:
    """A row's greedy token, its log probability, logsumexp, and the level that left any token."""
    rows, q = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    best, at, peaks, masses, token, logprob, everything, level = refs[tree.num_leaves :]
    row, size, parts = pl.program_id(0), rows.scores.shape[1], best.shape[1]
    each = jnp.arange(power(parts))
    mask = each < parts
    values = plt.load(best.at[row, each], mask=mask, other=-jnp.inf)
    value, first = highest(values, plt.load(at.at[row, each], mask=mask, other=size))
    peak, mass = total(
        plt.load(peaks.at[row, each], mask=mask, other=-jnp.inf),
        plt.load(masses.at[row, each], mask=mask, other=0.0),
    )

    def again(state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The whole row once more, one level up: it is rare that bans leave nothing."""
        up = state[0] + 1

        def look(part: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
            ids = part * BLOCK + jnp.arange(BLOCK)
            raw = plt.load(rows.scores.at[row, ids], mask=ids < size, other=-jnp.inf)
            value, token = highest(_final(rows, q, row, part, ids, raw, up), ids)
            higher = value > found[0]
            return jnp.where(higher, value, found[0]), jnp.where(higher, token, found[1])

        return up, *lax.fori_loop(0, parts, look, (jnp.float32(-jnp.inf), jnp.int32(0)))

    def nothing(state: tuple[Any, ...]) -> jax.Array:
        return (state[1] == -jnp.inf) & (state[0] < 2)

    up, _, first = lax.while_loop(nothing, again, (jnp.int32(0), value, first))
    # Scores that are no numbers must not lead out of the array.
    first = jnp.minimum(first, size - 1)
    sum_of_all = peak + jnp.log(mass)
    plt.store(token.at[row], first)
    plt.store(logprob.at[row], plt.load(rows.scores.at[row, first]) - sum_of_all)
    plt.store(everything.at[row], sum_of_all)
    plt.store(level.at[row], up)


def _scale_body(tree: Any, *refs: Any) -> None:
    """Scores over the temperature, their groups' maxima, and a part's mass, if the row samples."""
    rows, q = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    level, scaled, groups, peaks, masses = refs[tree.num_leaves :]
    row, part, ids, inside = part_of(rows.scores)
    temperature = plt.load(q.temperature.at[plt.load(rows.slots.at[row // rows.tokens.shape[1]])])

    @pl.when(temperature > 0)
    def _() -> None:
        raw = plt.load(rows.scores.at[row, ids], mask=inside, other=-jnp.inf)
        final = _final(rows, q, row, part, ids, raw, plt.load(level.at[row]))
        # As in the reference, which may not divide.
        s = final * (1 / jnp.maximum(temperature, 1e-6))
        plt.store(scaled.at[row, ids], s, mask=inside)
        store_groups(groups, row, part, s, inside)
        peak, mass = _mass(s)
        plt.store(peaks.at[row, part], peak)
        plt.store(masses.at[row, part], mass)


def _draw_body(temperature, seed, slots, index, scaled, groups, least, best, at) -> None:
    """A part's highest score with noise, among those that reach the row's threshold."""
    row, part, ids, inside = part_of(scaled)
    slot = plt.load(slots.at[row // (scaled.shape[0] // slots.shape[0])])
    number = BLOCK // GROUP
    maxima = plt.load(groups.at[row, part * number + jnp.arange(number)])
    threshold = plt.load(least.at[row])
    alive = (jnp.max(maxima) >= threshold) & (plt.load(temperature.at[slot]) > 0)

    def draw(_: jax.Array, __: Any) -> tuple[jax.Array, jax.Array]:
        s = plt.load(scaled.at[row, ids], mask=inside, other=-jnp.inf)
        key = noise_key(plt.load(seed.at[slot]), plt.load(index.at[row]))
        noisy = s + gumbel(key, ids, scaled.shape[1])
        return highest(jnp.where(ordered(s) >= threshold, noisy, -jnp.inf), ids)

    # A loop of one turn or none: a branch may not return a constant on a GPU.
    nothing = jnp.float32(-jnp.inf), jnp.int32(0)
    value, token = lax.fori_loop(0, alive.astype(jnp.int32), draw, nothing)
    plt.store(best.at[row, part], value)
    plt.store(at.at[row, part], token)


def _finish_body(
    scores, temperature, slots, best, at, greedy, known, everything, token, logprob
) -> None:
    """The sampled token of a row and its log probability; of a greedy row what is known."""
    row, size, parts = pl.program_id(0), scores.shape[1], best.shape[1]
    each = jnp.arange(power(parts))
    mask = each < parts
    values = plt.load(best.at[row, each], mask=mask, other=-jnp.inf)
    _, drawn = highest(values, plt.load(at.at[row, each], mask=mask, other=size))
    drawn = jnp.minimum(drawn, size - 1)
    slot = plt.load(slots.at[row // (scores.shape[0] // slots.shape[0])])
    mine = plt.load(temperature.at[slot]) > 0
    score = plt.load(scores.at[row, drawn]) - plt.load(everything.at[row])
    plt.store(token.at[row], jnp.where(mine, drawn, plt.load(greedy.at[row])))
    plt.store(logprob.at[row], jnp.where(mine, score, plt.load(known.at[row])))
