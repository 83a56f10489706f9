from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Impl
from pallas_kernels.experts import ALONE, Layer, Tiles, experts
from pallas_kernels.normed import formed, normed
from tests.pallas_kernels.few_rows import distance, draw, draw_rows, form, same_bits

EPS = 1e-6


class Experts:
    """A layer of experts, and what it makes of some rows."""

    def __init__(self, kind: str, D: int, inner: int, shared: int, experts: int, k: int) -> None:
        self.weights = Layer(
            draw(kind, 2 * inner, D, experts, parts=2),
            draw(kind, 2 * shared, D, parts=2),
            draw(kind, D, inner, experts),
            draw(kind, D, shared),
        )
        self.norm = 0.1 * draw_rows(2, D, seed=2)
        self.router, self.gate, self.k = draw("dense", experts, D), draw("dense", 1, D), k
        self.forms = [form(w, 1) for w in (self.weights.up, self.weights.shared_up)]

    def sent(self, x: jax.Array, logits: jax.Array, impl: Impl, **tiles: int) -> jax.Array:
        """Rows as they are, with given logits."""
        h = [formed(x, form) for form in self.forms]
        args = x, *h, logits, logits[:, :1], self.weights, 1, self.k
        return experts(*args, impl=impl, tiles=Tiles(**tiles) if tiles else None)

    def layer(self, x: jax.Array, impl: Impl, **tiles: int) -> jax.Array:
        """Norm, router and experts."""
        small = [(self.router, 1), (self.gate, 0)]
        first = normed(x, self.norm, 1, self.forms, small, eps=EPS, impl=impl)
        args = x, *first.h, *first.products, self.weights, 1, self.k
        return experts(*args, impl=impl, tiles=Tiles(**tiles) if tiles else None)


SMALL = partial(Experts, D=256, inner=64, shared=128, experts=16, k=4)


@pytest.mark.parametrize(("kind", "rows"), [("nvfp4", 6), ("dense", 3)])
def test_each_row_through_its_own_experts(kind: str, rows: int) -> None:
    layer = SMALL(kind)
    x, logits = draw_rows(rows, 256), draw_rows(rows, 16, seed=1)
    ours, reference = (layer.sent(x, logits, impl) for impl in ("interpret", "plain"))
    assert distance(ours, reference) < 6e-3


def test_more_pairs_of_one_expert_than_a_tile_holds() -> None:
    layer = Experts("dense", D=64, inner=32, shared=32, experts=8, k=4)
    x, logits = draw_rows(20, 64), jnp.tile(draw_rows(1, 8, seed=1), (20, 1))
    ours, reference = (layer.sent(x, logits, impl) for impl in ("interpret", "plain"))
    assert distance(ours, reference) < 6e-3


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    layer = Experts("dense", D=64, inner=32, shared=32, experts=8, k=4)
    x = draw_rows(2, 64)
    logits = jnp.array([[1, 3, 3, 3, 1, 1, 1, -2], [0, 0, 0, 0, 0, 0, 0, 0]], jnp.bfloat16)
    ours, reference = (layer.sent(x, logits, impl) for impl in ("interpret", "plain"))
    assert distance(ours, reference) < 6e-3


def test_a_row_is_alike_in_every_company() -> None:
    layer, x = SMALL("nvfp4"), draw_rows(20, 256)
    whole = layer.layer(x, "interpret")
    for count in (1, 3):
        assert same_bits(layer.layer(x[-count:], "interpret"), whole[-count:])


def test_rows_that_go_by_themselves_find_the_experts_in_registers_too() -> None:
    """At widths at which tiles are loaded as tensor cores read them.

    Interpreted, a last bit may differ: a CPU joins multiplications and additions where it likes.
    """
    layer = Experts("nvfp4", D=512, inner=128, shared=256, experts=16, k=8)
    x, logits = draw_rows(ALONE, 512), draw_rows(ALONE, 16, seed=1)
    ours, reference = (layer.sent(x, logits, impl) for impl in ("interpret", "plain"))
    assert distance(ours, reference) < 6e-3
    assert distance(ours, layer.sent(x, logits, "interpret", up=32)) < 1e-3


@pytest.mark.gpu
def test_kernel_is_right_and_alike_in_every_company() -> None:
    layer = Experts("nvfp4", D=2048, inner=512, shared=512, experts=256, k=8)
    x, logits = draw_rows(70, 2048), draw_rows(70, 256, seed=1)
    fast = jax.jit(lambda x, logits: layer.sent(x, logits, "kernel"))
    whole = fast(x, logits)
    assert distance(whole[:4], layer.sent(x[:4], logits[:4], "plain")) < 6e-3
    for count in (1, 2, 5, 8, 32, 64):
        assert same_bits(fast(x[-count:], logits[-count:]), whole[-count:])
    alike = fast(x, jnp.tile(logits[:1], (70, 1)))
    assert same_bits(alike[:1], whole[:1])
    assert same_bits(alike[69:], fast(x[69:], logits[:1]))


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [{"up": 32}, {"stages": 1}, {"up": 16, "down": 64, "warps": 4}])
def test_kernel_has_the_bits_of_rows_by_themselves(tiles: dict[str, int]) -> None:
    layer = Experts("nvfp4", D=2048, inner=512, shared=512, experts=256, k=8)
    x = draw_rows(33, 2048)
    whole = jax.jit(lambda x: layer.layer(x, "kernel", **tiles))(x)
    alone = jax.jit(lambda x: layer.layer(x, "kernel"))
    for r in range(33):
        assert same_bits(alone(x[r : r + 1]), whole[r : r + 1])
    for count in (2, ALONE):
        assert same_bits(alone(x[:count]), whole[:count])
