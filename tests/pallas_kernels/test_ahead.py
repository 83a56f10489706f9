"""Weights asked for ahead of time: all of them, and no other effect."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxinfer.contracts import h200
from pallas_kernels.ahead import PIECE, Ahead
from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.weights import Nvfp4
from tests.pallas_kernels.few_rows import draw

NUMBERS = jnp.arange(15.0).reshape(5, 3)


def doubled(x: jax.Array, ahead: Ahead | None, impl: Impl) -> jax.Array:
    """By a kernel of a program for each number, which may ask for something."""

    def body(x: Any, out: Any) -> None:
        at = pl.program_id(0), pl.program_id(1)
        out[at] = 2 * x[at]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(
        body, x, grid=x.shape, out_shape=shape, impl=impl, name="doubled", ahead=ahead
    )


def weights(layers: int) -> Ahead:
    """Of one stack the last, of another the first; in pieces that are not all of one size."""
    dense = jnp.zeros((layers, 33, 1000), jnp.bfloat16)
    other = draw("nvfp4", 64, 512)
    assert isinstance(other, Nvfp4)
    return Ahead((dense, other.q), as_data(layers - 1, 0))


def test_pieces_are_all_there_is() -> None:
    ahead = weights(3)
    for stack, (count, size) in zip(ahead.stacks, ahead.pieces(), strict=True):
        assert count * size == stack[0].nbytes
        assert size <= PIECE
        assert size % 16 == 0
    # 33 · 2000 bytes are in pieces of 16, 64 · 256 in those of 1024.
    assert ahead.pieces() == [(4125, 16), (16, 1024)]
    assert ahead.programs(128) == 33 + 1


@pytest.mark.skipif(bool(h200.missing()), reason=h200.missing())
def test_a_kernel_asks_for_every_stack() -> None:
    ahead = weights(3)
    function = partial(doubled, impl="kernel")
    one, other = (h200.compile(function, NUMBERS, a) for a in (ahead, None))
    assert [launch.name for launch in one.launches] == [launch.name for launch in other.launches]
    asked, nothing = (
        re.findall(r"prefetch\.L2\.global \[\S+\], (\d+);", "".join(k.ptx for k in program.kernels))
        for program in (one, other)
    )
    assert sorted(map(int, asked)) == [16, 1024]
    assert not nothing


def test_what_is_interpreted_asks_for_nothing() -> None:
    np.testing.assert_array_equal(doubled(NUMBERS, weights(2), "interpret"), 2 * NUMBERS)


@pytest.mark.gpu
def test_asking_changes_nothing_else() -> None:
    np.testing.assert_array_equal(doubled(NUMBERS, weights(2), "kernel"), 2 * NUMBERS)
