from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import experts
from pallas_kernels.backend import Impl, as_data
from pallas_kernels.expert_stream import _scattered
from pallas_kernels.experts_mosaic import Tiles, experts_mosaic
from pallas_kernels.matmul import place, placed_at
from pallas_kernels.normed import formed
from pallas_kernels.weights import Nvfp4
from tests.pallas_kernels.few_rows import distance, draw, draw_rows, form, same_bits


class Experts:
    """A layer of experts, and what it makes of some rows."""

    def __init__(self, D: int, inner: int, shared: int, count: int, k: int) -> None:
        self.weights = experts.Layer(
            draw("nvfp4", 2 * inner, D, count, parts=2),
            draw("nvfp4", 2 * shared, D, parts=2),
            draw("nvfp4", D, inner, count),
            draw("nvfp4", D, shared),
        )
        self.k, self.form = k, form(self.weights.up, 1)

    def streamed(self, x: jax.Array, logits: jax.Array, impl: Impl, **tiles: int) -> jax.Array:
        h = formed(x, self.form)
        stacks, at = zip(*(place(w, 1) for w in self.weights), strict=True)
        args = x, h, h, logits, logits[:, :1], experts.Layer(*stacks), as_data(*at)
        y = experts_mosaic(*args, k=self.k, impl=impl, tiles=Tiles(**tiles))
        # What is dispatched while a kernel is interpreted may wait for it, and it for that.
        return jax.block_until_ready(y) if impl == "interpret" else y

    def otherwise(
        self, x: jax.Array, logits: jax.Array, impl: Impl, tiles: experts.Tiles | None
    ) -> jax.Array:
        h = formed(x, self.form)
        args = x, h, h, logits, logits[:, :1], self.weights, 1, self.k
        return experts.experts(*args, impl=impl, tiles=tiles)


SMALL = partial(Experts, D=512, inner=256, shared=256, count=4, k=2)


def test_each_row_through_its_own_experts() -> None:
    """Ten rows, of which nine choose alike: more of one expert than a group holds."""
    layer, x = SMALL(), draw_rows(10, 512)
    logits = draw_rows(2, 4, seed=1)[jnp.array([0] * 4 + [1] + [0] * 5)]
    ours = layer.streamed(x, logits, "interpret", depth=256, stages=3, blocks=3)
    assert distance(ours, layer.otherwise(x, logits, "plain", None)) < 6e-3


def test_results_lie_where_the_next_product_wants_them() -> None:
    rows = jnp.arange(64)
    for tile in range(2):
        feature = 32 * (rows // 16) + 16 * tile + rows % 16
        place = np.asarray(placed_at(Nvfp4, feature, 128)) - 64 * tile
        found = np.asarray(_scattered(rows[:, None], turned=True))[0]
        assert np.array_equal(found[place], rows)


def test_refuses_what_does_not_fit() -> None:
    layer = Experts(D=256, inner=64, shared=64, count=4, k=2)
    with pytest.raises(ValueError, match="multiple of 256"):
        layer.streamed(draw_rows(1, 256), draw_rows(1, 4), "interpret")
    shallow = partial(SMALL().streamed, impl="interpret", depth=128)
    with pytest.raises(ValueError, match="a piece"):
        jax.eval_shape(shallow, draw_rows(1, 512), draw_rows(1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [{}, {"rows": 16}, {"depth": 256, "stages": 3, "blocks": 396}])
def test_kernel_has_the_bits_of_the_kernels_on_triton(tiles: dict[str, int]) -> None:
    """Those of all rows of an expert together, and those of each row by itself."""
    layer = Experts(D=2048, inner=512, shared=512, count=256, k=8)
    x, logits = draw_rows(70, 2048), draw_rows(70, 256, seed=1)
    fast = jax.jit(lambda x, logits: layer.streamed(x, logits, "kernel", **tiles))
    whole = fast(x, logits)
    assert distance(whole[:4], layer.otherwise(x[:4], logits[:4], "plain", None)) < 6e-3
    together = jax.jit(lambda x, logits: layer.otherwise(x, logits, "kernel", experts.Tiles()))
    assert same_bits(whole, together(x, logits))
    alone = jax.jit(lambda x, logits: layer.otherwise(x, logits, "kernel", None))
    assert same_bits(whole[: experts.ALONE], alone(x[: experts.ALONE], logits[: experts.ALONE]))
    for count in (1, 5, 8, 32, 64):
        assert same_bits(fast(x[-count:], logits[-count:]), whole[-count:])
    alike = fast(x, jnp.tile(logits[:1], (70, 1)))
    assert same_bits(alike[:1], whole[:1])
