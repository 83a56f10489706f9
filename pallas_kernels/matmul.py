"""Projections of many rows on tensor cores: `y = x Wᵀ`, optionally `residual + y`.

A program makes a tile of `yᵀ = W xᵀ`: `cols` output features of `rows` rows, adding up K in steps
of `depth`. The weight is the left operand, because Hopper's tensor cores take that one from
registers: a tile is converted (E4M3) or dequantised (NVFP4) there on its way to the product, and
the inputs come straight from shared memory. Products are exact and accumulated in float32, in
steps of 16 along K one after another, whatever the tile; float32 scales follow at the end.

Where inputs are rounded to E4M3, too, `pallas_kernels.e4m3` multiplies them as they are.

Weights without shuffles. Of the sixteen elements along K of one tensor-core step, thread `t` of
four has those in the places `2t, 2t + 1, 2t + 8, 2t + 9`: too few neighbours to load at once. So
elements reach the tensor core in another order than K's, one in which what a thread needs for
several steps are 16 neighbouring bytes of the weight; inputs are brought into that order beforehand
(`in_order`). E4M3 is converted pair by pair. NVFP4 comes as 32-bit words of eight neighbouring
codes, of which `p` and `p + 4` become the two halves of a 32-bit register: a code's sign goes to
bfloat16's sign, its two bits of exponent and one of mantissa to the bottom of the exponent and the
top of the mantissa, which makes 2^-126 of its value. Times the block scale, itself times 2^118,
this is exact, and the missing 2^8 joins the scale at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.e4m3 import e4m3_products
from pallas_kernels.weights import (
    NVFP4_BLOCK,
    Dense,
    Fp8,
    Nvfp4,
    Observed,
    PerLayer,
    Weight,
    linear,
    quantise,
)

CODES = 8
"""E2M1 codes in a 32-bit word."""

SPANS: dict[type, int] = {Dense: 1, Fp8: 64, Nvfp4: 128}
"""Elements of K within which inputs change places, where K is long enough."""


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
        rows: of the inputs, a program.
        cols: output features, a program; 64 or more for the fast tensor-core instruction.
        depth: elements of K, a step.
        warps: a program.
        stages: steps on their way from memory.
        pieces: of the output features, multiplied one after another where sums of E4M3 need
            registers beside their total.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 128
    warps: int = 8
    stages: int = 2
    pieces: int = 1


SIZES = (
    Tiles(),
    Tiles(rows=64, stages=4),
    Tiles(rows=64, cols=64, warps=4, stages=6),
    Tiles(rows=32, cols=64, warps=4, stages=6),
    Tiles(rows=16, cols=64, depth=256, warps=4, stages=4),
)
"""Tiles from the most frugal with memory down to those that make most programs.

None changes a bit of a product: all have 64 or more columns, and K is added up in the same steps.
"""

E4M3_SIZES = (
    Tiles(rows=128, cols=128, depth=64, warps=4, stages=3, pieces=2),
    Tiles(rows=64, cols=128, depth=64, warps=4, stages=4),
    Tiles(rows=64, cols=64, depth=64, warps=4, stages=6),
    Tiles(rows=32, cols=64, depth=64, warps=4, stages=6),
    Tiles(rows=16, cols=64, depth=64, warps=4, stages=6),
)
"""The same for E4M3 times E4M3, which want `BUSY_E4M3` programs."""

BUSY = 60
"""Programs from which on a GPU of 132 multiprocessors takes longer for smaller tiles: it has to
read more out of its second-level cache, at 4.5 TB/s on an H200, than the others save."""

BUSY_E4M3 = 128
"""The same of `E4M3_SIZES`, whose smaller tiles are nearly as fast as the larger ones."""

ALONE = 132
"""Programs up to which each has a multiprocessor and its memory to itself."""

STEP = 128
"""Elements of K whose products are added up before they join those of others in float32, where
tensor cores multiply E4M3; fewer only where K is not a multiple."""

FAST = 64
"""Columns of a tile from which on Hopper's fast tensor-core instruction is used."""


def reference(
    x: jax.Array,
    w: Weight,
    layer: int | None,
    *,
    residual: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """See `matmul`."""
    y = linear(x, w, layer, dtype)
    return y if residual is None else residual + y


def matmul(
    x: jax.Array,
    w: Weight,
    layer: int | None,
    *,
    residual: jax.Array | None = None,
    dtype: Any = None,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Multiply many rows with a weight; the bits of one row do not depend on the others.

    Args:
        x: `[M, K]`.
        w: stack `[L, N, K]`, or one matrix `[N, K]`.
        layer: which of the stack's matrices; None for one matrix.
        residual: `[M, N]` to add.
        dtype: of the product; None for that of `x`.
        impl: how to compute.
        tiles: how the product is cut; None for what keeps a GPU busy.

    Returns:
        `[M, N]`, in the type of the product or of its sum with the residual.
    """
    if impl == "plain" or isinstance(w, Observed):
        return reference(x, w, layer, residual=residual, dtype=dtype)
    one, index = place(w, layer)
    rows = [_inputs(x, one, index)]
    how: dict[str, Any] = {"dtype": dtype or x.dtype, "impl": impl, "tiles": tiles}
    return matmuls(rows, [w], layer, residual=residual, **how)[0]


def matmuls(
    rows: Sequence[jax.Array],
    weights: Sequence[Weight],
    layer: int | None,
    *,
    residual: jax.Array | None = None,
    dtype: Any,
    impl: Impl,
    tiles: Tiles | None = None,
) -> list[jax.Array]:
    """Several products with as many rows each, in as few kernels as is good for them.

    Args:
        rows: for each weight its inputs `[M, K_i]` as `_inputs` or `normed_rows` leave them.
        weights: stacks `[L, N_i, K_i]`, or single matrices.
        layer: which of the stacks' matrices; None for single matrices.
        residual: `[M, N]` to add to the only product.
        dtype: of the products.
        impl: "kernel" or "interpret".
        tiles: see `matmul`.

    Returns:
        For each weight `[M, N_i]`.
    """
    # Two loops of the fast instruction in one kernel wait for each step: the second loop's
    # registers are in the first one's way. Products that are too low for it join another one.
    low = [i for i, w in enumerate(weights) if height(place(w, layer)[0]) < FAST]
    high = [i for i in range(len(weights)) if i not in low]
    out: dict[int, jax.Array] = {}
    for each in [high[:1] + low, *([i] for i in high[1:])]:
        stacks, at = zip(*(place(weights[i], layer) for i in each), strict=True)
        # Numbers of layers as data: a kernel is traced and compiled once for all of them.
        args = as_data(*at), [rows[i] for i in each], [*stacks], residual
        done = _launch(*args, dtype=jnp.dtype(dtype), impl=impl, tiles=tiles)
        out.update(zip(each, done, strict=True))
    return [out[i] for i in range(len(weights))]


@partial(jax.jit, static_argnames=("dtype", "impl", "tiles"))
def _launch(
    index: jax.Array,
    rows: list[jax.Array],
    stacks: list[Dense | Fp8 | Nvfp4],
    residual: jax.Array | None,
    *,
    dtype: Any,
    impl: Impl,
    tiles: Tiles | None,
) -> list[jax.Array]:
    """One kernel of `matmuls`."""
    M = rows[0].shape[0]
    heights = [height(w) for w in stacks]
    if tiles is None:
        fast = any(rounds(w) for w in stacks)
        sizes, busy = (E4M3_SIZES, BUSY_E4M3) if fast else (SIZES, BUSY)
        tiles = choose(M, sum(heights), sizes, busy)
    cuts = [fit(tiles, w, x.shape[1]) for w, x in zip(stacks, rows, strict=True)]
    across = [-(-N // cut.cols) for N, cut in zip(heights, cuts, strict=True)]
    kind = dtype if residual is None else jnp.result_type(residual.dtype, dtype)
    args = (rows, [words(w) for w in stacks], index, residual)
    flat, tree = jax.tree.flatten(args)

    def body(*refs: Any) -> None:
        xs, ws, index, residual = jax.tree.unflatten(tree, refs[: len(flat)])
        outs, number, before = refs[len(flat) :], pl.program_id(1), 0
        m = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
        for i, (x, w, out, cut) in enumerate(zip(xs, ws, outs, cuts, strict=True)):
            own = partial(tile, x, w, (index[i],), m, number - before, residual, out, cut)
            if len(ws) == 1:
                own()
            else:
                pl.when((number >= before) & (number < before + across[i]))(own)
            before += across[i]

    def tile(
        x: Any,
        w: Any,
        at: tuple,
        m: jax.Array,
        number: jax.Array,
        residual: Any,
        out: Any,
        cut: Tiles,
    ) -> None:
        N = out.shape[1]
        first, along = number * cut.cols, jnp.arange(cut.cols // cut.pieces)
        there = m < M if M % cut.rows else None
        pieces = [first + i * (cut.cols // cut.pieces) + along for i in range(cut.pieces)]
        # Features beyond the last are computed as if they were that, and not stored.
        cols = [jnp.minimum(n, N - 1) for n in pieces]
        if x.dtype == jnp.float8_e4m3fn:
            made = e4m3_products(w.q, at, cols, x, m, there, cut.depth)
        else:
            made = [product(w, at, col, x, m, there, cut.depth, impl) for col in cols]
        for n, col, y in zip(pieces, cols, made, strict=True):
            kept = None
            if M % cut.rows or N % cut.cols:
                kept = (m < M)[:, None] & (n < N)[None, :]
            scale = scales(w, at, col, N, impl)
            if scale is not None:
                y = y * scale[:, None]
            y = y.T.astype(dtype)
            if residual is not None:
                y = plt.load(residual.at[m[:, None], n[None, :]], mask=kept) + y
            plt.store(out.at[m[:, None], n[None, :]], y, mask=kept)

    return list(
        triton_call(
            body,
            *flat,
            grid=(-(-M // tiles.rows), sum(across)),
            out_shape=[jax.ShapeDtypeStruct((M, N), kind) for N in heights],
            impl=impl,
            name=f"matmul_{sum(heights)}x{rows[0].shape[1]}",
            warps=tiles.warps,
            stages=tiles.stages,
        )
    )


def choose(M: int, N: int, sizes: Sequence[Tiles] = SIZES, busy: int = BUSY) -> Tiles:
    """The first of some sizes that cuts `M` rows and `N` output features into enough programs."""
    for tiles in sizes:
        programs = -(-M // tiles.rows) * -(-N // tiles.cols)
        if programs >= busy and tiles.rows < 2 * M:
            return replace(tiles, stages=max(tiles.stages, 3)) if programs <= ALONE else tiles
    return sizes[-1]


def place(w: Weight, layer: int | None) -> tuple[Dense | Fp8 | Nvfp4, int]:
    """The stack in which a layer's matrix lies, and where."""
    if isinstance(w, PerLayer):
        assert layer is not None
        group, layer = w.where[layer]
        w = w.groups[group]
    assert isinstance(w, Dense | Fp8 | Nvfp4)
    return (w, layer) if layer is not None else (jax.tree.map(lambda a: a[None], w), 0)


def height(w: Dense | Fp8 | Nvfp4) -> int:
    """Output features (N)."""
    return (w.w if isinstance(w, Dense) else w.q).shape[-2]


def fit(tiles: Tiles, w: Dense | Fp8 | Nvfp4, K: int) -> Tiles:
    """Tiles for a weight with `K` input features, smaller than asked for if it is.

    Raises:
        ValueError: K has too few factors of two.
    """
    depth = min(STEP if rounds(w) else max(tiles.depth, SPANS[type(w)]), K & -K)
    if depth < 32:
        raise ValueError(f"a kernel cannot cut {K} input features into steps of 32 or more")
    cols = min(tiles.cols, max(16, pl.next_power_of_2(height(w))))
    pieces = min(tiles.pieces, max(1, cols // FAST)) if rounds(w) else 1
    return replace(tiles, cols=cols, depth=depth, pieces=pieces)


def rounds(w: Dense | Fp8 | Nvfp4) -> bool:
    """Whether inputs are rounded to E4M3, too: such products are not made in registers."""
    return isinstance(w, Fp8) and w.input_scale is not None


def _inputs(x: jax.Array, w: Dense | Fp8 | Nvfp4, index: int) -> jax.Array:
    """Inputs in the type and order in which they are multiplied."""
    if isinstance(w, Fp8) and w.input_scale is not None:
        return quantise(x, w.input_scale[index])
    return in_order(x, type(w))


def in_order(x: jax.Array, kind: type) -> jax.Array:
    """Rows `[..., K]` -> the same, in the order in which a kind of weight is multiplied."""
    if kind is Dense:
        return x
    order = source(kind, jnp.arange(x.shape[-1]), x.shape[-1])
    return x.at[..., order].get(mode="promise_in_bounds", unique_indices=True)


def source(kind: type, place: jax.Array, K: int) -> jax.Array:
    """Which of the `K` elements a kind of weight multiplies in a place."""
    if kind is Dense:
        return place
    span = min(SPANS[kind], K & -K)
    here = place % span
    step, thread, half = here // 8, here // 2 % 4, here % 2
    within = 2 * step + half if kind is Fp8 else CODES * (step // 4) + 4 * half + step % 4
    return place - here + thread * (span // 4) + within


def placed_at(kind: type, k: jax.Array, K: int) -> jax.Array:
    """The place in which a kind of weight multiplies element `k`: the inverse of `source`."""
    if kind is Dense:
        return k
    span = min(SPANS[kind], K & -K)
    here = k % span
    thread, within = here // (span // 4), here % (span // 4)
    if kind is Fp8:
        step, half = within // 2, within % 2
    else:
        step, half = within // CODES * 4 + within % 4, within % CODES // 4
    return k - here + step * 8 + thread * 2 + half


# --- what a kernel does with a tile of a weight ---------------------------------------------------


def words(w: Dense | Fp8 | Nvfp4) -> Dense | Fp8 | Nvfp4:
    """Outside a kernel: NVFP4 codes `[..., N, K/2]` uint8 as `[..., N, K/8]` uint32, same bytes."""
    if not isinstance(w, Nvfp4):
        return w
    q = w.q.reshape(*w.q.shape[:-1], -1, CODES // 2)
    return Nvfp4(lax.bitcast_convert_type(q, jnp.uint32), w.block_scale, w.scale)


def product(
    w: Any,
    at: tuple,
    col: jax.Array,
    x: Any,
    row: jax.Array,
    there: jax.Array | None,
    depth: int,
    impl: Impl,
) -> jax.Array:
    """A tile `W xᵀ` before scales.

    Args:
        w: the weight, with references for leaves, codes as `words`.
        at: where in the stack, leading indices.
        col: `[cols]` int32, which output features.
        x: reference to inputs `[M, K]`, `in_order`.
        row: `[rows]` int32, which rows of the inputs.
        there: `[rows]` bool, which of those exist; None for all.
        depth: elements of K, a step.
        impl: how to compute.

    Returns:
        `[cols, rows]` float32.
    """

    def some(ref: Any, at: tuple, which: jax.Array, start: jax.Array, size: int) -> Any:
        along = start * size + jnp.arange(size)
        return ref.at[(*at, which[:, None], along[None, :])]

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        where = some(x, (), row, i, depth)
        # Rows that are not there are not fetched.
        inputs = plt.load(where) if there is None else plt.load(where, mask=mask, other=none)
        match w:
            case Dense():
                left = plt.load(some(w.w, at, col, i, depth))
            case Fp8():
                left = convert(plt.load(some(w.q, at, col, i, depth)), x.dtype)
            case Nvfp4():
                codes = plt.load(some(w.q, at, col, i, depth // CODES))
                blocks = plt.load(some(w.block_scale, at, col, i, depth // NVFP4_BLOCK))
                left = dequantise(codes, blocks, impl)
        contract = (((1,), (1,)), ((), ()))
        return total + lax.dot_general(
            left.astype(x.dtype), inputs, contract, preferred_element_type=jnp.float32
        )

    mask = None if there is None else jnp.broadcast_to(there[:, None], (row.size, depth))
    none = jnp.zeros((), x.dtype)
    zero = jnp.zeros((col.size, row.size), jnp.float32)
    return lax.fori_loop(0, x.shape[1] // depth, step, zero)


def scales(w: Any, at: tuple, col: jax.Array, N: int, impl: Impl) -> jax.Array | None:
    """What `product` is to be multiplied with, `[cols]` float32; None for nothing."""
    if isinstance(w, Dense):
        return None
    scale = plt.load(w.scale.at[(*at, col // (N // w.scale.shape[-1]))])
    if isinstance(w, Nvfp4):
        return scale * (2.0**14 if impl == "interpret" else 2.0**8)
    return scale if w.input_scale is None else scale * w.input_scale[at]


def convert(q: jax.Array, dtype: Any) -> jax.Array:
    """E4M3 `[n, k]` -> the same values in the order of `source`, of another type."""
    n, depth = q.shape
    each = min(SPANS[Fp8], depth) // 4  # elements a thread
    return convert_ordered(q.reshape(n, -1, 4, each // 2, 2).transpose(0, 1, 3, 2, 4), dtype)


def convert_ordered(q: jax.Array, dtype: Any) -> jax.Array:
    """E4M3 `[n, span, pair, thread, 2]` -> the same values `[n, k]` of another type."""
    q = q.reshape(q.shape[0], -1)
    # Hopper converts E4M3 to float16 and no further.
    return q.astype(dtype if dtype == jnp.float16 else jnp.float32).astype(dtype)


def dequantise(codes: jax.Array, blocks: jax.Array, impl: Impl) -> jax.Array:
    """Codes `[n, k/8]` uint32, block scales `[n, k/16]` -> `[n, k]` in the order of `source`, a
    power of two too small.
    """
    n, count = codes.shape
    each = min(SPANS[Nvfp4] // CODES, count) // 4  # words a thread
    blocks = jnp.broadcast_to(blocks[:, :, None], (n, count // 2, 2))
    codes, blocks = (a.reshape(n, -1, 4, each).transpose(0, 1, 3, 2) for a in (codes, blocks))
    return dequantise_ordered(codes, blocks, impl)


def dequantise_ordered(codes: jax.Array, blocks: jax.Array, impl: Impl) -> jax.Array:
    """`dequantise` of codes `[n, span, word, thread]` and the block scale of each."""
    # A CPU takes bfloat16 as small as 2^-127 for zero; float16 has 2^-14 for 2^-126.
    kind, shift = (jnp.float16, 3) if impl == "interpret" else (jnp.bfloat16, 6)
    pairs = [_pair(codes, p, shift) for p in range(4)]
    both = jnp.stack([jnp.stack([pairs[0], pairs[2]], -1), jnp.stack([pairs[1], pairs[3]], -1)], -1)
    halves = [both >> 16, both & 0xFFFF]
    # The upper half first: ptxas then multiplies both at once where they are.
    value = jnp.stack([lax.bitcast_convert_type(h.astype(jnp.uint16), kind) for h in halves], -1)
    blocks = blocks.astype(jnp.float32) * (1.0 if impl == "interpret" else 2.0**118)
    scale = blocks.astype(kind)[..., None, None, None]
    upper, lower = jnp.unstack(value * scale, axis=-1)
    # [n, span, word, thread, pair // 2, pair % 2, half] -> pairs before threads
    value = jnp.stack([lower, upper], -1).transpose(0, 1, 2, 4, 5, 3, 6)
    return value.reshape(codes.shape[0], -1).astype(jnp.bfloat16)


def _pair(codes: jax.Array, p: int, shift: int) -> jax.Array:
    """Codes `p` and `p + 4` of words, as two 16-bit floats whose exponents are too small."""

    def moved(by: int) -> jax.Array:
        return codes << by if by > 0 else codes >> -by

    sign, rest = jnp.uint32(0x80008000), jnp.uint32(0x70007000 >> shift)
    return (moved(12 - 4 * p) & sign) | (moved(12 - 4 * p - shift) & rest)
