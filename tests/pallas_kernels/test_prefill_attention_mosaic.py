"""Attention of prompts on Mosaic: the formula, whatever the tiles; see also `test_interpreted`."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention_mosaic import Tiles, fits, prefill_attention_mosaic
from tests.pallas_kernels.attention_inputs import REAL, SMALL, case, close, run
from tests.pallas_kernels.test_prefill_attention import filled_up, in_calls_of_one, pieces

ON_TRITON = partial(prefill_attention, kernel="triton")
ON_MOSAIC = partial(prefill_attention, kernel="mosaic")
WAYS = [
    Tiles(),
    Tiles(together=1),
    Tiles(programs=6),
    Tiles(programs=1 << 30),
]


def test_what_does_not_fit_is_left_to_the_other_kernel() -> None:
    c = pieces(SMALL)
    few = {"heads": 2, "block": 8}
    other = run(ON_TRITON, c, "interpret", **few)[0]
    np.testing.assert_array_equal(run(ON_MOSAIC, c, "interpret", **few)[0], other)


def test_what_does_not_fit_is_refused() -> None:
    bf16, fp8 = jnp.bfloat16, jnp.float8_e4m3fn
    q = jnp.zeros((1, 64, 16, 256), bf16)
    pages, small = (jnp.zeros((1, 2, 64, 2, 256), kind) for kind in (bf16, fp8))
    assert fits(q, pages)
    assert not fits(q, small)
    assert not fits(q[:, :, :2], pages)
    assert not fits(q[:, :32], pages[:, :, :32])
    none = jnp.zeros(0, jnp.int32)
    with pytest.raises(ValueError, match="not for queries"):
        prefill_attention_mosaic(none, q, q, small, small, none, none, impl="kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("first", [1, 30])
def test_kernel_agrees_on_real_shapes(first: int, tiles: Tiles) -> None:
    c = pieces(REAL, first=first)
    out = run(ON_MOSAIC, c, "kernel", tiles=tiles)
    close(out, run(prefill_attention, c, "plain"), 2e-2)
    assert np.isfinite(out[0]).all()
    other = run(ON_TRITON, c, "kernel")
    close(out, other, 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", WAYS)
def test_kernel_has_the_same_bits_however_a_prompt_is_split(tiles: Tiles) -> None:
    c = pieces(REAL, first=30)
    together = run(ON_MOSAIC, filled_up(c), "kernel")[0]
    alone = in_calls_of_one(c, "kernel", kernel="mosaic", tiles=tiles)
    np.testing.assert_array_equal(alone, together[:4])
    wider = replace(c, table=jnp.pad(c.table, ((0, 0), (0, 100))))
    out = run(ON_MOSAIC, wider, "kernel", tiles=tiles)[0]
    np.testing.assert_array_equal(out, together[:4])


@pytest.mark.gpu
def test_kernel_has_the_same_bits_at_every_run() -> None:
    """With more pieces of work than programs, and sequences of all lengths between them."""
    count = 40
    c = case(REAL, [64 * n for n in range(count)], [64] * count, 64, count, own=[0] * count)
    first = run(ON_MOSAIC, c, "kernel")[0]
    assert np.isfinite(first).all()
    close([first], run(prefill_attention, c, "plain")[:1], 2e-2)
    for tiles in WAYS * 3:
        out = run(ON_MOSAIC, c, "kernel", tiles=tiles)[0]
        np.testing.assert_array_equal(out, first)
