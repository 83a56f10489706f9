"""Weights that later kernels will read, asked for while the memory has little to do.

A decode step is a chain of kernels that each wait for the one before. Norms, the delta rule and
attention read little and wait much; beside their own programs `triton_call` starts others, which
ask for the weights of products to come and end without waiting for them. What has arrived in the
L2 cache by then need not come from memory. It is a hint: no bit depends on it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import core, state
from jax._src.pallas.triton import lowering
from jax._src.pallas.triton.primitives import barrier_effect
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.triton import dialect as tt

PIECE = 1024
"""Bytes that a thread asks for."""


class Ahead(NamedTuple):
    """Entries of stacks.

    Attributes:
        stacks: arrays `[L, …]` in device memory.
        index: int32, for each of them which entry; more numbers may follow.
    """

    stacks: tuple[jax.Array, ...]
    index: jax.Array

    def pieces(self) -> list[tuple[int, int]]:
        """For each stack how many pieces an entry has, and bytes of one."""
        sizes = [prod(x.shape[1:]) * x.dtype.itemsize for x in self.stacks]
        return [(size // (piece := gcd(size, PIECE)), piece) for size in sizes]

    def programs(self, threads: int) -> int:
        """How many programs of so many threads ask for all of it."""
        return sum(-(-count // threads) for count, _ in self.pieces())


def beside(
    body: Callable[..., None],
    args: tuple[jax.Array, ...],
    grid: Sequence[int],
    ahead: Ahead,
    threads: int,
) -> tuple[Callable[..., None], tuple[jax.Array, ...], Sequence[int]]:
    """What a kernel becomes that also asks for something: more programs along its first axis do.

    Args:
        body: of the kernel, see `pallas_kernels.backend.triton_call`.
        args: its arguments.
        grid: its programs along each axis.
        ahead: what is asked for.
        threads: a program.

    Returns:
        Body, arguments and grid.
    """
    own, *others = grid
    count, across = len(args), prod(others)
    pieces, stacks = ahead.pieces(), len(ahead.stacks)

    def both(*refs: Any) -> None:
        given, asked, (index, *outs) = refs[:count], refs[count:][:stacks], refs[count + stacks :]
        number = pl.program_id(0)
        pl.when(number < own)(lambda: body(*given, *outs))
        number -= own
        for axis, size in enumerate(others, start=1):
            number = number * size + pl.program_id(axis)
        pl.when(number >= 0)(lambda: _ask(asked, index, pieces, number, threads))

    more = pl.cdiv(ahead.programs(threads), across)
    return both, (*args, *ahead.stacks, ahead.index), (own + more, *others)


def _ask(
    stacks: Sequence[Any],
    index: Any,
    pieces: Sequence[tuple[int, int]],
    program: jax.Array,
    threads: int,
) -> None:
    """Inside a kernel: what one of `Ahead.programs` asks for.

    Args:
        stacks: references to `Ahead.stacks`.
        index: reference to `Ahead.index`.
        pieces: `Ahead.pieces()`.
        program: its number.
        threads: a program.
    """
    before = 0
    for i, (stack, (count, size)) in enumerate(zip(stacks, pieces, strict=True)):
        programs = -(-count // threads)
        # Past the end the last piece is asked for once more.
        at = jnp.minimum((program - before) * threads + jnp.arange(threads), count - 1)
        here = (program >= before) & (program < before + programs)
        pl.when(here)(partial(_ask_for, stack, index[i] * count + at, size))
        before += programs


def _ask_for(stack: Any, at: jax.Array, size: int) -> None:
    _fetch.bind(stack, at, size=size)


# Triton has no such operation, and Pallas hands no address to inline assembly.
_fetch = core.Primitive("fetch_ahead")
_fetch.multiple_results = True


@_fetch.def_effectful_abstract_eval
def _effects(*_: Any, **__: Any) -> tuple[list[Any], set[Any]]:
    return [], {state.ReadEffect(0), barrier_effect}


@lowering.register_lowering(_fetch)
def _lowered(_: Any, pointer: Any, at: Any, *, size: int) -> list[Any]:
    """Pieces `at` int32, each of so many bytes, of what lies at a pointer."""
    shape = ir.RankedTensorType(at.type).shape
    wide = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(64))
    far = arith.muli(arith.extsi(wide, at), lowering._full(wide, size))
    byte = tt.PointerType.get(ir.IntegerType.get_signless(8), 1)
    first = lowering._bcast_to(tt.bitcast(byte, pointer), shape)
    asm = f"cp.async.bulk.prefetch.L2.global [$1], {size};\nmov.u32 $0, 0;"
    tt.elementwise_inline_asm(
        [ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))],
        asm,
        constraints="=r,l",
        pure=False,
        packed_element=1,
        args=[tt.addptr(ir.RankedTensorType.get(shape, byte), first, far)],
    )
    return []
