"""Choosing tokens on the device, the same with and without speculation.

The noise behind a sampled token is a function of the request's seed and the token's index alone.
A draft is therefore accepted exactly when it is the token that would have been sampled anyway:
speculation changes when a token is known, never which one.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.engine.filters import banned, keep, likeliest, penalise, restrict
from jaxinfer.engine.sampling_settings import LENGTH, STOPS, WORDS, Settings
from pallas_kernels import rowwise
from pallas_kernels.backend import Impl
from pallas_kernels.likeliest import likeliest_rows
from pallas_kernels.sampling import Requests, Rows, choose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler(Settings):
    """Settings of `B` slots, with a leading axis of slots, and what they have seen.

    Attributes:
        counts: `[B, V]` int32, how often each token was generated.
        prompted: `[B, V]` bool, whether it stands in the prompt.
        bias: `[B, V]` float32, added to the scores; minus infinity bans a token.
        biased: `[B]` bool, whether there is any.
    """

    counts: jax.Array
    prompted: jax.Array
    bias: jax.Array
    biased: jax.Array


class Sampled(NamedTuple):
    """What `sample` chooses; log probabilities are natural and those of the raw scores.

    Attributes:
        tokens: `[b, T]` int32.
        logprobs: `[b, T]` float32.
        top_tokens: `[b, T, top]` int32, likeliest first, of equal ones the lower id.
        top_logprobs: `[b, T, top]` float32.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def init_sampler(slots: int, vocabulary: int) -> Sampler:
    """Greedy and neutral for every slot; `vocabulary` is the number of logits."""
    return Sampler(
        temperature=jnp.zeros(slots),
        top_k=jnp.zeros(slots, jnp.int32),
        top_p=jnp.ones(slots),
        min_p=jnp.zeros(slots),
        seed=jnp.zeros(slots, jnp.uint32),
        presence=jnp.zeros(slots),
        frequency=jnp.zeros(slots),
        repetition=jnp.ones(slots),
        stops=jnp.full((slots, STOPS), -1, jnp.int32),
        earliest=jnp.zeros(slots, jnp.int32),
        bad=jnp.full((slots, WORDS, LENGTH), -1, jnp.int32),
        counts=jnp.zeros((slots, vocabulary), jnp.int32),
        prompted=jnp.zeros((slots, vocabulary), bool),
        bias=jnp.zeros((slots, vocabulary)),
        biased=jnp.zeros(slots, bool),
    )


def set_slots(
    sampler: Sampler,
    slots: jax.Array,
    settings: Settings,
    bias: jax.Array | None,
    prompt: jax.Array,
    prompt_tokens: jax.Array,
) -> Sampler:
    """Prepare slots for new requests.

    Args:
        sampler: of all slots.
        slots: `[N]` int32, which ones.
        settings: of the requests, with an axis of them before all others.
        bias: `[V]` float32 for all of them, or None for none.
        prompt: `[N, S]` int32.
        prompt_tokens: `[N]`, how many of them are the prompt.

    Returns:
        The sampler; nothing counts as generated in those slots.
    """
    own = {f.name: getattr(settings, f.name) for f in fields(Settings)}
    size = sampler.counts.shape[1]
    real = jnp.where(jnp.arange(prompt.shape[1]) < prompt_tokens[:, None], prompt, size)
    row = jnp.arange(len(slots))[:, None]
    own["counts"] = 0
    own["prompted"] = jnp.zeros((len(slots), size), bool).at[row, real].set(True, mode="drop")
    own["bias"] = 0.0 if bias is None else bias
    own["biased"] = bias is not None
    return Sampler(**{name: getattr(sampler, name).at[slots].set(v) for name, v in own.items()})


def count(sampler: Sampler, slots: jax.Array, tokens: jax.Array, number: jax.Array) -> Sampler:
    """Count generated tokens: of slot `slots[i]` the first `number[i]` of `tokens[i]`.

    Args:
        sampler: of all slots.
        slots: `[b]` int32.
        tokens: `[b, T]` int32.
        number: `[b]` int32.
    """
    size = sampler.counts.shape[1]
    real = jnp.where(jnp.arange(tokens.shape[1]) < number[:, None], tokens, size)
    counts = sampler.counts.at[slots[:, None], real].add(1, mode="drop")
    return replace(sampler, counts=counts)


def sample(
    scores: jax.Array,
    sampler: Sampler,
    slots: jax.Array,
    tokens: jax.Array,
    tail: jax.Array,
    index: jax.Array,
    masks: jax.Array | None,
    top: int,
    tile: int | None,
    impl: Impl = "plain",
) -> Sampled:
    """Choose a token for every row, as if the drafts before it had been generated.

    Args:
        scores: `[b, T, V]` float32 logits; minus infinity for ids that only pad the vocabulary.
        sampler: of all slots; counts everything generated up to and including `tokens[:, 0]`.
        slots: `[b]` int32, of which each sequence is.
        tokens: `[b, T]` int32 that the rows were fed; from the second on they are drafts.
        tail: `[b, T, LENGTH - 1]` int32, the tokens before the one to choose, drafts included; -1
            where there is none.
        index: `[b, T]` int32, where in its sequence the chosen token will stand.
        masks: `[b, T, ceil(V / 32)]` uint32, what a grammar allows: bit `j` of word `i` stands for
            token `32 i + j`. None allows all.
        top: length of the list of likeliest tokens.
        tile: see `pallas_kernels.rows`; kernels do not need it.
        impl: kernels take the same noise and the same filters, but round differently here and
            there: they choose another token only where float32 cannot tell which is right.

    Returns:
        Tokens and log probabilities. A temperature of 0 takes the highest score, of equal ones the
        lowest id.
    """
    b, T, V = scores.shape
    ids = jnp.arange(V)
    if impl != "plain":
        return _by_kernels(scores, sampler, slots, tokens, tail, index, masks, top, impl)

    def one(
        raw: jax.Array,
        slot: jax.Array,
        row: jax.Array,
        fed: jax.Array,
        tail: jax.Array,
        index: jax.Array,
        mask: jax.Array | None = None,
    ) -> Sampled:
        p = jax.tree.map(lambda a: a[slot], sampler)
        drafted = (((ids == fed[j]) & (j <= row)).astype(jnp.int32) for j in range(1, T))
        counts = p.counts + sum(drafted)
        allowed = jnp.ones(V, bool) if mask is None else _unpack(mask, V)
        out = banned(V, p.bad, tail, p.stops, index < p.earliest)
        if tile is not None:
            # What comes before depends on B, T and whether there are masks, what follows must not.
            p, counts, allowed, out = lax.optimization_barrier((p, counts, allowed, out))
        final = penalise(raw, counts, p.prompted, p.presence, p.frequency, p.repetition)
        final = restrict(final, p.bias, allowed, out)
        token = _draw(final, p, index)
        return Sampled(token, *_logprobs(raw, token, top))

    of, rows = jnp.broadcast_arrays(slots[:, None], jnp.arange(T))
    fed = jnp.broadcast_to(tokens[:, None], (b, T, T))
    given = () if masks is None else (masks,)
    return rowwise(jax.vmap(one), tile, scores, of, rows, fed, tail, index, *given)


def _by_kernels(
    scores: jax.Array,
    sampler: Sampler,
    slots: jax.Array,
    tokens: jax.Array,
    tail: jax.Array,
    index: jax.Array,
    masks: jax.Array | None,
    top: int,
    impl: Impl,
) -> Sampled:
    """`sample` on a GPU."""
    b, T = tokens.shape
    flat = [a.reshape(b * T, *a.shape[2:]) for a in (scores, tail, index)]
    allowed = None if masks is None else masks.reshape(b * T, -1)
    rows = Rows(flat[0], slots, tokens, flat[1], flat[2], allowed)
    requests = Requests(*(getattr(sampler, name) for name in Requests._fields))
    token, logprob, everything = choose(rows, requests, impl=impl)
    likeliest_tokens, logprobs = likeliest_rows(flat[0], everything, top, impl=impl)
    out = Sampled(token, logprob, likeliest_tokens, logprobs)
    return Sampled(*(a.reshape(b, T, *a.shape[1:]) for a in out))


def prompt_logprobs(
    scores: jax.Array, following: jax.Array, top: int, tile: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probabilities of a prompt's own tokens.

    Args:
        scores: `[b, T, V]` float32 logits.
        following: `[b, T]` int32, the token behind each row.
        top: length of the list of likeliest tokens.
        tile: see `pallas_kernels.rows`.

    Returns:
        Log probabilities `[b, T]`, and the likeliest tokens and theirs, both `[b, T, top]`.
    """
    one = jax.vmap(lambda raw, token: _logprobs(raw, token, top))
    return rowwise(one, tile, scores, following)


def _draw(scores: jax.Array, p: Settings, index: jax.Array) -> jax.Array:
    """A token from scores `[V]`."""
    # Not a division: XLA turns that into this product inside loops, and only there.
    scaled = scores * (1 / jnp.maximum(p.temperature, 1e-6))
    kept = jnp.where(keep(scaled, p.top_k, p.top_p, p.min_p), scaled, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(p.seed), index)
    # Ordinary noise ends at 16, which the largest of a whole vocabulary's now and then exceeds.
    noise = jax.random.gumbel(key, scores.shape, mode="high")
    return jnp.argmax(jnp.where(p.temperature == 0, scores, kept + noise)).astype(jnp.int32)


def _logprobs(
    scores: jax.Array, token: jax.Array, top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probability of a token under scores `[V]`, the `top` likeliest tokens and theirs."""
    total = jax.nn.logsumexp(scores)
    tokens = likeliest(scores, top)
    return scores[token] - total, tokens, scores[tokens] - total


def _unpack(mask: jax.Array, size: int) -> jax.Array:
    """Bits `[size]` of uint32 words, lowest first."""
    return ((mask[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1).reshape(-1)[:size] != 0
