"""What kernels of attention on Mosaic GPU share: a softmax streamed over blocks of keys.

Written for Hopper (after Shah et al., FlashAttention-3, 2024). One warpgroup of a program has the
tensor memory accelerator bring queries, keys and values into rings of places in shared memory;
each of the others attends for 64 queries. With `S_j = q K_jᵀ` for block j and c = log2(e) / sqrt(d)
it streams

    m_j = max(m_{j-1}, max S_j)      f_j = 2^(c m_{j-1} - c m_j)      P_j = 2^(c S_j - c m_j)
    l_j = f_j l_{j-1} + Σ P_j        O_j = f_j O_{j-1} + P_j V_j      o = O / l

and multiplies `q K_{j+1}ᵀ` and `P_j V_j` while it computes `P_{j+1}`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import LOG2_E

ROWS = 64
"""Queries of a warpgroup."""


class Ring(NamedTuple):
    """Places in shared memory; barriers that tell of each that it is full, and that it is free."""

    at: tuple[Any, ...]
    full: Any
    free: Any

    @property
    def places(self) -> int:
        """How many."""
        return self.at[0].shape[0]

    def place(self, slot: Any) -> "Ring":
        """One of them, by itself."""
        return Ring(tuple(at.at[slot] for at in self.at), self.full.at[slot], self.free.at[slot])


def shared(places: int, rows: int, columns: int, kind: Any, transforms: Any = ()) -> Any:
    """So many places in shared memory."""
    return plgpu.SMEM((places, rows, columns), kind, transforms=transforms)


def ring_of(*at: Any, users: int, free: Callable[..., Any] = plgpu.Barrier) -> Ring:
    """A ring of places that are each filled by a copy to each of `at`, and freed by all users."""
    (places, *_) = at[0].shape
    full = plgpu.Barrier(num_arrivals=len(at), num_barriers=places)
    return Ring(at, full, free(num_arrivals=users, num_barriers=places))


def lend(*rings: Ring) -> None:
    """Tell of rings with equally many places that a user needs none of them yet."""
    for slot in range(rings[0].places):
        for ring in rings:
            plgpu.barrier_arrive(ring.free.at[slot])


def bring(sources: Sequence[Any], ring: Ring, slot: Any, axes: str | None = None) -> None:
    """Have a place of a ring filled as soon as it is free, or those of programs along an axis, a
    part by each."""
    plgpu.barrier_wait(ring.free.at[slot])
    for source, at in zip(sources, ring.at, strict=True):
        plgpu.copy_gmem_to_smem(source, at.at[slot], ring.full.at[slot], collective_axes=axes)


def await_all(*rings: Ring) -> None:
    """Wait for all that was lent, so that no barrier is left in the middle of something, and no
    neighbour still to arrive at one."""
    for ring in rings:
        for slot in range(ring.places):
            plgpu.barrier_wait(ring.free.at[slot])


@dataclass(frozen=True)
class Products:
    """What a warpgroup multiplies for a piece of work.

    Attributes:
        query: its own, `[64, d]`.
        keys: of all warpgroups, blocks of `[K, d]`.
        values: the same.
        weights: a place for its own where products from registers cannot be interpreted, or None.
        first: how many blocks were brought before its own.
    """

    query: Any
    keys: Ring
    values: Ring
    weights: Any
    first: jax.Array

    @property
    def block(self) -> int:
        """Keys of a block, K."""
        return self.keys.at[0].shape[1]

    @property
    def width(self) -> int:
        """Channels of a head, d."""
        return self.keys.at[0].shape[2]

    @property
    def scale(self) -> float:
        """Of scores, in units of log2."""
        return self.width**-0.5 * LOG2_E

    @property
    def interpreted(self) -> bool:
        """Whether all this runs on a CPU."""
        return self.weights is not None

    def slot(self, j: Any) -> jax.Array:
        """Place of a block of keys, and of one of values."""
        return lax.rem(self.first + j, self.keys.places)

    def operand(self, p: jax.Array) -> Any:
        """Weights p, where a product can read them."""
        if not self.interpreted:
            return p
        self.weights[...] = p
        plgpu.commit_smem()
        return self.weights

    def multiply_keys(self, scores: Any, j: Any) -> None:
        """Ask for the scores of block j."""
        plgpu.wgmma(scores, self.query, self.keys.at[0].at[self.slot(j)].transpose((1, 0)))

    def multiply_values(self, out: Any, p: Any, j: Any) -> None:
        """Ask for what weights p make of the values of block j."""
        plgpu.wgmma(out, p, self.values.at[0].at[self.slot(j)])

    def start(self, out: Any, o: jax.Array, fade: jax.Array) -> None:
        """Have products added to what there is, faded; interpreted, `total` adds them."""
        if not self.interpreted:
            out[...] = o * _wide(fade, self.width)

    def total(self, out: jax.Array, o: jax.Array, fade: jax.Array) -> jax.Array:
        """What there is after a product."""
        return o * _wide(fade, self.width) + out if self.interpreted else out

    def weighed(self, scores: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights bfloat16, and their sums before they were rounded."""
        p = jnp.exp2(scores * self.scale - _wide(peak * self.scale, self.block))
        return p.astype(jnp.bfloat16), jnp.sum(p, axis=1)


def streamed(
    products: Products,
    blocks: int | jax.Array,
    *,
    causal: bool = False,
    query_free: Any = None,
    at_once: int = 1,
) -> jax.Array:
    """Attention of a warpgroup's queries to all blocks.

    Args:
        products: what is multiplied.
        blocks: how many, one at least.
        causal: of the first block, whose keys are those of the queries, each query sees the keys
            up to its own.
        query_free: None, or a barrier that tells that all scores are there, and the queries no
            longer needed.
        at_once: blocks a turn of the loop, 1 unless their number is static.

    Returns:
        `[64, d]` float32.
    """
    keys, values, slot, scale = products.keys, products.values, products.slot, products.scale
    scores_of = plgpu.WGMMAAccumulatorRef((ROWS, products.block), jnp.float32)
    out_of = plgpu.WGMMAAccumulatorRef((ROWS, products.width), jnp.float32)

    def scores_are_there(j: Any) -> None:
        plgpu.barrier_arrive(keys.free.at[slot(j)])
        if query_free is not None:
            plgpu.barrier_arrive(query_free, predicate=j + 1 == blocks)

    plgpu.barrier_wait(keys.full.at[slot(0)])

    def first(scores: Any) -> jax.Array:
        products.multiply_keys(scores, 0)
        return scores[...]

    scores = pl.run_scoped(first, scores_of)
    scores_are_there(0)
    if causal:
        token, key = (
            plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        scores = jnp.where(key <= token, scores, -jnp.inf)
    peak = jnp.max(scores, axis=1)
    p, total = products.weighed(scores, peak)
    fade = jnp.zeros_like(peak)
    o = plgpu.layout_cast(jnp.zeros((ROWS, products.width), jnp.float32), plgpu.Layout.WGMMA)
    plgpu.barrier_wait(values.full.at[slot(0)])

    def step(j: Any, carry: Any) -> Any:
        """Values of block j, and weights of block j + 1."""
        o, fade, peak, total, p = carry
        plgpu.barrier_wait(keys.full.at[slot(j + 1)])
        operand = products.operand(p)

        def both(scores_at: Any, out_at: Any) -> Any:
            products.start(out_at, o, fade)
            products.multiply_keys(scores_at, j + 1)
            products.multiply_values(out_at, operand, j)
            scores = plgpu.wgmma_accumulator_load(scores_at, wait_n=1)
            scores_are_there(j + 1)
            highest = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights, added = products.weighed(scores, highest)
            faded = jnp.exp2(peak * scale - highest * scale)
            new = faded, highest, total * faded + added, weights
            if not products.interpreted:
                new = lax.optimization_barrier(new)
            # Needed for the next step; and to wait is to branch, before which the assembler leaves
            # the weights, that are to be computed before this product is over.
            plgpu.barrier_wait(values.full.at[slot(j + 1)])
            out = plgpu.wgmma_accumulator_load(out_at, wait_n=0)
            plgpu.barrier_arrive(values.free.at[slot(j)])
            if not products.interpreted:  # Until here its registers were the product's to read.
                *new, _ = lax.optimization_barrier((*new, p))
            return products.total(out, o, fade), *new

        return pl.run_scoped(both, scores_of, out_of)

    o, fade, peak, total, p = _repeated(step, blocks - 1, at_once, (o, fade, peak, total, p))
    operand = products.operand(p)

    def last(out: Any) -> jax.Array:
        products.start(out, o, fade)
        products.multiply_values(out, operand, blocks - 1)
        return out[...]

    o = products.total(pl.run_scoped(last, out_of), o, fade)
    plgpu.barrier_arrive(values.free.at[slot(blocks - 1)])
    return o * _wide(1 / total, products.width)


def _wide(x: jax.Array, columns: int) -> jax.Array:
    """A number for each row in all columns."""
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def _repeated(step: Callable[[Any, Any], Any], count: Any, at_once: int, carry: Any) -> Any:
    """So many steps, some at once in a loop, and what is left after it."""
    if at_once == 1:
        return lax.fori_loop(0, count, step, carry)

    def steps(i: jax.Array, carry: Any) -> Any:
        for j in range(at_once):
            carry = step(at_once * i + j, carry)
        return carry

    carry = lax.fori_loop(0, count // at_once, steps, carry)
    for j in range(count - count % at_once, count):
        carry = step(j, carry)
    return carry
