"""Every contract holds where kernels are interpreted."""

import pytest

from jaxinfer.contracts.checks import Subject, holds, shapes_agree
from jaxinfer.contracts.registry import CONTRACTS
from jaxinfer.contracts.tune import groups
from tests.contracts.subjects import edges


@pytest.mark.parametrize("subject", edges())
def test_on_a_cpu(subject: Subject) -> None:
    holds(subject)


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_reference_has_the_shapes_that_are_promised(name: str) -> None:
    contract = CONTRACTS[name]
    for sizes in (*contract.edges.values(), *contract.shapes.values()):
        shapes_agree(contract, sizes)


@pytest.mark.parametrize("name", CONTRACTS)
def test_block_sizes_do_not_follow_the_number_of_rows(name: str) -> None:
    """Else a row would have other bits in other company."""
    contract = CONTRACTS[name]
    rows = {symbol for symbol, how in contract.invariant.items() if how != "labels"}
    assert not rows & set(contract.group)
    assert sum(map(len, groups(contract).values())) == len(contract.shapes)
