"""The whole decode step compiles for an H200: in place, without copies, in so many launches."""

import pytest

from jaxinfer.contracts import h200
from jaxinfer.contracts.step import compiles

LAYERS = 4
"""One period of the model: three of Gated DeltaNet, one of attention."""


@pytest.mark.skipif(bool(h200.missing()), reason=h200.missing())
def test_a_decode_step() -> None:
    """The launches of these layers, of the head, of the choice of tokens and of drafts."""
    program = compiles(rows=1, drafts=3, layers=LAYERS)
    assert len(program.launches) <= 172
    # Only whether some row samples, and whether its threshold is hard to find.
    assert program.loops <= 2
