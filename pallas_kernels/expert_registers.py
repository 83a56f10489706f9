"""What `expert_stream` does with registers of its own choice: code for Mosaic's lower layer.

Of a tensor core's left operand of 64 rows, thread `(g, t)` of warp `w`, with `g < 8` and `t < 4`,
holds rows `16w + g` and `16w + 8 + g`. Which row of shared memory is called `16w + 8h + g` is free:
it is `16w + 8h + 4 (g mod 2) + g div 2`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from pallas_kernels.matmul import CODES

REF = plgpu.RefType()

inline: Any = plgpu.inline_mgpu
swizzle: Any = plgpu.SwizzleTransform

SPAN = 128
"""Elements of K of which a thread holds 16 bytes of codes."""

MIXED = 256
"""Elements of K of which codes lie in shared memory in Hopper's 128-byte swizzle."""


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _const(value: int) -> ir.Value:
    value = value - (1 << 32) if value >= 1 << 31 else value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))


def _asm(ptx: str, *args: ir.Value, type: ir.Type | None = None) -> ir.Value:
    """A PTX instruction with a result, without effects."""
    return mgpu.utils.inline_ptx(ptx, *args, result_types=type or _i32())


def meet() -> None:
    """Wait until all threads of the warpgroup are here."""

    @inline()
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()


def _lanes() -> tuple[ir.Value, ir.Value, ir.Value]:
    """Warp, and its lanes' groups of four and places in them."""
    thread = arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))
    lane = arith.andi(thread, _const(31))
    group = arith.shrui(lane, _const(2))
    return arith.shrui(thread, _const(5)), group, arith.andi(lane, _const(3))


def _sum(*terms: ir.Value) -> ir.Value:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _times(value: ir.Value, by: int) -> ir.Value:
    return arith.muli(value, _const(by))


def _at(ref: ir.Value, offset: ir.Value) -> ir.Value:
    """Pointer to some byte of shared memory."""
    base = mgpu.utils.memref_ptr(ref)
    return mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))


def converted(codes: Any, blocks: Any, span: int) -> jax.Array:
    """`matmul.dequantise` of 128 columns, straight into a tensor core's registers.

    Args:
        codes: reference to `[4, 16, K/8]` uint32 in shared memory: 64 rows.
        blocks: reference to `[4, 16, K/16]` float8_e4m3fn.
        span: which 128 columns.

    Returns:
        `[64, 128]` bfloat16.
    """
    layout = plgpu.Layout.WGMMA
    words, mixed = codes.shape[-1], codes.shape[-1] * CODES == MIXED
    kind = plgpu.RefType((swizzle(128),)) if mixed else REF

    @inline(
        arg_types=(kind, REF),
        return_type=plgpu.ShapeDtypeStruct((64, SPAN), jnp.bfloat16, layout=layout),
    )
    def convert(_: Any, codes: ir.Value, blocks: ir.Value) -> mgpu.FragmentedArray:
        warp, group, t = _lanes()
        low = arith.addi(_times(arith.andi(group, _const(1)), 4), arith.shrui(group, _const(1)))
        row = arith.addi(_times(warp, 16), low)
        # Of a row's units of 16 bytes; the swizzle adds to them the row, bit by bit.
        unit = arith.addi(t, _const(4 * span))
        unit = arith.xori(unit, low) if mixed else unit
        kind = layout.to_mgpu()
        registers = np.empty(kind.registers_shape((64, SPAN)), object)
        flat = registers.reshape(SPAN // 8, 2)
        for half in range(2):
            here = arith.addi(row, _const(8 * half))
            at = arith.addi(_times(here, 4 * words), _times(unit, 16))
            four = llvm.load(ir.VectorType.get((4,), _i32()), _at(codes, at), alignment=16)
            at = _sum(_times(here, words // 2), _times(t, 2), _const(8 * span))
            scales = _scales(llvm.load(ir.IntegerType.get_signless(16), _at(blocks, at)))
            for i in range(4):
                word = llvm.extractelement(four, _const(i))
                for p in range(4):
                    flat[4 * i + p, half] = _value(word, p, scales[i // 2])
        return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=None)

    return convert(codes, blocks)


def _scales(two: ir.Value) -> list[ir.Value]:
    """Two E4M3 numbers times 2^118, each twice as bfloat16 in a register."""
    f32 = ir.F32Type.get()
    both = _asm("cvt.rn.f16x2.e4m3x2 $0, $1;", two)
    low, high = (
        _asm(
            "{ .reg .f16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, " + half + "; }", both, type=f32
        )
        for half in "ab"
    )
    big = arith.constant(f32, ir.FloatAttr.get(f32, 2.0**118))
    wide = (arith.mulf(one, big) for one in (low, high))
    return [_asm("cvt.rn.bf16x2.f32 $0, $1, $1;", one) for one in wide]


def _value(word: ir.Value, p: int, scale: ir.Value) -> ir.Value:
    """Codes `p` and `p + 4` of a word times a scale, two bfloat16."""
    # To both of its places by one product, whose other bits are masked. Shifts would take longer.
    word = arith.shrui(word, _const(8)) if p >= 2 else word
    at = 4 * (p % 2)
    alone = arith.andi(word, _const(0x000F000F << at))
    moved = arith.muli(alone, _const((1 << 12 - at) + (1 << 6 - at)))
    code = arith.andi(moved, _const(0x81C081C0))
    pair = _asm("mul.rn.bf16x2 $0, $1, $2;", code, scale)
    return mgpu.utils.bitcast(pair, ir.VectorType.get((2,), ir.BF16Type.get()))


def sigmoid(y: jax.Array) -> jax.Array:
    """Of `[64, N]` float32, with the bits that Triton's has: its division is the fast one."""
    kind = plgpu.ShapeDtypeStruct(y.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @inline(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)
    def compute(_: Any, y: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        below = (-y).exp(approx=False) + mgpu.utils.c(1.0, ir.F32Type.get())
        registers = np.empty_like(below.registers)
        for at, pair in np.ndenumerate(below.registers):
            for i in range(2):
                one = llvm.extractelement(pair, _const(i))
                one = _asm("rcp.approx.f32 $0, $1;", one, type=ir.F32Type.get())
                pair = llvm.insertelement(pair, one, _const(i))
            registers[at] = pair
        return mgpu.FragmentedArray(
            _registers=registers, _layout=below.layout, _is_signed=below.is_signed
        )

    return compute(y)


def scattered(y: jax.Array, to: Any, turned: bool) -> None:
    """Write `[64, N]` to `[N, 64]` in shared memory.

    Args:
        y: in a tensor core's layout.
        to: reference to `[N, 64]`.
        turned: whether column `16 thread + 8 (step div 4) + 4 half + step mod 4` is to lie in place
            `8 step + 2 thread + half`, see `matmul.placed_at`.
    """

    @inline(arg_types=(plgpu.Layout.WGMMA, REF))
    def scatter(_: Any, y: mgpu.FragmentedArray, to: ir.Value) -> None:
        warp, group, t = _lanes()
        kind = ir.MemRefType(to.type)
        (stride, _), _ = kind.get_strides_and_offset()
        size = mgpu.utils.bytewidth(kind.element_type)
        odd, pair = arith.andi(group, _const(1)), arith.shrui(group, _const(1))
        if turned:
            place, step = _sum(_times(pair, 8), _times(warp, 2), odd), 32
        else:
            place, step = _sum(_times(warp, 16), _times(odd, 4), pair), 8
        start = _sum(_times(place, size), _times(t, 2 * stride * size))
        for columns, halves in enumerate(y.registers.reshape(-1, 2)):
            for half, two in enumerate(halves):
                for i in range(2):
                    at = (8 * columns + i) * stride + half * step
                    one = llvm.extractelement(two, _const(i))
                    llvm.store(one, _at(to, arith.addi(start, _const(at * size))))

    scatter(y, to)
