"""Which rows go to which expert: lists for kernels that go expert by expert, made by one program.

For a row with router logits `l` its experts `e_1 … e_k` are those of the largest, of equal ones the
lower first, and its weights `w_j = exp(l_{e_j}) / Σ_i exp(l_{e_i})`.
"""

from collections.abc import Callable
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


class Order(NamedTuple):
    """Who is sent where, for rows that lie in groups of one expert, the first expert's first.

    Attributes:
        sent: of each pair, `[R·k]` int32: its expert, plus `E` times how many pairs that one has
            before it.
        start: groups before each expert's, `[E + 1]` int32; the last entry is how many there are.
    """

    sent: Any
    start: Any


_LEAST = -(2**31)

TOGETHER = 32
"""Rows up to which all are looked at together: a number has so many bits. Of more, half as many
at a time: a loop wants registers, too."""


def list_pairs(logits: jax.Array, k: int, impl: Impl, *, warps: int = 16) -> Choice:
    """Router logits `[R, E]` bfloat16 -> each expert's pairs. One program, for all have a say."""
    R, E = logits.shape
    most = min(E, R * k)

    def body(logits: Any, *refs: Any) -> None:
        out, expert = Choice(*refs), jnp.arange(E)

        def write(some: Sent) -> None:
            shares = [jnp.exp(logit_of(key) - logit_of(some.keys[0])) for key in some.keys]
            total = jnp.zeros(some.row.shape, jnp.float32)
            for share in shares:
                total = total + share
            for j, share in enumerate(shares):
                plt.store(out.weights.at[some.row * k + j], share / total, mask=some.row < R)
            # Interpreted, a masked store writes back what it found: let that be outside.
            slot = jnp.where(some.there, some.slot, R)
            at = out.pairs.at[jnp.broadcast_to(expert[None, :], slot.shape), slot]
            plt.store(at, some.pair, mask=some.there)

        counts = _each_block(logits, k, write)
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


def put_in_order(logits: Any, k: int, rows: int, out: Order) -> None:
    """Inside a kernel, one program: reference to router logits `[R, E]` -> groups of `rows`."""
    R, E = logits.shape
    expert = jnp.arange(E)

    def write(some: Sent) -> None:
        pair = jnp.where(some.there, some.pair, R * k)
        plt.store(out.sent.at[pair], some.slot * E + expert[None, :], mask=some.there)

    laps = lax.div(_each_block(logits, k, write) + (rows - 1), jnp.int32(rows))
    plt.store(out.start.at[expert], jnp.cumsum(laps) - laps)
    out.start[E] = jnp.sum(laps)


def placed(
    logits: Any, order: Order, k: int, rows: int, pair: jax.Array, there: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inside a kernel: expert, group times `rows` plus place in it, and weight of pairs `[n]`."""
    E, first = logits.shape[1], pair - lax.rem(pair, jnp.int32(k))

    def expert_at(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        sent = plt.load(order.sent.at[pair], mask=there, other=jnp.int32(0))
        return lax.rem(sent, jnp.int32(E)), lax.div(sent, jnp.int32(E))

    def logit(expert: jax.Array) -> jax.Array:
        at = logits.at[lax.div(pair, jnp.int32(k)), expert]
        return plt.load(at, mask=there, other=jnp.zeros((), logits.dtype)).astype(jnp.float32)

    (expert, slot), all_of_row = expert_at(pair), [expert_at(first + j)[0] for j in range(k)]
    start, own = plt.load(order.start.at[expert]), logit(expert)
    every = [logit(one) for one in all_of_row]
    total = jnp.zeros(pair.shape, jnp.float32)
    for one in every:
        total = total + jnp.exp(one - every[0])
    return expert, start * rows + slot, jnp.exp(own - every[0]) / total


def order_shapes(R: int, E: int, k: int) -> Order:
    """Of what `put_in_order` writes."""
    return Order(*(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (R * k, E + 1)))


class Sent(NamedTuple):
    """Who of some rows is sent where.

    Attributes:
        row: its number, `[n]` int32.
        keys: of its experts, `k` times `[n]`, see `pallas_kernels.routing`.
        there: of each row and expert, whether they are a pair, `[n, E]`.
        pair: number of the pair.
        slot: how many pairs the expert has before it.
    """

    row: jax.Array
    keys: list[jax.Array]
    there: jax.Array
    pair: jax.Array
    slot: jax.Array


def _each_block(logits: Any, k: int, write: Callable[[Sent], None]) -> jax.Array:
    """Choose for all rows `[R, E]`, some after others: how many pairs each expert has, `[E]`."""
    R, E = logits.shape
    block = TOGETHER // 2 if R > TOGETHER else max(8, pl.next_power_of_2(R))

    def rows(number: jax.Array, before: jax.Array) -> jax.Array:
        """Rows of a block, whose experts have so many pairs already."""
        i = jnp.arange(block)
        r = number * block + i
        keys, best = keys_of_rows(logits, jnp.minimum(r, R - 1)), []
        for j in range(k):
            best.append(jnp.max(keys, axis=1))
            # What is taken makes way for the number of its choice, which is below all keys.
            keys = jnp.where(keys == best[j][:, None], _LEAST + j, keys)
        there = (keys < _LEAST + k) & (r < R)[:, None]
        # Of the rows that an expert has a number has the bits: one sum says all of their order.
        bit = lax.shift_left(jnp.ones_like(i), i)
        bits = jnp.sum(jnp.where(there, bit[:, None], 0), axis=0)
        earlier = lax.population_count(bits[None, :] & (bit - 1)[:, None])
        pair = r[:, None] * k + (keys - _LEAST)
        write(Sent(r, best, there, pair, before[None, :] + earlier))
        return before + lax.population_count(bits)

    return lax.fori_loop(0, -(-R // block), rows, jnp.zeros(E, jnp.int32))
