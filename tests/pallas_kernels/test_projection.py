import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear
from pallas_kernels.normed import formed
from pallas_kernels.projection import SHORT, TALL, Tiles, project
from tests.pallas_kernels.few_rows import distance, draw, draw_rows, form, same_bits

KINDS = ("dense", "fp8", "fp8_static", "nvfp4")
ROWS = (1, 2, 5, 8, 16, 40)


@pytest.mark.parametrize("tiles", [TALL, SHORT])
@pytest.mark.parametrize("kind", KINDS)
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
    w, x, residual = draw("fp8_static", 32, 256), draw_rows(18, 256), draw_rows(18, 32, seed=1)
    y = project([formed(x, form(w, 0))], [w], 0, residual=residual, impl="interpret")[0]
    assert distance(y, residual + linear(x, w, 0)) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "rows", "cols"),
    [("fp8_static", 12288, 2048), ("fp8_static", 2048, 4096), ("nvfp4", 248320, 2048)],
)
@pytest.mark.parametrize("tiles", [TALL, SHORT])
def test_kernel_is_right_and_alike_in_every_company(
    kind: str, rows: int, cols: int, tiles: Tiles
) -> None:
    w, x = draw(kind, rows, cols), draw_rows(40, cols)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        h = formed(x, form(w, 1))
        return project([h], [w], 1, dtype=jnp.float32, impl="kernel", tiles=tiles)[0]

    whole = run(x)
    assert distance(whole[:8], linear(x[:8], w, 1, jnp.float32)) < 1e-3
    for count in ROWS:
        assert same_bits(run(x[:count]), whole[:count])
        assert same_bits(run(x[-count:]), whole[-count:])
