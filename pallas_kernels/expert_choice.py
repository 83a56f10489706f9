"""Which rows go to which expert: lists for kernels that go expert by expert, in one small launch.

For a row with router logits `l` its experts `e_1 … e_k` are those of the largest, of equal ones the
lower first, and its weights `w_j = exp(l_{e_j}) / Σ_i exp(l_{e_i})`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.routing import keys_of_rows, logit_of


class Choice(NamedTuple):
    """Who is sent where; a pair of row and choice is the number `row·k + choice`.

    Attributes:
        pairs: of each expert, `[E, R]` int32.
        busy: `[2, B]` int32, experts that have pairs and how many; past their end none.
        weights: of each pair, `[R·k]` float32.
    """

    pairs: Any
    busy: Any
    weights: Any


_LEAST = -(2**31)


def list_pairs(logits: jax.Array, k: int, impl: Impl, *, warps: int = 16) -> Choice:
    """Router logits `[R, E]` bfloat16 -> each expert's pairs. One program, for all have a say."""
    R, E = logits.shape
    block, most = min(32, max(8, pl.next_power_of_2(R))), min(E, R * k)

    def body(logits: Any, *refs: Any) -> None:
        out, expert = Choice(*refs), jnp.arange(E)

        def rows(number: jax.Array, before: jax.Array) -> jax.Array:
            """Rows of a block, whose experts have so many pairs already."""
            r = number * block + jnp.arange(block)
            keys = keys_of_rows(logits, jnp.minimum(r, R - 1))
            shares, highest = [], logit_of(jnp.max(keys, axis=1))
            for j in range(k):
                best = jnp.max(keys, axis=1)
                # What is taken makes way for the number of its choice, which is below all keys.
                keys = jnp.where(keys == best[:, None], _LEAST + j, keys)
                shares.append(jnp.exp(logit_of(best) - highest))
            total = jnp.zeros(block, jnp.float32)
            for share in shares:
                total = total + share
            for j, share in enumerate(shares):
                plt.store(out.weights.at[r * k + j], share / total, mask=r < R)
            sent = (keys < _LEAST + k) & (r < R)[:, None]
            count = sent.astype(jnp.int32)
            # Interpreted, a masked store writes back what it found: let that be outside.
            slot = jnp.where(sent, before[None, :] + jnp.cumsum(count, axis=0) - count, R)
            at = out.pairs.at[jnp.broadcast_to(expert[None, :], slot.shape), slot]
            plt.store(at, r[:, None] * k + (keys - _LEAST), mask=sent)
            return before + jnp.sum(count, axis=0)

        counts = lax.fori_loop(0, -(-R // block), rows, jnp.zeros(E, jnp.int32))
        busy = (counts > 0).astype(jnp.int32)
        at = jnp.where(counts > 0, jnp.cumsum(busy) - busy, most)
        plt.store(out.busy.at[0, at], expert, mask=counts > 0)
        plt.store(out.busy.at[1, at], counts, mask=counts > 0)
        idle = (expert >= jnp.sum(busy)) & (expert < most)
        plt.store(out.busy.at[1, expert], jnp.zeros(E, jnp.int32), mask=idle)

    shapes = ((E, R), jnp.int32), ((2, most), jnp.int32), ((R * k,), jnp.float32)
    out = [jax.ShapeDtypeStruct(*one) for one in shapes]
    return Choice(
        *triton_call(
            body, logits, grid=(1,), out_shape=out, impl=impl, name="expert_pairs", warps=warps
        )
    )
