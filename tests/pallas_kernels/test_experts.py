from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.experts import expert_inner, expert_outer
from pallas_kernels.normed import formed
from tests.pallas_kernels.few_rows import distance, draw, draw_rows, form, same_bits


class Experts:
    """A layer of experts, and both halves over some rows."""

    def __init__(self, kind: str, D: int, inner: int, shared: int, experts: int, k: int) -> None:
        self.up = draw(kind, 2 * inner, D, experts, parts=2), draw(kind, 2 * shared, D, parts=2)
        self.down = draw(kind, D, inner, experts), draw(kind, D, shared)
        self.k = k

    def run(self, x: jax.Array, logits: jax.Array, impl: str) -> tuple[jax.Array, jax.Array]:
        h = [formed(x, form(w, 1)) for w in self.up]
        after = tuple(form(w, 1).kind for w in self.down)
        run = partial(expert_inner, impl=impl)
        inner = run(*h, logits, *self.up, 1, self.k, after)
        run = partial(expert_outer, impl=impl)
        return inner, run(x, inner, logits, logits[:, :1], *self.down, 1, self.k)


@pytest.mark.parametrize("kind", ["nvfp4", "dense"])
def test_each_row_through_its_own_experts(kind: str) -> None:
    experts = Experts(kind, D=256, inner=64, shared=128, experts=16, k=4)
    x, logits = draw_rows(3, 256), draw_rows(3, 16, seed=1)
    for ours, reference in zip(
        experts.run(x, logits, "interpret"), experts.run(x, logits, "plain"), strict=True
    ):
        assert distance(ours, reference) < 6e-3


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    experts = Experts("dense", D=64, inner=32, shared=32, experts=8, k=4)
    x = draw_rows(2, 64)
    logits = jnp.array([[1, 3, 3, 3, 1, 1, 1, -2], [0, 0, 0, 0, 0, 0, 0, 0]], jnp.bfloat16)
    for ours, reference in zip(
        experts.run(x, logits, "interpret"), experts.run(x, logits, "plain"), strict=True
    ):
        assert distance(ours, reference) < 6e-3


@pytest.mark.gpu
def test_kernel_is_right_and_alike_in_every_company() -> None:
    experts = Experts("nvfp4", D=2048, inner=512, shared=512, experts=256, k=8)
    x, logits = draw_rows(40, 2048), draw_rows(40, 256, seed=1)
    fast = jax.jit(lambda x, logits: experts.run(x, logits, "kernel"))
    whole = fast(x, logits)
    for ours, reference in zip(whole, experts.run(x[:4], logits[:4], "plain"), strict=True):
        assert distance(ours[:4], reference) < 6e-3
    for count in (1, 2, 5, 8, 32):
        for part, all_of_it in zip(fast(x[-count:], logits[-count:]), whole, strict=True):
            assert same_bits(part, all_of_it[-count:])
