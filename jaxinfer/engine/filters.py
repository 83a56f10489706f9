"""One row of scores on its way to a token: penalties, bans, the filters of sampling, the top list.

Nothing here sorts the vocabulary: a threshold is searched for in the bits of float32, and the
likeliest few tokens are taken one after another.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.thresholds import ordered

DIGIT = 4
"""Bits of a threshold that are found in one pass over the vocabulary."""


def penalise(
    scores: jax.Array,
    counts: jax.Array,
    prompted: jax.Array,
    presence: jax.Array,
    frequency: jax.Array,
    repetition: jax.Array,
) -> jax.Array:
    """Scores `[V]` after the penalties; neutral ones (0, 0 and 1) leave every bit.

    Args:
        scores: `[V]` float32.
        counts: `[V]` int32, how often each token was generated.
        prompted: `[V]` bool, tokens of the prompt.
        presence: scalar, subtracted from the scores of generated tokens.
        frequency: scalar, subtracted as often as they were generated.
        repetition: scalar above 0, divides the positive and multiplies the other scores of tokens
            generated or in the prompt.
    """
    generated = counts > 0
    # Not a division: XLA turns that into this product inside loops, and only there.
    repeated = scores * jnp.where(scores > 0, 1 / repetition, repetition)
    scores = jnp.where(prompted | generated, repeated, scores)
    return scores - presence * generated - frequency * counts


def banned(
    size: int, bad: jax.Array, tail: jax.Array, stops: jax.Array, early: jax.Array
) -> jax.Array:
    """Tokens `[size]` that would complete a bad word, or end generation too early.

    Args:
        size: of the vocabulary.
        bad: `[WORDS, LENGTH]` int32, right-aligned; -1 pads, and a row that ends in it is no word.
        tail: `[LENGTH - 1]` int32, the tokens before; -1 where there is none.
        stops: ids that end generation; -1 pads.
        early: scalar bool, whether it is too early for those.
    """
    begun = jnp.all((bad[:, :-1] < 0) | (bad[:, :-1] == tail), axis=1)
    completing = jnp.where(begun, bad[:, -1], -1)
    out = jnp.concatenate([completing, jnp.where(early, stops, -1)])
    return jnp.zeros(size, bool).at[jnp.where(out < 0, size, out)].set(True, mode="drop")


def restrict(
    scores: jax.Array, bias: jax.Array, allowed: jax.Array, banned: jax.Array
) -> jax.Array:
    """Biased scores, minus infinity where a token must not be chosen; all arrays `[V]`.

    Where that leaves nothing, `banned` does not count; where that still leaves nothing, only
    `allowed` does.
    """
    biased = scores + bias
    left = jnp.where(allowed, scores, -jnp.inf)
    for stricter in (allowed, allowed & ~banned):
        fewer = jnp.where(stricter, biased, -jnp.inf)
        left = jnp.where(jnp.max(fewer) > -jnp.inf, fewer, left)
    return left


def keep(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which of the scores `[V]` survive top-k, then top-p among those, then min-p.

    A threshold costs eight passes of counts or sums over the vocabulary, and is exact. Scores equal
    to a threshold all survive.
    """
    size = scores.shape[0]
    order = ordered(scores)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    above = _largest(lambda t: jnp.sum(order >= t) >= k)
    probability = jax.nn.softmax(jnp.where(order >= above, scores, -jnp.inf))
    mass = _largest(lambda t: jnp.sum(jnp.where(order >= t, probability, 0.0)) >= top_p)
    # A sum of many small numbers may stop just short of one.
    nucleus = jnp.where(top_p < 1, jnp.maximum(above, mass), above)
    return (order >= nucleus) & (scores >= jnp.max(scores) + jnp.log(min_p))


def likeliest(scores: jax.Array, count: int) -> jax.Array:
    """The `count` tokens of the highest scores `[V]`, highest first; of equal ones the lower id."""

    def take(order: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        token = jnp.argmax(order).astype(jnp.int32)
        # Below minus infinity, so that padding is not taken twice while any is left.
        return order.at[token].set(jnp.iinfo(jnp.int32).min), token

    return lax.scan(take, ordered(scores), length=count)[1]


def _largest(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest int32 for which a predicate that is true up to some point is true.

    It is found digit by digit, the digit by trying all of them at once: on a GPU many thresholds
    cost little more than one, which reading the vocabulary again does.
    """
    digits = jnp.arange(1, 1 << DIGIT)

    def refine(step: jax.Array, low: jax.Array) -> jax.Array:
        # Products and sums wrap around at 32 bits and end up where they should.
        unit = 1 << (32 - DIGIT * (step + 1))
        return low + unit * jnp.sum(jax.vmap(holds)(low + unit * digits))

    return lax.fori_loop(0, 32 // DIGIT, refine, jnp.int32(jnp.iinfo(jnp.int32).min))
