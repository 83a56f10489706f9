"""Attention of pieces of prompts to pages of keys and values, by Pallas on Mosaic GPU.

What is computed is told at `pallas_kernels.paged_attention`; this is for pieces and pages of 64
tokens, heads of 256 channels and bfloat16. The kernel is written for Hopper (after Shah et al.,
FlashAttention-3, 2024), in the manner of `picture_attention_mosaic`: as many programs as there are
multiprocessors go through pieces of work, each the queries of a piece of a prompt and two heads
that share a key head. One warpgroup of a program has the tensor memory accelerator bring queries,
gates, keys and values, and each of two others attends for a head. Two programs next to each other
have the same piece of work for other heads of the same key head, and bring each half of its keys
and values for both. With `S_j = q K_jᵀ` for block j and c = log2(e) / sqrt(d), each streams

    m_j = max(m_{j-1}, max S_j)      f_j = 2^(c m_{j-1} - c m_j)      P_j = 2^(c S_j - c m_j)
    l_j = f_j l_{j-1} + Σ P_j        O_j = f_j O_{j-1} + P_j V_j      o = O / l

over the pages from the piece's own, the only one of which not all is seen, back to the first, and
multiplies `q K_{j+1}ᵀ` and `P_j V_j` while it computes `P_{j+1}`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import Impl
from pallas_kernels.paged_attention import LOG2_E, gated
from pallas_kernels.picture_attention_mosaic import Ring

ROWS = 64
"""Queries of a warpgroup, and keys of a block: tokens of a piece, and of a page."""

WIDTH = 256
"""Channels of a head."""

SCALE = WIDTH**-0.5 * LOG2_E
"""Of scores, in units of log2."""

CONSUMERS = 2
"""Warpgroups that attend. Their sums take half of the registers."""

STAGES = 2
"""Blocks of keys and of values in flight: what shared memory has room for beside queries."""

REGISTERS = (24, 240)
"""Of a thread that brings, and of one that attends."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
        together: programs that share what they bring, 1 or 2, if there are heads for two. Decides
            about no bit, like the other.
        programs: at most; the multiprocessors of the GPU.
    """

    together: int = 2
    programs: int = 132


def fits(q: jax.Array, k_pages: jax.Array) -> bool:
    """Whether queries `[P, T, H, d]` and pages `[L, N, page, Hkv, d]` are this kernel's."""
    page, Hkv, d = k_pages.shape[2:]
    alike = q.dtype == jnp.bfloat16 and k_pages.dtype == jnp.bfloat16
    shared = q.shape[2] // Hkv % CONSUMERS == 0
    return alike and page == q.shape[1] == ROWS and d == WIDTH and shared


def prefill_attention_mosaic(
    index: jax.Array,
    q: jax.Array,
    q_gate: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    *,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Gated attention of pieces to all up to each of their tokens, whose keys the pages have.

    Interpreted, each warpgroup holds a thread of XLA's, of which there are as many as processors,
    or as the environment's NPROC says: with too few for all it waits for ever.

    Args:
        index: `[1…]` int32, first of all which layer of the pages.
        q: `[P, 64, H, 256]` bfloat16, normed and turned.
        q_gate: `[P, 64, H·2·256]` bfloat16, query and gate side by side within each head.
        k_pages: `[L, N, 64, Hkv, 256]` bfloat16.
        v_pages: the same.
        table: `[P, M]` int32, pages of each piece's sequence.
        start: `[P]` int32, index of its first token, a multiple of 64.
        impl: "kernel" or "interpret".
        tiles: how to cut the work.

    Returns:
        `[P, 64, H·256]` bfloat16.

    Raises:
        ValueError: shapes or types are not this kernel's.
    """
    tiles = tiles or Tiles()
    if tiles.together not in (1, 2) or not fits(q, k_pages):
        raise ValueError(f"{tiles}: not for queries {q.shape} and pages {k_pages.shape}")
    return _call(index, q, q_gate, k_pages, v_pages, table, start, tiles, impl)


class Work(NamedTuple):
    """A piece of work.

    Attributes:
        piece: of a prompt.
        head: the first of two.
        key_head: what they read.
        blocks: pages up to the piece's own.
    """

    piece: jax.Array
    head: jax.Array
    key_head: jax.Array
    blocks: jax.Array


@partial(jax.jit, static_argnames=("tiles", "impl"))
def _call(
    index: jax.Array,
    q: jax.Array,
    q_gate: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    tiles: Tiles,
    impl: Impl,
) -> jax.Array:
    """Jitted, to be lowered once for all layers."""
    interpreted = impl == "interpret"
    (P, _, H, _), (_, N, _, Hkv, _), M = q.shape, k_pages.shape, table.shape[1]
    # A copy for several programs cannot be interpreted.
    together = 1 if interpreted or H // Hkv % (2 * CONSUMERS) else tiles.together
    groups = H // (CONSUMERS * together)
    items = P * groups
    programs = min(tiles.programs // together, items)

    def work(turn: Any, start: Any) -> Work:
        """The longest first, which are mostly the last pieces, and every other turn backwards, so
        that all programs have as much to do."""
        place = lax.axis_index("program")
        place = jnp.where(lax.rem(turn, 2) == 0, place, programs - 1 - place)
        item = turn * programs + place
        piece, group = P - 1 - lax.div(item, groups), lax.rem(item, groups)
        head = group * (CONSUMERS * together)
        if together > 1:
            head += lax.axis_index("neighbour") * CONSUMERS
        blocks = jnp.minimum(lax.div(start[piece], ROWS), M - 1) + 1
        return Work(piece, head, lax.div(head, H // Hkv), blocks)

    def turns() -> jax.Array:
        """How many pieces of work a program has."""
        whole, rest = divmod(items, programs)
        place = lax.axis_index("program")
        place = place if whole % 2 == 0 else programs - 1 - place
        return whole + (place < rest).astype(jnp.int32)

    def body(*refs: Any) -> None:
        index, q, gate, k, v, table, start = refs[:7]
        y, queries, keys, values, weights = refs[7:]
        me, layer = lax.axis_index("warpgroup"), index[0]

        def rows(item: Work) -> Any:
            return pl.ds(item.piece * ROWS, ROWS)

        def columns(head: Any) -> Any:
            return pl.ds(head * WIDTH, WIDTH)

        @pl.when(me == CONSUMERS)
        def _bring() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="decrease")

            def bring(item: Work, pages: Any, ring: Ring, page: Any, number: Any) -> None:
                first = (layer * N + page) * ROWS
                source = pages.at[pl.ds(first, ROWS), columns(item.key_head)]
                _bring_one(source, ring, lax.rem(number, STAGES), together > 1)

            def piece(i: jax.Array, base: jax.Array) -> jax.Array:
                item = work(i, start)

                def page(j: Any) -> jax.Array:
                    return table[item.piece, jnp.maximum(item.blocks - 1 - j, 0)]

                first, second = page(0), page(1)
                bring(item, k, keys, first, base)
                for w in range(CONSUMERS):
                    _bring_one(q.at[rows(item), columns(item.head + w)], queries, w)

                def block(j: jax.Array, ahead: Any) -> Any:
                    """In the order in which places become free: keys are needed earlier."""
                    this, following = ahead
                    # Looked up on the spot it would hold up the loads of its page.
                    later = page(j + 2)
                    bring(item, k, keys, following, base + j + 1)
                    bring(item, v, values, this, base + j)
                    return following, later

                last, _ = lax.fori_loop(0, item.blocks - 1, block, (first, second))
                end = base + item.blocks
                bring(item, v, values, last, end - 1)
                for w in range(CONSUMERS):
                    gates = gate.at[rows(item), columns(2 * (item.head + w) + 1)]
                    _bring_one(gates, queries, w)
                return end

            lax.fori_loop(0, turns(), piece, jnp.int32(0))
            # All that was lent comes back, so that no barrier is left in the middle of something,
            # and no neighbour still to arrive at one.
            for ring in (queries, keys, values):
                for slot in range(ring.at[0].shape[0]):
                    plgpu.barrier_wait(ring.free.at[slot])

        @pl.when(me < CONSUMERS)
        def _attend() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            plgpu.barrier_arrive(queries.free.at[me])
            for slot in range(STAGES):
                plgpu.barrier_arrive(keys.free.at[slot])
                plgpu.barrier_arrive(values.free.at[slot])
            own = Ring((queries.at[0].at[me],), queries.full.at[me], queries.free.at[me])
            weights_at = None if weights is None else weights.at[me]

            def piece(i: jax.Array, base: jax.Array) -> jax.Array:
                item = work(i, start)

                def slot(j: Any) -> jax.Array:
                    return lax.rem(base + j, STAGES)

                plgpu.barrier_wait(own.full)
                o = _streamed(_Products(own, keys, values, weights_at, slot), item.blocks)
                # Where the queries were, there is the gate now, and then the result.
                (at,) = own.at
                plgpu.barrier_wait(own.full)
                opening = plgpu.load(at, layout=plgpu.Layout.WGMMA)
                at[...] = gated(o, opening)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(at, y.at[rows(item), columns(item.head + me)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own.free)
                return base + item.blocks

            lax.fori_loop(0, turns(), piece, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def shared(places: int, columns: int) -> Any:
        return plgpu.SMEM((places, ROWS, columns), jnp.bfloat16)

    def ring(places: int, users: int, free: Callable[..., Any] = plgpu.Barrier) -> Ring:
        return Ring(
            (shared(places, WIDTH),),
            plgpu.Barrier(num_arrivals=1, num_barriers=places),
            free(num_arrivals=users, num_barriers=places),
        )

    by_both = partial(plgpu.ClusterBarrier, collective_axes=("neighbour",))
    of_pages = partial(ring, STAGES, CONSUMERS, by_both if together > 1 else plgpu.Barrier)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((P * ROWS, H * WIDTH), jnp.bfloat16),
        scratch_types=(
            ring(CONSUMERS, 1),
            of_pages(),
            of_pages(),
            shared(CONSUMERS, ROWS) if interpreted else None,
        ),
        grid=(programs,),
        grid_names=("program",),
        cluster=(together,) if together > 1 else (),
        cluster_names=("neighbour",) if together > 1 else (),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="prefill_attention_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpreted else None,
    )
    pages = (x.reshape(-1, Hkv * WIDTH) for x in (k_pages, v_pages))
    tokens = q.reshape(P * ROWS, H * WIDTH), q_gate.reshape(P * ROWS, 2 * H * WIDTH)
    return kernel(index, *tokens, *pages, table, start).reshape(P, ROWS, H * WIDTH)


def _bring_one(source: Any, ring: Ring, slot: Any, for_both: bool = False) -> None:
    """Have a place of a ring filled as soon as it is free, or those of two programs, half each."""
    plgpu.barrier_wait(ring.free.at[slot])
    axes = "neighbour" if for_both else None
    (at,) = ring.at
    plgpu.copy_gmem_to_smem(source, at.at[slot], ring.full.at[slot], collective_axes=axes)


@dataclass(frozen=True)
class _Products:
    """What a warpgroup multiplies for a piece of work.

    Attributes:
        query: its own.
        keys: of both warpgroups.
        values: the same.
        weights: a place for its own where products from registers cannot be interpreted, or None.
        slot: place of a block of keys, and of one of values.
    """

    query: Ring
    keys: Ring
    values: Ring
    weights: Any
    slot: Callable[[Any], jax.Array]

    @property
    def interpreted(self) -> bool:
        return self.weights is not None

    def operand(self, p: jax.Array) -> Any:
        if not self.interpreted:
            return p
        self.weights[...] = p
        plgpu.commit_smem()
        return self.weights

    def multiply_keys(self, scores: Any, j: Any) -> None:
        """Ask for the scores of block j."""
        plgpu.wgmma(scores, self.query.at[0], self.keys.at[0].at[self.slot(j)].transpose((1, 0)))

    def multiply_values(self, out: Any, p: Any, j: Any) -> None:
        """Ask for what weights p make of the values of block j."""
        plgpu.wgmma(out, p, self.values.at[0].at[self.slot(j)])

    def start(self, out: Any, o: jax.Array, fade: jax.Array) -> None:
        """Products are added to what there is; interpreted, they are by `total`."""
        if not self.interpreted:
            out[...] = o * _wide(fade, WIDTH)

    def total(self, out: jax.Array, o: jax.Array, fade: jax.Array) -> jax.Array:
        return o * _wide(fade, WIDTH) + out if self.interpreted else out


def _streamed(products: _Products, blocks: jax.Array) -> jax.Array:
    """Attention of a warpgroup's queries to all blocks, `[64, 256]` float32; gives the place of the
    queries back."""
    keys, values, slot = products.keys, products.values, products.slot
    scores_of = plgpu.WGMMAAccumulatorRef((ROWS, ROWS), jnp.float32)
    out_of = plgpu.WGMMAAccumulatorRef((ROWS, WIDTH), jnp.float32)

    plgpu.barrier_wait(keys.full.at[slot(0)])

    def first(scores: Any) -> jax.Array:
        products.multiply_keys(scores, 0)
        return scores[...]

    scores = pl.run_scoped(first, scores_of)
    plgpu.barrier_arrive(keys.free.at[slot(0)])
    plgpu.barrier_arrive(products.query.free, predicate=blocks == 1)
    token, key = (
        plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
    scores = jnp.where(key <= token, scores, -jnp.inf)
    peak = jnp.max(scores, axis=1)
    p, total = _weights(scores, peak)
    fade = jnp.zeros_like(peak)
    o = plgpu.layout_cast(jnp.zeros((ROWS, WIDTH), jnp.float32), plgpu.Layout.WGMMA)
    plgpu.barrier_wait(values.full.at[slot(0)])

    def step(j: Any, carry: Any) -> Any:
        """Values of block j, and weights of block j + 1."""
        o, fade, peak, total, p = carry
        plgpu.barrier_wait(keys.full.at[slot(j + 1)])
        operand = products.operand(p)

        def both(scores_at: Any, out_at: Any) -> Any:
            products.multiply_keys(scores_at, j + 1)
            products.start(out_at, o, fade)
            products.multiply_values(out_at, operand, j)
            scores = plgpu.wgmma_accumulator_load(scores_at, wait_n=1)
            plgpu.barrier_arrive(keys.free.at[slot(j + 1)])
            plgpu.barrier_arrive(products.query.free, predicate=j + 2 == blocks)
            highest = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights, added = _weights(scores, highest)
            faded = jnp.exp2(peak * SCALE - highest * SCALE)
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

    o, fade, peak, total, p = lax.fori_loop(0, blocks - 1, step, (o, fade, peak, total, p))
    operand = products.operand(p)

    def last(out: Any) -> jax.Array:
        products.start(out, o, fade)
        products.multiply_values(out, operand, blocks - 1)
        return out[...]

    o = products.total(pl.run_scoped(last, out_of), o, fade)
    plgpu.barrier_arrive(values.free.at[slot(blocks - 1)])
    return o * _wide(1 / total, WIDTH)


def _weights(scores: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights bfloat16, and their sums before they were rounded."""
    p = jnp.exp2(scores * SCALE - _wide(peak * SCALE, ROWS))
    return p.astype(jnp.bfloat16), jnp.sum(p, axis=1)


def _wide(x: jax.Array, columns: int) -> jax.Array:
    """A number for each row in all columns."""
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])
