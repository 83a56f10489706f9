"""Attention among the tokens of a window, or of a picture, by Pallas on Mosaic GPU.

What is computed is told at `pallas_kernels.picture_attention`. Keys come turned, even channels
before odd ones; queries, each of which is needed once, and values are read where the projection
left them. The kernel is written for Hopper, in the manner of `pallas_kernels.streamed_attention`:
as many programs as there are multiprocessors go through pieces of work, each the queries of some
rows and one head. One warpgroup of a program has queries, keys and values brought, blocks and
pieces of work ahead; each of the others turns 64 queries and attends for them. Powers for weights
take as long as the products beside them: 16 a clock, for 4 d = 256 of the tensor cores' 4096
operations each.
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
from pallas_kernels.picture_attention import (
    by_parts,
    halves,
    picture_attention,
    rounded,
    turn_apart,
    turned,
    words,
)
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
from pallas_kernels.weights import FP8_MAX

WIDTH = 64
"""Channels of a head."""

# To a type checker they are abstract.
_TilingTransform: Any = plgpu.TilingTransform
_SwizzleTransform: Any = plgpu.SwizzleTransform

REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Of a thread that brings and of one that attends, by how many warpgroups attend."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its work.

    Attributes:
        consumers: warpgroups that attend, 2 or 3, for 64 queries each.
        keys: at a time, a multiple of 32 that divides n.
        stages: blocks of keys and of values in flight, 2 at least.
        programs: at most; the multiprocessors of the GPU.
    """

    consumers: int = 3
    keys: int = 96
    stages: int = 4
    programs: int = 132


def picture_attention_mosaic(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    impl: Impl,
    step: jax.Array | None = None,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Attention within groups of n neighbouring tokens, as `picture_attention` has it.

    What does not fit this kernel is left to that one, in blocks of its own choice; see `fits`.
    Interpreted, each warpgroup holds a thread of XLA's, of which there are as many as processors,
    or as the environment's NPROC says: with too few for all it waits for ever.

    Args:
        qkv: `[..., T, 3·H·d]`, T a multiple of n; bfloat16 unless `impl` is "plain".
        cos: `[n, d/2]` float32, of the angles by which the tokens of a group are turned.
        sin: the same.
        impl: see `Impl`.
        step: None, or a scalar: results are rounded to E4M3 in steps of it, see `rounded`.
        tiles: how to cut the work.

    Returns:
        `[..., T, H·d]` in the type of `qkv`, or in E4M3.

    Raises:
        ValueError: shapes do not fit each other, the kernel does not know the type, or tiles are
            none that it can have.
    """
    tiles = tiles or Tiles()
    if tiles.consumers not in REGISTERS or tiles.keys % 32 or tiles.stages < 2:
        raise ValueError(
            f"{tiles}: 2 or 3 consumers, keys by 32 and 2 stages at least are possible"
        )
    parts = by_parts(qkv, cos)
    groups, n, _, heads, d = parts.shape
    if impl == "plain" or qkv.dtype != jnp.bfloat16 or not fits(n, d, tiles):
        y = picture_attention(qkv, cos, sin, impl=impl)
        return y if step is None else rounded(y, step)
    key = turn_apart(parts, 1, cos, sin).reshape(groups * n, heads * d)
    rows = qkv.reshape(groups * n, 3 * heads * d)
    inverse = None if step is None else 1 / step.astype(jnp.float32).reshape(1)
    y = _call(words(rows), key, rows, cos, sin, inverse, n, heads, tiles, impl)
    return y.reshape(*qkv.shape[:-1], heads * d)


def fits(n: int, d: int, tiles: Tiles) -> bool:
    """Whether groups of n tokens and heads of d channels are this kernel's: whole blocks of keys.

    Rows of queries may be computed twice at the end of a group, the same both times.
    """
    return d == WIDTH and n >= ROWS and n % tiles.keys == 0


class Work(NamedTuple):
    """A piece of work: first row of its group, its head, first of its queries in the group."""

    row: jax.Array
    head: jax.Array
    query: jax.Array


@partial(jax.jit, static_argnames=("n", "heads", "tiles", "impl"))
def _call(
    query: jax.Array,
    key: jax.Array,
    values: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    inverse: jax.Array | None,
    n: int,
    heads: int,
    tiles: Tiles,
    impl: Impl,
) -> jax.Array:
    """Query the first third of the columns of `[R, 3·H·32]` uint32, key `[R, H·64]`, values the
    last third of `[R, 3·H·64]`, inverse `[1]`. Jitted, to be lowered once for all layers."""
    consumers, stages, blocks = tiles.consumers, tiles.stages, n // tiles.keys
    pieces = pl.cdiv(n, consumers * ROWS)
    items = query.shape[0] // n * heads * pieces
    programs = min(tiles.programs, items)

    def work(i: Any) -> Work:
        item = lax.axis_index("program") + i * programs
        pair, piece = lax.div(item, pieces), lax.rem(item, pieces)
        row = lax.div(pair, heads) * n
        return Work(row, lax.rem(pair, heads), piece * (consumers * ROWS))

    def body(*refs: Any) -> None:
        q, k, v, c, s, *scale = refs[: len(given)]
        y, queries, keys, vals, turned_at, out, weights = refs[len(given) :]
        me = lax.axis_index("warpgroup")
        count = lax.div(items - lax.axis_index("program") + (programs - 1), programs)
        few, many = REGISTERS[consumers]

        def first(item: Work, warpgroup: Any) -> Any:
            """First of the queries of a warpgroup, in its group."""
            return jnp.minimum(item.query + warpgroup * ROWS, n - ROWS)

        def columns(head: Any, width: int = WIDTH) -> Any:
            return pl.ds(head * width, width)

        @pl.when(me == consumers)
        def _bring() -> None:
            plgpu.set_max_registers(few, action="decrease")

            @pl.loop(0, count)
            def _piece(i: jax.Array) -> None:
                item = work(i)
                for w in range(consumers):
                    token = first(item, w)
                    mine = q.at[pl.ds(item.row + token, ROWS), columns(item.head, WIDTH // 2)]
                    angles = (angle.at[pl.ds(token, ROWS)] for angle in (c, s))
                    bring((mine, *angles), queries, w)

                @pl.loop(0, blocks)
                def _block(j: jax.Array) -> None:
                    slot = lax.rem(i * blocks + j, stages)
                    block = pl.ds(item.row + j * tiles.keys, tiles.keys)
                    bring((k.at[block, columns(item.head)],), keys, slot)
                    bring((v.at[block, columns(2 * heads + item.head)],), vals, slot)

            await_all(queries, keys, vals)

        @pl.when(me < consumers)
        def _attend() -> None:
            plgpu.set_max_registers(many, action="increase")
            own = queries.place(me)
            plgpu.barrier_arrive(own.free)
            lend(keys, vals)
            # Two steps at a time, if registers suffice, need not move what one leaves to where it
            # was.
            at_once = 2 if tiles.keys <= 96 else 1
            weights_at = None if weights is None else weights.at[me]

            @pl.loop(0, count)
            def _piece(i: jax.Array) -> None:
                query = turned_at.at[me]
                _turn_queries(own, query)
                products = Products(query, keys, vals, weights_at, i * blocks)
                o = streamed(products, blocks, at_once=at_once).astype(jnp.bfloat16)
                if scale:
                    o = o.astype(jnp.float32) * scale[0][0]
                    o = jnp.clip(o, -FP8_MAX, FP8_MAX).astype(kind)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out.at[me][...] = o
                plgpu.commit_smem()
                item = work(i)
                rows = pl.ds(item.row + first(item, me), ROWS)
                plgpu.copy_smem_to_gmem(out.at[me], y.at[rows, columns(item.head)])

            plgpu.wait_smem_to_gmem(0)

    interpreted = impl == "interpret"
    given = [query, key, values, cos, sin, *([] if inverse is None else [inverse])]
    kind = jnp.bfloat16 if inverse is None else jnp.float8_e4m3fn
    # A product adds up over whole tiles: by 64 keys, as by default, or by 32.
    narrow: Any = (_TilingTransform((8, 32)), _SwizzleTransform(64))
    by_32 = tiles.keys % 64 and not interpreted
    block = partial(shared, stages, tiles.keys, WIDTH, jnp.bfloat16)
    half = partial(shared, consumers, ROWS, WIDTH // 2)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(key.shape, kind),
        scratch_types=(
            ring_of(half(jnp.uint32), half(jnp.float32), half(jnp.float32), users=1),
            ring_of(block(), users=consumers),
            ring_of(block(narrow if by_32 else ()), users=consumers),
            shared(consumers, ROWS, WIDTH, jnp.bfloat16),
            shared(consumers, ROWS, WIDTH, kind),
            shared(consumers, ROWS, tiles.keys, jnp.bfloat16) if interpreted else None,
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name="picture_attention_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpreted else None,
    )
    return kernel(*given)


def _turn_queries(queries: Ring, at: Any) -> None:
    """Queries of a warpgroup, in words, turned by the angles beside them, even channels first.

    Each warp writes rows that it multiplies itself, and what it multiplied of them before is over.
    """
    plgpu.barrier_wait(queries.full)
    word, cos, sin = (plgpu.load(x, layout=plgpu.Layout.WGMMA) for x in queries.at)
    at[...] = jnp.concatenate(turned(*halves(word), cos, sin), 1).astype(jnp.bfloat16)
    # What was written is for the tensor cores to read, and what was read, to be overwritten.
    plgpu.commit_smem()
    plgpu.barrier_arrive(queries.free)
