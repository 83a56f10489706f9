"""Every candidate of every contract, at its shapes, as parameters of tests."""

from collections.abc import Mapping
from typing import Any

import pytest

from jaxinfer.contracts.checks import Subject
from jaxinfer.contracts.contract import Contract, Sizes
from jaxinfer.contracts.registry import CONTRACTS
from pallas_kernels.backend import Impl


def edges() -> list[Any]:
    """At small and awkward shapes, to be interpreted."""
    return [p for c in CONTRACTS.values() for p in _params(c, c.edges, "interpret")]


def real() -> list[Any]:
    """At shapes of the real world."""
    return [p for c in CONTRACTS.values() for p in _params(c, c.shapes, "kernel")]


def first() -> list[Any]:
    """At the first of those: `jaxinfer verify` does all, which takes longer."""
    first = {name: dict([*c.shapes.items()][:1]) for name, c in CONTRACTS.items()}
    return [p for n, c in CONTRACTS.items() for p in _params(c, first[n], "kernel")]


def _params(contract: Contract, shapes: Mapping[str, Sizes], impl: Impl) -> list[Any]:
    return [
        pytest.param(
            Subject(contract, candidate, sizes, impl), id=f"{contract.name}-{candidate}-{shape}"
        )
        for candidate in contract.candidates
        for shape, sizes in shapes.items()
    ]
