from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear
from pallas_kernels.normed import formed
from pallas_kernels.projection import HEAD, SHORT, TALL, Tiles, project
from tests.pallas_kernels.few_rows import distance, draw, draw_rows, form, same_bits

KINDS = ("dense", "fp8", "fp8_static", "nvfp4")
ROWS = (1, 2, 5, 8, 16, 32, 40)


@pytest.mark.parametrize(
    ("kind", "tiles"), [*((kind, TALL) for kind in KINDS), ("fp8_static", SHORT), ("nvfp4", HEAD)]
)
def test_several_weights_of_several_formats_in_one_launch(kind: str, tiles: Tiles) -> None:
    """One has a number of rows that no tile divides, and two parts with scales of their own."""
    weights = [draw(kind, 72, 512, parts=2), draw("dense", 24, 512)]
    x = draw_rows(5, 512)
    inputs = [formed(x, form(w, 1)) for w in weights]
    for y, w in zip(
        project(inputs, weights, 1, impl="interpret", tiles=tiles), weights, strict=True
    ):
        assert distance(y, linear(x, w, 1)) < 2e-3


def test_more_rows_than_share_a_load_and_a_residual() -> None:
    w, x, residual = draw("fp8_static", 32, 256), draw_rows(66, 256), draw_rows(66, 32, seed=1)
    y = project([formed(x, form(w, 0))], [w], 0, residual=residual, impl="interpret")[0]
    assert distance(y, residual + linear(x, w, 0)) < 2e-3


def test_a_row_is_alike_in_every_company() -> None:
    w, x = draw("fp8_static", 32, 256), draw_rows(20, 256)

    def run(x: jax.Array, tiles: Tiles) -> jax.Array:
        return project([formed(x, form(w, 1))], [w], 1, impl="interpret", tiles=tiles)[0]

    for tiles in (TALL, SHORT):
        whole = run(x, tiles)
        for count in (1, 3):
            assert same_bits(run(x[-count:], tiles), whole[-count:])


CASES = [
    ("fp8_static", 12288, 2048, TALL),
    ("fp8_static", 2048, 4096, SHORT),
    ("nvfp4", 248320, 2048, HEAD),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "rows", "cols", "tiles"), CASES)
def test_kernel_is_right_and_alike_in_every_company(
    kind: str, rows: int, cols: int, tiles: Tiles
) -> None:
    w, x = draw(kind, rows, cols), draw_rows(70, cols)

    @partial(jax.jit, static_argnames="tiles")
    def run(x: jax.Array, tiles: Tiles = tiles) -> jax.Array:
        h = formed(x, form(w, 1))
        return project([h], [w], 1, dtype=jnp.float32, impl="kernel", tiles=tiles)[0]

    whole = run(x)
    assert distance(whole[:8], linear(x[:8], w, 1, jnp.float32)) < 1e-3
    for count in ROWS:
        assert same_bits(run(x[:count]), whole[:count])
        assert same_bits(run(x[-count:]), whole[-count:])
    # Nor do rows of a tile and where its parts lie show.
    other = replace(tiles, rows=128 // tiles.parts, beside=tiles.parts, step=256, stages=3, warps=8)
    assert same_bits(run(x[:5], other), whole[:5])
