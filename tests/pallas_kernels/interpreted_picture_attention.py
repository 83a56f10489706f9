"""Attention in pictures on Mosaic, which `test_interpreted` runs where there are threads enough."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.picture_attention import picture_attention, rounded
from pallas_kernels.picture_attention_mosaic import Tiles, picture_attention_mosaic
from tests.pallas_kernels.test_picture_attention import close, drawn


def attended(*arrays: jax.Array, **options) -> jax.Array:
    """Waited for: a kernel asks JAX for something too, behind what is asked before it is done."""
    out = picture_attention_mosaic(*arrays, impl="interpret", **options)
    return jax.block_until_ready(out)


@pytest.mark.parametrize("tiles", [Tiles(keys=64, stages=2, programs=1), Tiles(programs=3)])
def test_agrees_with_the_formula(tiles: Tiles, watched) -> None:
    """Two pieces of work a program and one, fewer places than blocks and more."""
    qkv, cos, sin = drawn(1, 192, 1, 64)
    exact = picture_attention(qkv.astype(jnp.float32), cos, sin, impl="plain")
    close(attended(qkv, cos, sin, tiles=tiles), exact)


def test_what_it_rounds_to_e4m3_is_what_it_had_computed() -> None:
    qkv, cos, sin = drawn(1, 96, 1, 64)
    # So that some are out of range, some are nought, and some lie between two numbers.
    for step in (2.0**-9, 0.25, 2.0**9):
        wanted = rounded(attended(qkv, cos, sin), jnp.float32(step))
        out = attended(qkv, cos, sin, step=jnp.float32(step))
        assert out.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(out.astype(jnp.float32), wanted.astype(jnp.float32))
