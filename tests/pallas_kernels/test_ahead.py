"""Weights asked for ahead of time: all of them, and no other effect."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.contracts import h200
from pallas_kernels.ahead import PIECE, Ahead
from pallas_kernels.backend import Impl, as_data
from pallas_kernels.normed import Form, normed
from pallas_kernels.weights import Dense, Nvfp4
from tests.pallas_kernels.few_rows import draw, draw_rows


def with_products(x: jax.Array, ahead: Ahead | None, impl: Impl) -> list[jax.Array]:
    """Norms and small products of rows, whose kernel may ask for something."""
    small = [(Dense(jnp.ones((2, 9, 512), jnp.bfloat16)), 1)]
    norm = jnp.zeros((2, 512), jnp.bfloat16)
    out = normed(x, norm, 1, [Form(Dense)], small, eps=1e-6, impl=impl, ahead=ahead)
    return [*out.h, *out.products]


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
    function = partial(with_products, impl="kernel")
    one, other = (h200.compile(function, draw_rows(2, 512), a) for a in (ahead, None))
    assert [launch.name for launch in one.launches] == [launch.name for launch in other.launches]
    asked, nothing = (
        re.findall(r"prefetch\.L2\.global \[\S+\], (\d+);", "".join(k.ptx for k in program.kernels))
        for program in (one, other)
    )
    assert sorted(map(int, asked)) == [16, 1024]
    assert not nothing


def test_what_is_interpreted_asks_for_nothing() -> None:
    x = draw_rows(2, 512)
    for a, b in zip(
        with_products(x, weights(2), "interpret"), with_products(x, None, "interpret"), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_asking_changes_no_bit(rows: int) -> None:
    x = draw_rows(rows, 512)
    for a, b in zip(
        with_products(x, weights(2), "kernel"), with_products(x, None, "kernel"), strict=True
    ):
        np.testing.assert_array_equal(a, b)
