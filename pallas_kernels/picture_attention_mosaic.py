"""Attention among the tokens of a window, or of a picture, by Pallas on Mosaic GPU.

What is computed is told at `pallas_kernels.picture_attention`. Keys come turned, even channels
before odd ones; queries, each of which is needed once, and values are read where the projection
left them. The kernel is written for Hopper (after Shah et al., FlashAttention-3, 2024): as many
programs as there are multiprocessors go through pieces of work, each the queries of some rows and
one head. One warpgroup of a program has the tensor memory accelerator bring queries, keys and
values, blocks and pieces of work ahead; each of the others turns 64 queries and attends for them.
With `S_j = q K_jᵀ` for block j, and c = log2(e) / sqrt(d), it streams

    m_j = max(m_{j-1}, max S_j)      f_j = 2^(c m_{j-1} - c m_j)      P_j = 2^(c S_j - c m_j)
    l_j = f_j l_{j-1} + Σ P_j        O_j = f_j O_{j-1} + P_j V_j      y = O / l

and multiplies `q K_{j+1}ᵀ` and `P_j V_j` while it computes `P_{j+1}`, whose powers take as long as
the products: 16 a clock, for 4 d = 256 of the tensor cores' 4096 operations each.
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
from pallas_kernels.paged_attention import LOG2_E
from pallas_kernels.picture_attention import (
    by_parts,
    halves,
    picture_attention,
    rounded,
    turn_apart,
    turned,
    words,
)
from pallas_kernels.weights import FP8_MAX

ROWS = 64
"""Queries of a warpgroup."""

WIDTH = 64
"""Channels of a head."""

SCALE = WIDTH**-0.5 * LOG2_E
"""Of scores, in units of log2."""

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


class Ring(NamedTuple):
    """Places in shared memory; barriers that tell of each that it is full, and that it is free."""

    at: tuple[Any, ...]
    full: Any
    free: Any


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
                    _bring_one((mine, *angles), queries, w)

                @pl.loop(0, blocks)
                def _block(j: jax.Array) -> None:
                    slot = lax.rem(i * blocks + j, stages)
                    block = pl.ds(item.row + j * tiles.keys, tiles.keys)
                    _bring_one((k.at[block, columns(item.head)],), keys, slot)
                    _bring_one((v.at[block, columns(2 * heads + item.head)],), vals, slot)

            # All that was lent comes back, so that no barrier is left in the middle of something.
            for ring in (queries, keys, vals):
                for slot in range(ring.at[0].shape[0]):
                    plgpu.barrier_wait(ring.free.at[slot])

        @pl.when(me < consumers)
        def _attend() -> None:
            plgpu.set_max_registers(many, action="increase")
            plgpu.barrier_arrive(queries.free.at[me])
            for slot in range(stages):
                plgpu.barrier_arrive(keys.free.at[slot])
                plgpu.barrier_arrive(vals.free.at[slot])

            own = Ring(
                tuple(at.at[me] for at in queries.at), queries.full.at[me], queries.free.at[me]
            )
            weights_at = None if weights is None else weights.at[me]

            @pl.loop(0, count)
            def _piece(i: jax.Array) -> None:
                def slot(j: Any) -> jax.Array:
                    return lax.rem(i * blocks + j, stages)

                _turn_queries(own, turned_at.at[me])
                products = _Products(turned_at.at[me], keys, vals, weights_at, slot, tiles)
                o = _streamed(products, blocks).astype(jnp.bfloat16)
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

    def shared(places: int, rows: int, columns: int, kind: Any, transforms: Any = ()) -> Any:
        return plgpu.SMEM((places, rows, columns), kind, transforms=transforms)

    def ring(*at: Any, users: int) -> Ring:
        (places, *_) = at[0].shape
        full = plgpu.Barrier(num_arrivals=len(at), num_barriers=places)
        free = plgpu.Barrier(num_arrivals=users, num_barriers=places)
        return Ring(at, full, free)

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
            ring(half(jnp.uint32), half(jnp.float32), half(jnp.float32), users=1),
            ring(block(), users=consumers),
            ring(block(narrow if by_32 else ()), users=consumers),
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


def _bring_one(sources: tuple[Any, ...], ring: Ring, slot: Any) -> None:
    """Have a place of a ring filled as soon as it is free."""
    plgpu.barrier_wait(ring.free.at[slot])
    for source, at in zip(sources, ring.at, strict=True):
        plgpu.copy_gmem_to_smem(source, at.at[slot], ring.full.at[slot])


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


@dataclass(frozen=True)
class _Products:
    """What a warpgroup multiplies for a piece of work.

    Attributes:
        query: its own, turned.
        keys: of all warpgroups.
        values: the same.
        weights: a place for its own where products from registers cannot be interpreted, or None.
        slot: place of a block of keys, and of one of values.
        tiles: how the work is cut.
    """

    query: Any
    keys: Ring
    values: Ring
    weights: Any
    slot: Callable[[Any], jax.Array]
    tiles: Tiles

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
        plgpu.wgmma(scores, self.query, self.keys.at[0].at[self.slot(j)].transpose((1, 0)))

    def multiply_values(self, out: Any, p: Any, j: Any) -> None:
        """Ask for what weights p make of the values of block j."""
        plgpu.wgmma(out, p, self.values.at[0].at[self.slot(j)])

    def start(self, out: Any, o: jax.Array, fade: jax.Array) -> None:
        """Products are added to what there is; interpreted, they are by `total`."""
        if not self.interpreted:
            out[...] = o * _wide(fade)

    def total(self, out: jax.Array, o: jax.Array, fade: jax.Array) -> jax.Array:
        return o * _wide(fade) + out if self.interpreted else out


def _streamed(products: _Products, blocks: int) -> jax.Array:
    """Attention of a warpgroup's queries to all blocks, `[64, 64]` float32."""
    keys, values, slot = products.keys, products.values, products.slot
    scores_of = plgpu.WGMMAAccumulatorRef((ROWS, products.tiles.keys), jnp.float32)
    out_of = plgpu.WGMMAAccumulatorRef((ROWS, WIDTH), jnp.float32)

    plgpu.barrier_wait(keys.full.at[slot(0)])

    def first(scores: Any) -> jax.Array:
        products.multiply_keys(scores, 0)
        return scores[...]

    scores = pl.run_scoped(first, scores_of)
    plgpu.barrier_arrive(keys.free.at[slot(0)])
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
            products.start(out_at, o, fade)
            products.multiply_keys(scores_at, j + 1)
            products.multiply_values(out_at, operand, j)
            scores = plgpu.wgmma_accumulator_load(scores_at, wait_n=1)
            plgpu.barrier_arrive(keys.free.at[slot(j + 1)])
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

    # Two steps at a time, if registers suffice, need not move what one leaves to where it was.
    pair = 2 if products.tiles.keys <= 96 else 1
    carry = _repeated(step, blocks - 1, pair, (o, fade, peak, total, p))
    o, fade, peak, total, p = carry
    operand = products.operand(p)

    def last(out: Any) -> jax.Array:
        products.start(out, o, fade)
        products.multiply_values(out, operand, blocks - 1)
        return out[...]

    o = products.total(pl.run_scoped(last, out_of), o, fade)
    plgpu.barrier_arrive(values.free.at[slot(blocks - 1)])
    return o * _wide(1 / total)


def _weights(scores: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights bfloat16, and their sums before they were rounded."""
    p = jnp.exp2(scores * SCALE - _wide(peak * SCALE, scores.shape[1]))
    return p.astype(jnp.bfloat16), jnp.sum(p, axis=1)


def _wide(x: jax.Array, columns: int = WIDTH) -> jax.Array:
    """A number for each row in all columns."""
    return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def _repeated(step: Callable[[Any, Any], Any], count: int, at_once: int, carry: Any) -> Any:
    """So many steps, some at once in a loop, and what is left after it."""

    def steps(i: jax.Array, carry: Any) -> Any:
        for j in range(at_once):
            carry = step(at_once * i + j, carry)
        return carry

    carry = lax.fori_loop(0, count // at_once, steps, carry)
    for j in range(count - count % at_once, count):
        carry = step(j, carry)
    return carry
