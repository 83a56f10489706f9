"""All contracts."""

from jaxinfer.contracts.contract import Contract
from jaxinfer.contracts.kernels import (
    attention,
    delta,
    detector,
    experts,
    grouped,
    linear,
    matmul,
    picture,
    projection,
    sampling,
    state,
    triangular,
)

_MODULES = (
    projection,
    attention,
    delta,
    experts,
    sampling,
    state,
    matmul,
    grouped,
    linear,
    triangular,
    picture,
    detector,
)

CONTRACTS: dict[str, Contract] = {
    contract.name: contract for module in _MODULES for contract in module.CONTRACTS
}


def find(names: tuple[str, ...]) -> list[Contract]:
    """Contracts of these names, or of names that begin so; all if none is given.

    Raises:
        ValueError: there is none of a name.
    """
    for name in names:
        if not any(known.startswith(name) for known in CONTRACTS):
            raise ValueError(f"no contract {name!r}; there are {', '.join(CONTRACTS)}")
    return [c for name, c in CONTRACTS.items() if not names or name.startswith(names)]
