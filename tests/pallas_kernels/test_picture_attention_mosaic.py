"""Attention in pictures on Mosaic: the formula, whatever the tiles; see also `test_interpreted`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.picture_attention import picture_attention, rounded
from pallas_kernels.picture_attention_mosaic import Tiles, picture_attention_mosaic
from tests.pallas_kernels.test_picture_attention import close, drawn

WAYS = [
    Tiles(),
    Tiles(keys=64),
    Tiles(programs=1 << 30),
    Tiles(consumers=2, keys=192, stages=2),
]


def test_what_does_not_fit_is_left_to_the_other_kernel() -> None:
    qkv, cos, sin = drawn(1, 9, 1, 16)
    other = picture_attention(qkv, cos, sin, impl="interpret")
    out = picture_attention_mosaic(qkv, cos, sin, impl="interpret")
    np.testing.assert_array_equal(out, other)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize(("groups", "n", "heads"), [(9, 576, 16), (1, 5184, 4)])
def test_kernel_agrees_on_real_shapes(groups: int, n: int, heads: int, tiles: Tiles) -> None:
    qkv, cos, sin = drawn(groups, n, heads, 64)  # Few, where the formula writes scores down.
    exact = picture_attention(qkv.astype(jnp.float32), cos, sin, impl="plain")
    out = picture_attention_mosaic(qkv, cos, sin, impl="kernel", tiles=tiles)
    close(out, exact)
    one = picture_attention_mosaic(qkv[:1], cos, sin, impl="kernel", tiles=tiles)
    np.testing.assert_array_equal(out[:1], one)
    step = jnp.float32(0.25)
    fine = picture_attention_mosaic(qkv, cos, sin, impl="kernel", step=step, tiles=tiles)
    np.testing.assert_array_equal(fine, rounded(out, step))


def test_tiles_that_it_cannot_have_are_refused() -> None:
    qkv, cos, sin = drawn(1, 64, 1, 64)
    with pytest.raises(ValueError, match="2 or 3 consumers"):
        picture_attention_mosaic(qkv, cos, sin, impl="plain", tiles=Tiles(consumers=4))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), qkv)
    with pytest.raises(ValueError, match="float32, so ask for plain"):
        picture_attention_mosaic(wide, cos, sin, impl="kernel")
