"""Sorting rows by the experts to which a router sends them.

`choose_experts` finds each row's experts; `group`, with one program an expert, sorts the `M·k`
pairs of row and choice by expert and cuts each expert's into tiles of neighbours.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.routing import expert_of, keys_of, logit_of, without

MOST = 8192
"""Pairs that a program has in registers at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Pairs of row and choice sorted by expert, and by row where the expert is the same.

    Attributes:
        row: of each sorted pair, `[M·k]` int32.
        place: of each pair among the sorted, `[M, k]` int32.
        tiles: `[3, T]` int32: the expert of each tile, its first sorted pair, and where the
            expert's pairs end; a tile that starts there is left over.
    """

    row: jax.Array
    place: jax.Array
    tiles: jax.Array


def choose_experts(logits: jax.Array, k: int, impl: Impl) -> tuple[jax.Array, jax.Array]:
    """Router logits `[M, E]` bfloat16 -> each row's `k` experts, int32, and weights, float32.

    Those of the largest logits, of equal ones the lower first; weights are their softmax.
    """

    def body(logits: Any, chosen: Any, weights: Any) -> None:
        r, choice = pl.program_id(0), jnp.arange(k)
        keys = keys_of(logits, r)
        highest, total = logit_of(jnp.max(keys)), jnp.float32(0)
        experts, shares = jnp.zeros(k, jnp.int32), jnp.zeros(k, jnp.float32)
        for j in range(k):
            first = jnp.max(keys)
            keys = without(keys, first)
            share = jnp.exp(logit_of(first) - highest)
            total = total + share
            experts = jnp.where(choice == j, expert_of(first), experts)
            shares = jnp.where(choice == j, share, shares)
        plt.store(chosen.at[r, choice], experts)
        plt.store(weights.at[r, choice], shares / total)

    M = logits.shape[0]
    out = [jax.ShapeDtypeStruct((M, k), kind) for kind in (jnp.int32, jnp.float32)]
    chosen, weights = triton_call(
        body, logits, grid=(M,), out_shape=out, impl=impl, name="choose_experts", warps=1
    )
    return chosen, weights


def group(chosen: jax.Array, experts: int, rows: int, impl: Impl) -> Groups:
    """Sort pairs by expert and cut each expert's into tiles of `rows`.

    Tiles of an expert whose first pair is `s` begin at place `s // rows + expert`: then there is
    room for those of all before, and no expert need know how many tiles the others have.

    Args:
        chosen: `[M, k]` int32.
        experts: how many there are (E).
        rows: pairs a tile.
        impl: "kernel" or "interpret".
    """
    pairs, k = chosen.size, chosen.shape[1]
    width = min(MOST, max(16, pl.next_power_of_2(pairs)))
    most = pl.next_power_of_2(pairs // rows + 2)

    def body(chosen: Any, row: Any, place: Any, tiles: Any) -> None:
        expert = pl.program_id(0)

        def some(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            pair = i * width + jnp.arange(width)
            there = pair < pairs
            return pair, there, plt.load(chosen.at[pair], mask=there, other=jnp.int32(experts))

        def count(i: jax.Array, before: jax.Array) -> jax.Array:
            return before + jnp.sum((some(i)[2] < expert).astype(jnp.int32))

        def sort(i: jax.Array, start: jax.Array) -> jax.Array:
            pair, there, which = some(i)
            mine = (which == expert).astype(jnp.int32)
            at = start + jnp.cumsum(mine) - mine
            plt.store(place.at[pair], at, mask=there & (mine > 0))
            plt.store(row.at[at], pair // k, mask=there & (mine > 0))
            return start + jnp.sum(mine)

        start = lax.fori_loop(0, -(-pairs // width), count, jnp.int32(0))
        end = lax.fori_loop(0, -(-pairs // width), sort, start)
        number = jnp.arange(most)
        base = start // rows + expert
        own = base + number < end // rows + expert + 1
        first = jnp.minimum(start + rows * number, end)
        for kind, value in enumerate((jnp.full(most, expert), first, jnp.full(most, end))):
            plt.store(tiles.at[kind, base + number], value, mask=own)

    index = jax.ShapeDtypeStruct((pairs,), jnp.int32)
    row, where, tiles = triton_call(
        body,
        chosen.reshape(-1),
        grid=(experts,),
        out_shape=(index, index, jax.ShapeDtypeStruct((3, pairs // rows + experts), jnp.int32)),
        impl=impl,
        name="group_by_expert",
        warps=max(1, min(16, width // 512)),
    )
    return Groups(row, where.reshape(chosen.shape), tiles)
