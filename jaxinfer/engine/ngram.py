"""Drafts copied from the sequence's own past."""

import jax
import jax.numpy as jnp

LONGEST = 8
SHORTEST = 2


def ngram_drafts(
    history: jax.Array, length: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What followed the last occurrence of the longest suffix that occurred before.

    Args:
        history: `[S]` tokens of one sequence.
        length: how many of them are there.
        count: the most tokens to draft.

    Returns:
        Drafts `[count]`, how many of them are there (0 if no suffix of at least `SHORTEST` tokens
        occurred before), and the length of the suffix that matched, at most `LONGEST`.
    """
    places = jnp.arange(history.shape[0])
    alike = places < length - 1
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(LONGEST):
        shifted = jnp.roll(history, back)
        alike &= (places >= back) & (shifted == history[length - 1 - back])
        matched += alike
    # The longest match; of those the latest.
    best = jnp.argmax(matched * history.shape[0] + places)
    size = matched[best]
    drafts = history[best + 1 + jnp.arange(count)]
    found = jnp.where(size >= SHORTEST, jnp.minimum(count, length - 1 - best), 0)
    return drafts, found, size
