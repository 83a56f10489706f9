"""Choosing tokens on the device, the same with and without speculation.

The noise behind a sampled token is a function of the request's seed and the token's index alone.
A draft is therefore accepted exactly when it is the token that would have been sampled anyway:
speculation changes when a token is known, never which one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import each


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """Sampling parameters of `B` slots, each `[B]`; see `SamplingParams`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


def init_sampler(batch: int) -> Sampler:
    """Greedy for every slot."""
    return Sampler(
        temperature=jnp.zeros(batch),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch),
        min_p=jnp.zeros(batch),
        seed=jnp.zeros(batch, jnp.uint32),
    )


def sample(
    scores: jax.Array, sampler: Sampler, index: jax.Array, tile: int
) -> tuple[jax.Array, jax.Array]:
    """Choose a token for every row.

    Args:
        scores: `[B, T, V]` float32 logits.
        sampler: of the `B` sequences.
        index: `[B, T]`, where in its sequence the chosen token will stand.
        tile: see `pallas_kernels.rows`.

    Returns:
        Tokens `[B, T]` int32 and their log probabilities `[B, T]` under the raw scores.
    """

    def sequence(scores: jax.Array, sampler: Sampler, index: jax.Array):
        return each(lambda s, i: _sample_row(s, sampler, i), tile, scores, index)

    return each(sequence, tile, scores, sampler, index)


def _sample_row(scores: jax.Array, p: Sampler, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One row `[V]`, with scalar parameters."""
    # Not a division: XLA turns that into this product inside loops, and only there.
    scaled = scores * (1 / jnp.maximum(p.temperature, 1e-6))
    allowed = jnp.where(keep(scaled, p.top_k, p.top_p, p.min_p), scaled, -jnp.inf)
    noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(p.seed), index), scores.shape)
    greedy = p.temperature == 0
    token = jnp.argmax(jnp.where(greedy, scores, allowed + noise)).astype(jnp.int32)
    return token, scores[token] - jax.nn.logsumexp(scores)


def keep(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which of the scores `[V]` survive top-k, then top-p among those, then min-p.

    Thresholds are found by bisection on the ordered bits of float32, never by sorting: a count or a
    sum over the vocabulary a step, 32 steps, exact. Scores equal to a threshold all survive.
    """
    size = scores.shape[0]
    order = _ordered(scores)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    above = _largest(lambda t: jnp.sum(order >= t) >= k)
    probability = jax.nn.softmax(jnp.where(order >= above, scores, -jnp.inf))
    mass = _largest(lambda t: jnp.sum(jnp.where(order >= t, probability, 0.0)) >= top_p)
    # A sum of many small numbers may stop just short of one.
    nucleus = jnp.where(top_p < 1, jnp.maximum(above, mass), above)
    return (order >= nucleus) & (scores >= jnp.max(scores) + jnp.log(min_p))


def _ordered(x: jax.Array) -> jax.Array:
    """float32 -> int32 that compares the same way."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest int32 for which a predicate that is true up to some point is true."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        good = holds(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    limits = jnp.iinfo(jnp.int32)
    bounds = (jnp.int32(limits.min), jnp.int32(limits.max))
    return lax.fori_loop(0, 32, halve, bounds)[0]
