"""`jaxinfer verify`."""

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.commands.terminal import out
from jaxinfer.contracts import bench, h200, step
from jaxinfer.contracts.checks import Subject, holds, shapes_agree
from jaxinfer.contracts.compiled import compiles
from jaxinfer.contracts.contract import Contract
from jaxinfer.contracts.registry import find
from jaxinfer.contracts.tune import cut


def run(names: tuple[str, ...], seed: int | None) -> None:
    """Check contracts in every way that this machine can. Raises ValueError if one is broken."""
    with_step = step.NAME in names
    named = tuple(name for name in names if name != step.NAME)
    contracts = [] if with_step and not named else find(named)
    seed = int(time.time()) if seed is None else seed
    out.print(f"seed {seed}", style="dim")
    on_gpu = jax.default_backend() != "cpu"
    lacking = h200.missing()
    if not on_gpu and lacking:
        out.print(f"not compiled for an H200: {lacking}", style="yellow")
    broken = 0
    for contract in contracts:
        for candidate in contract.candidates:
            checks = _on_gpu if on_gpu else _on_cpu
            for what, check in checks(contract, candidate, seed, compiled=not lacking):
                broken += not _passes(f"{contract.name} {candidate}: {what}", check)
    if with_step and not lacking:
        broken += not _passes(f"{step.NAME}: 1 row", lambda: _told(step.compiles(rows=1)))
    if broken:
        raise ValueError(f"{broken} promises are broken")


Checks = list[tuple[str, Callable[[], Any]]]


def _on_cpu(contract: Contract, candidate: str, seed: int, compiled: bool) -> Checks:
    checks: Checks = []
    for name, sizes in contract.edges.items():
        subject = Subject(contract, candidate, sizes, "interpret")
        checks.append((name, lambda s=subject: holds(s, (seed, seed + 1))))
    for name, sizes in contract.shapes.items():
        checks.append((f"{name}, shapes", lambda s=sizes: shapes_agree(contract, s)))
        if compiled:
            subject = Subject(contract, candidate, sizes, "kernel")
            checks.append((f"{name}, for an H200", lambda s=subject: _told(compiles(s))))
    return checks


def _on_gpu(contract: Contract, candidate: str, seed: int, compiled: bool) -> Checks:
    checks: Checks = []
    for name, sizes in contract.shapes.items():
        subject = Subject(contract, candidate, cut(contract, sizes), "kernel")
        checks.append((name, lambda s=subject: holds(s, (seed, seed + 1))))
        checks.append((f"{name}, speed", lambda s=subject: _speed(s)))
    return checks


def _told(program: h200.Program) -> str:
    told = f"{len(program.launches)} launches"
    if program.loops:
        told += f", {program.loops} of them loops"
    if program.kernels:
        told += f", {max(kernel.registers for kernel in program.kernels)} registers"
    return told


def _speed(subject: Subject) -> str:
    taken = bench.seconds(subject)
    kind = jax.devices()[0].device_kind
    if kind not in bench.LIMITS:
        return f"{1e6 * taken:.2f} us"
    least = bench.least_seconds(subject.contract, subject.sizes, bench.LIMITS[kind])
    return f"{1e6 * taken:.2f} us, {least / taken:.0%} of the limit"


def _passes(what: str, check: Callable[[], Any]) -> bool:
    try:
        told = check()
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        out.print(f"{what}: {str(error).strip()}", style="red", markup=False)
        return False
    out.print(f"{what}: {told or 'holds'}", markup=False)
    return True
