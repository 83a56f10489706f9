"""Attention of pieces of prompts to pages of keys and values, by Pallas on Mosaic GPU.

What is computed is told at `pallas_kernels.paged_attention`; this is for pieces and pages of 64
tokens, heads of 256 channels and bfloat16. The kernel is written for Hopper, in the manner of
`pallas_kernels.streamed_attention`: as many programs as there are multiprocessors go through pieces
of work, each the queries of a piece of a prompt and two heads that share a key head. One warpgroup
of a program has queries, gates, keys and values brought, and each of two others attends for a head,
over the pages from the piece's own, the only one of which not all is seen, back to the first. Two
programs next to each other have the same piece of work for other heads of the same key head, and
bring each half of its keys and values for both.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import Impl
from pallas_kernels.paged_attention import gated
from pallas_kernels.streamed_attention import (
    ROWS,
    Products,
    Ring,
    await_all,
    bring,
    lend,
    ring_of,
    shared,
    streamed,
)

WIDTH = 256
"""Channels of a head."""

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
    together = q.shape[2] // Hkv % CONSUMERS == 0
    return alike and page == q.shape[1] == ROWS and d == WIDTH and together


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

            def bring_page(item: Work, pages: Any, ring: Ring, page: Any, number: Any) -> None:
                first = (layer * N + page) * ROWS
                source = pages.at[pl.ds(first, ROWS), columns(item.key_head)]
                axes = "neighbour" if together > 1 else None
                bring((source,), ring, lax.rem(number, STAGES), axes)

            def piece(i: jax.Array, base: jax.Array) -> jax.Array:
                item = work(i, start)

                def page(j: Any) -> jax.Array:
                    return table[item.piece, jnp.maximum(item.blocks - 1 - j, 0)]

                first, second = page(0), page(1)
                bring_page(item, k, keys, first, base)
                for w in range(CONSUMERS):
                    bring((q.at[rows(item), columns(item.head + w)],), queries, w)

                def block(j: jax.Array, ahead: Any) -> Any:
                    """In the order in which places become free: keys are needed earlier."""
                    this, following = ahead
                    # Looked up on the spot it would hold up the loads of its page.
                    later = page(j + 2)
                    bring_page(item, k, keys, following, base + j + 1)
                    bring_page(item, v, values, this, base + j)
                    return following, later

                last, _ = lax.fori_loop(0, item.blocks - 1, block, (first, second))
                end = base + item.blocks
                bring_page(item, v, values, last, end - 1)
                for w in range(CONSUMERS):
                    gates = gate.at[rows(item), columns(2 * (item.head + w) + 1)]
                    bring((gates,), queries, w)
                return end

            lax.fori_loop(0, turns(), piece, jnp.int32(0))
            await_all(queries, keys, values)

        @pl.when(me < CONSUMERS)
        def _attend() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            own = queries.place(me)
            (at,) = own.at
            plgpu.barrier_arrive(own.free)
            lend(keys, values)
            weights_at = None if weights is None else weights.at[me]

            def piece(i: jax.Array, base: jax.Array) -> jax.Array:
                item = work(i, start)
                plgpu.barrier_wait(own.full)
                products = Products(at, keys, values, weights_at, base)
                o = streamed(products, item.blocks, causal=True, query_free=own.free)
                # Where the queries were, there is the gate now, and then the result.
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

    by_both = partial(plgpu.ClusterBarrier, collective_axes=("neighbour",))
    free = by_both if together > 1 else plgpu.Barrier
    block = shared(STAGES, ROWS, WIDTH, jnp.bfloat16)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((P * ROWS, H * WIDTH), jnp.bfloat16),
        scratch_types=(
            ring_of(shared(CONSUMERS, ROWS, WIDTH, jnp.bfloat16), users=1),
            ring_of(block, users=CONSUMERS, free=free),
            ring_of(block, users=CONSUMERS, free=free),
            shared(CONSUMERS, ROWS, ROWS, jnp.bfloat16) if interpreted else None,
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
