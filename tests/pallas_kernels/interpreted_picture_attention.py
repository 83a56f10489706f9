"""What `test_picture_attention_mosaic` runs where there are threads enough."""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.picture_attention import picture_attention, rounded
from pallas_kernels.picture_attention_mosaic import Tiles, picture_attention_mosaic
from tests.pallas_kernels.test_picture_attention import close, drawn


@pytest.fixture
def watched(monkeypatch) -> Iterator[None]:
    """Interpreted, and any access to memory that nothing orders is found."""
    params = partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", params)
    yield
    interpreter.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("tiles", [Tiles(keys=64, stages=2, programs=1), Tiles(programs=3)])
def test_agrees_with_the_formula(tiles: Tiles, watched) -> None:
    """Two pieces of work a program and one, fewer places than blocks and more."""
    qkv, cos, sin = drawn(1, 192, 1, 64)
    exact = picture_attention(qkv.astype(jnp.float32), cos, sin, impl="plain")
    close(picture_attention_mosaic(qkv, cos, sin, impl="interpret", tiles=tiles), exact)
    assert not interpreter.get_races().races_found


def test_what_it_rounds_to_e4m3_is_what_it_had_computed() -> None:
    qkv, cos, sin = drawn(1, 96, 1, 64)
    # So that some are out of range, some are nought, and some lie between two numbers.
    for step in (2.0**-9, 0.25, 2.0**9):
        wanted = rounded(
            picture_attention_mosaic(qkv, cos, sin, impl="interpret"), jnp.float32(step)
        )
        out = picture_attention_mosaic(qkv, cos, sin, impl="interpret", step=jnp.float32(step))
        assert out.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(out.astype(jnp.float32), wanted.astype(jnp.float32))
