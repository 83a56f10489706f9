"""The best assignment of queries to things, on the device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def assign(costs: jax.Array, wanted: jax.Array) -> jax.Array:
    """The query of each wanted thing, such that the costs add up to the least.

    Exact: queries are taken one by one, and for every set of things it is kept what they cost at
    least so far, 2^N sets in all. N must be small, and at most Q.

    Args:
        costs: `[Q, N]`, finite.
        wanted: `[N]` bool.

    Returns:
        `[N]` int32, all different where wanted, and 0 elsewhere.
    """
    queries, things = costs.shape
    if things > min(queries, 12):
        raise ValueError(
            f"{things} things for {queries} queries: at most 12, and no more than those"
        )
    sets = np.arange(2**things)
    bits = 1 << np.arange(things)
    contains = (sets[:, None] & bits) > 0
    without = sets[:, None] & ~bits

    def extend(least: jax.Array, cost: jax.Array) -> tuple[jax.Array, jax.Array]:
        """With one more query: the least cost of each set, and the thing it gets (N: none)."""
        taken = jnp.where(contains, least[without] + cost, jnp.inf)
        options = jnp.concatenate([taken, least[:, None]], 1)
        return options.min(1), options.argmin(1)

    start = jnp.where(sets == 0, 0.0, jnp.inf)
    _, choices = lax.scan(extend, start, costs)

    def trace(
        state: tuple[jax.Array, jax.Array], step: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        """From the last query back: which thing it got, and the set that was left."""
        left, found = state
        query, choice = step
        thing = choice[left]
        chosen = jnp.arange(things) == thing
        left = left & ~jnp.where(chosen, bits, 0).sum()
        return (left, jnp.where(chosen, query, found)), None

    everything = jnp.where(wanted, bits, 0).sum()
    steps = jnp.arange(queries), choices
    found = jnp.zeros(things, jnp.int32)
    (_, found), _ = lax.scan(trace, (everything, found), steps, reverse=True)
    return found
