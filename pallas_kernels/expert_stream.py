"""A stream of experts' NVFP4 tiles through tensor cores, on Pallas' Mosaic backend.

Rows are grouped by expert beforehand: group `i` has `N` rows of inputs (some unused) for one
expert. For every group and every tile of 128 rows of its expert's weight this computes

    y[m, n] = Σ_k w[m, k] x[i, n, k]                          w = e2m1(q) · block_scale

A block of one warpgroup takes a run of such tiles. Their codes, block scales and inputs come piece
by piece along K into a ring in shared memory; each piece is asked for as soon as the one before it
in its place is done with, across tiles and experts, so that memory never waits for arithmetic. A
tile is two halves of 64 rows. Hopper's tensor cores take their left operand from registers: while
they multiply the codes of one half, those of the other are made into bfloat16 in other registers.

A thread has to convert 16 neighbouring bytes of a row at a time, as `pallas_kernels.matmul`
explains; inputs are in that order (`in_order`), and so are the results of the first product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import Impl
from pallas_kernels.expert_registers import MIXED, SPAN, converted, meet, scattered, swizzle
from pallas_kernels.matmul import CODES, dequantise
from pallas_kernels.weights import NVFP4_BLOCK

HALF = 64
"""Rows of a tensor core's left operand."""

LIST = 32
"""The list of groups is copied to shared memory in rows of so many numbers."""

ACC: Any = plgpu.WGMMAAccumulatorRef
tiling: Any = plgpu.TilingTransform


@dataclass(frozen=True)
class Ring:
    """How the work is cut; none of it shows in the bits.

    Attributes:
        depth: elements of K in a piece, 256 or more: block scales are copied in units of 16 bytes.
        stages: pieces in shared memory.
        blocks: on all multiprocessors together.
        ahead: halves on their way through tensor cores while another is converted, 0 or 1.
    """

    depth: int = 256
    stages: int = 3
    blocks: int = 3 * 132
    ahead: int = 1


@dataclass(frozen=True)
class Product:
    """What is multiplied, and what becomes of it.

    Attributes:
        stack: which of the numbers of layers is its weight's.
        tiles: of an expert.
        K: input features.
        parts: into which K is split; their sums are added one to the other.
        copies: that bring the codes of a piece.
        columns: of the result, a tile.
        index: from layer, expert, tile and copy to where its codes begin, without the axis of K.
        factor: from a reference to factors and a group to what `finish` wants.
        finish: from sums `[64, N]` of both halves and a factor to pieces of the result `[64, N]`.
        turned: whether the result is to have the order in which it is multiplied next.
    """

    stack: int
    tiles: int
    K: int
    parts: int
    copies: int
    columns: int
    index: Callable[..., tuple]
    factor: Callable[..., Any]
    finish: Callable[..., list[jax.Array]]
    turned: bool


def stream(
    product: Product,
    groups: jax.Array,
    index: jax.Array,
    x: jax.Array,
    codes: jax.Array,
    blocks: jax.Array,
    factors: jax.Array,
    dtype: Any,
    *,
    rows: int,
    impl: Impl,
    ring: Ring,
    name: str,
) -> jax.Array:
    """Multiply groups of rows with their experts.

    Args:
        product: see `Product`.
        groups: `[G]` int32, `G` a multiple of `LIST`: the expert of
            each; the last, how many there are.
        index: int32, numbers of layers.
        x: inputs of the groups, `[G·rows, K]` bfloat16, `in_order`.
        codes: `[…, K/8]` uint32.
        blocks: `[…, K/16]` float8_e4m3fn.
        factors: float32, for `product.factor`.
        dtype: of the result.
        rows: in a group, a multiple of 8.
        impl: "kernel" or "interpret".
        ring: see `Ring`.
        name: of the kernel.

    Returns:
        `[G·rows, tiles·columns]`, undefined beyond the last group.
    """
    G, interpret = groups.shape[0], impl == "interpret"
    depth, stages, tiles = min(ring.depth, product.K), ring.stages, product.tiles
    pieces, left_over = divmod(product.K, depth * product.parts)
    if left_over or depth < 16 * NVFP4_BLOCK:
        raise ValueError(f"{product.K} inputs in {product.parts} parts, {depth} of them a piece")
    each, pieces = pieces, pieces * product.parts

    def body(
        groups_ref: Any,
        index_ref: Any,
        x_ref: Any,
        codes_ref: Any,
        blocks_ref: Any,
        factors_ref: Any,
        out_ref: Any,
        expert: Any,
        some_codes: Any,
        some_blocks: Any,
        some_x: Any,
        result: Any,
        listed: Any,
        arrived: Any,
        *left: Any,
    ) -> None:
        block, number = lax.axis_index("block"), index_ref[product.stack]
        plgpu.copy_gmem_to_smem(groups_ref, expert, listed)
        plgpu.barrier_wait(listed)
        units = expert[-1 + G // LIST, LIST - 1] * tiles
        first = lax.div(block * units, ring.blocks)
        count = lax.div((block + 1) * units, ring.blocks) - first
        steps = count * pieces

        def fetch(step: jax.Array, slot: jax.Array) -> None:
            unit, piece = first + _div(step, pieces), _rem(step, pieces)
            group, tile = _div(unit, tiles), _rem(unit, tiles)
            for copy in range(product.copies):
                who = expert[_div(group, LIST), _rem(group, LIST)]
                at = product.index(number, who, tile, copy)
                place = (slot, copy) if product.copies > 1 else (slot,)
                for source, to, each in (
                    (codes_ref, some_codes, depth // CODES),
                    (blocks_ref, some_blocks, depth // NVFP4_BLOCK),
                ):
                    here = source.at[*at, pl.ds(piece * each, each)]
                    plgpu.copy_gmem_to_smem(here, to.at[place], arrived.at[slot])
            here = x_ref.at[pl.ds(group * rows, rows), pl.ds(piece * depth, depth)]
            plgpu.copy_gmem_to_smem(here, some_x.at[slot], arrived.at[slot])

        def left_operand(slot: jax.Array, half: int, span: int) -> Any:
            codes, blocks = some_codes.at[slot, half], some_blocks.at[slot, half]
            if not interpret:
                return converted(codes, blocks, span)
            # Where this is simulated, left operands come from shared memory.
            words, scales = (ref[...].reshape(HALF, -1) for ref in (codes, blocks))
            words, scales = words[:, span * 16 :][:, :16], scales[:, span * 8 :][:, :8]
            left[half][...] = dequantise(words, scales, impl)
            plgpu.commit_smem()
            return left[half]

        def multiply(step: jax.Array, sums: tuple) -> None:
            slot = _rem(step, stages)
            plgpu.barrier_wait(arrived.at[slot])
            for span in range(depth // SPAN):
                x = some_x.at[slot, :, pl.ds(span * SPAN, SPAN)].transpose((1, 0))
                for half, total in enumerate(sums):
                    plgpu.wgmma_wait(ring.ahead)
                    plgpu.wgmma(total, left_operand(slot, half, span), x)
            plgpu.wgmma_wait(0)
            if not interpret:
                meet()

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _() -> None:
                turn = lax.axis_index("warp") == _rem(step, 4)
                pl.when(turn & (step + stages < steps))(lambda: fetch(step + stages, slot))

        def unit(number: jax.Array, _: None) -> None:
            group, tile = _div(first + number, tiles), _rem(first + number, tiles)
            factor = product.factor(factors_ref, group)
            totals: list[jax.Array] = []
            for part in range(product.parts):
                start = number * pieces + part * each

                def one(*sums: Any, start: jax.Array = start) -> tuple[jax.Array, ...]:
                    lax.fori_loop(0, each, lambda i, _: multiply(start + i, sums), None)
                    return tuple(total[...] for total in sums)

                acc = ACC((HALF, rows), jnp.float32)
                sums = pl.run_scoped(one, acc, acc)
                totals = [a + b for a, b in zip(totals, sums, strict=True)] if part else [*sums]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if not interpret:
                meet()
            for i, y in enumerate(product.finish(*totals, factor)):
                to, y = result.at[:, pl.ds(i * HALF, HALF)], y.astype(dtype)
                if interpret:
                    to[...] = _scattered(y, product.turned)
                else:
                    scattered(y, to, product.turned)
            plgpu.commit_smem()
            to = pl.ds(group * rows, rows), pl.ds(tile * product.columns, product.columns)
            plgpu.copy_smem_to_gmem(result, out_ref.at[to])

        def start(step: jax.Array, _: None) -> None:
            pl.when(step < steps)(lambda: fetch(step, step))

        lax.fori_loop(0, stages, start, None)
        lax.fori_loop(0, count, unit, None)
        plgpu.wait_smem_to_gmem(0)

    swizzled = tiling((8, 64)), swizzle(128)
    # Else the eight threads that are served at once would all want the same banks.
    mixed = (swizzle(128),) if depth == MIXED else ()
    tile = (stages, 2, 4, HALF // 4)
    scratch = [
        plgpu.SMEM((G // LIST, LIST), jnp.int32),
        plgpu.SMEM((*tile, depth // CODES), jnp.uint32, transforms=mixed),
        plgpu.SMEM((*tile, depth // NVFP4_BLOCK), jnp.float8_e4m3fn),
        plgpu.SMEM((stages, rows, depth), jnp.bfloat16, transforms=swizzled),
        plgpu.SMEM((rows, product.columns), dtype),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * product.copies + 1, num_barriers=stages),
    ]
    if interpret:
        scratch += 2 * [plgpu.SMEM((HALF, SPAN), jnp.bfloat16, transforms=swizzled)]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], tiles * product.columns), dtype),
        scratch_types=scratch,
        grid=(ring.blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )(groups.reshape(-1, LIST), index, x, codes, blocks, factors)


def _scattered(y: jax.Array, turned: bool) -> jax.Array:
    """`expert_registers.scattered` of rows that are in order: `[64, N]` -> `[N, 64]`."""
    if turned:
        # [thread, step // 4, half, step % 4] -> [step // 4, step % 4, thread, half]
        y = y.reshape(4, 2, 2, 4, -1).transpose(1, 3, 0, 2, 4).reshape(HALF, -1)
    return y.T


def _div(a: jax.Array, b: int) -> jax.Array:
    """Of numbers that are not negative, which the compiler does not know."""
    return lax.div(a, b) if b & (b - 1) else lax.shift_right_logical(a, b.bit_length() - 1)


def _rem(a: jax.Array, b: int) -> jax.Array:
    return lax.rem(a, b) if b & (b - 1) else a & (b - 1)
