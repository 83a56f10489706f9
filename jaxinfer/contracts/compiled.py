"""What a candidate's program for an H200 must be like; AssertionError if it is not."""

import re
from math import prod
from typing import Any

import jax

from jaxinfer.contracts import h200
from jaxinfer.contracts.checks import Subject
from jaxinfer.contracts.contract import Contract, Sizes

_SMALL = 1 << 16
"""Bytes that may be copied without a thought."""


def compiles(subject: Subject) -> h200.Program:
    """Compile for an H200: nothing spills, nothing is copied, what is overwritten is in place."""
    contract, sizes = subject.contract, subject.sizes
    candidate = contract.candidates[subject.candidate]
    program = h200.compile(
        contract.function(subject.candidate, sizes, subject.impl, subject.knobs),
        *contract.shaped(sizes),
        donate=contract.donated,
    )
    what = f"{contract.name} by {subject.candidate}"
    for kernel in program.kernels:
        spilled = kernel.spilled
        assert spilled <= candidate.spills, f"{what}: {kernel.name} spills {spilled} bytes"
    code = "".join(kernel.ptx for kernel in program.kernels)
    for instruction in candidate.instructions:
        assert instruction in code, f"{what}: no {instruction} in its code"
    in_place = _overwritten_bytes(contract, sizes)
    assert program.aliased >= in_place, (
        f"{what}: {program.aliased} of {in_place} bytes are in place"
    )
    copies = uncalled_for(contract, sizes, program)
    assert not copies, f"{what}: copies {', '.join(f'{m.name} {m.shape}' for m in copies)}"
    return program


def uncalled_for(contract: Contract, sizes: Sizes, program: h200.Program) -> list[h200.Moved]:
    """Copies of stacks, of one layer of them, and of what is overwritten."""
    held = [
        spec.sized(sizes)
        for name, tree in contract.arguments.items()
        for spec in jax.tree.leaves(tree)
        if name in contract.overwrites or contract.stack in spec.axes
    ]
    return copied(program, held)


def copied(program: h200.Program, arrays: list[Any]) -> list[h200.Moved]:
    """Copies as large as one of these arrays, or as what lies behind its first axes."""
    shapes = {array.shape[cut:] for array in arrays for cut in range(max(1, array.ndim - 1))}
    moves = program.moved(_SMALL)
    return [move for move in moves if _without_ones(_dimensions(move.shape)) in shapes]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading axes of one entry."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _overwritten_bytes(contract: Contract, sizes: Sizes) -> int:
    leaves = [
        spec.sized(sizes)
        for name in contract.overwrites
        for spec in jax.tree.leaves(contract.arguments[name])
    ]
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _dimensions(shape: str) -> tuple[int, ...]:
    """`bf16[30,64]` -> `(30, 64)`."""
    return tuple(int(number) for number in re.findall(r"\d+", shape.split("[")[1]))
