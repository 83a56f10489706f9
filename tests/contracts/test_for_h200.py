"""Every contract's program for an H200: nothing spills, what is overwritten is in place."""

import pytest

from jaxinfer.contracts import h200
from jaxinfer.contracts.checks import Subject
from jaxinfer.contracts.compiled import compiles
from tests.contracts.subjects import first


@pytest.mark.skipif(bool(h200.missing()), reason=h200.missing())
@pytest.mark.parametrize("subject", first())
def test_for_an_h200(subject: Subject) -> None:
    compiles(subject)
