"""Every contract holds on a GPU, at real sizes, for inputs that nobody has seen before."""

import os
import time
from dataclasses import replace

import pytest

from jaxinfer.contracts.checks import Subject, holds
from jaxinfer.contracts.tune import cut
from tests.contracts.subjects import real

SEED = int(os.environ.get("JAXINFER_TEST_SEED", time.time()))
"""A failure names it."""


@pytest.mark.gpu
@pytest.mark.parametrize("subject", real())
def test_on_a_gpu(subject: Subject) -> None:
    sizes = cut(subject.contract, subject.sizes)
    holds(replace(subject, sizes=sizes), seeds=(SEED, SEED + 1))
