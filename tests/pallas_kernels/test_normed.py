import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Dense, Fp8, Nvfp4
from pallas_kernels.matmul import in_order, placed_at, source
from pallas_kernels.normed import Form, Normed, normed
from tests.pallas_kernels.few_rows import distance, draw, draw_rows, same_bits


def run(x: jax.Array, impl: str, height: int = 24) -> Normed:
    K = x.shape[-1]
    forms = [Form(Fp8, jnp.array([0.01, 0.03]), 1), Form(Dense), Form(Nvfp4)]
    small = [(draw("dense", height, K), 1), (draw("dense", 1, K), 0)]
    norm = 0.1 * draw_rows(2, K, seed=1)
    return normed(x, norm, 1, forms, small, eps=1e-6, impl=impl)


def test_norms_forms_and_small_products() -> None:
    x = draw_rows(3, 512)
    for ours, reference in zip(
        jax.tree.leaves(run(x, "interpret")), jax.tree.leaves(run(x, "plain")), strict=True
    ):
        assert ours.dtype == reference.dtype
        assert distance(ours, reference) < 2e-3


@pytest.mark.parametrize("kind", [Dense, Fp8, Nvfp4])
@pytest.mark.parametrize("K", [32, 64, 192, 512])
def test_an_order_and_its_inverse(kind: type, K: int) -> None:
    places = jnp.arange(K)
    assert (source(kind, placed_at(kind, places, K), K) == places).all()
    assert (in_order(places, kind)[placed_at(kind, places, K)] == places).all()


@pytest.mark.gpu
def test_kernel_is_right_and_alike_in_every_company() -> None:
    x = draw_rows(40, 2048)
    fast = jax.jit(lambda x: run(x, "kernel", 256))
    whole, reference = fast(x), run(x, "plain", 256)
    for ours, other in zip(jax.tree.leaves(whole), jax.tree.leaves(reference), strict=True):
        assert distance(ours, other) < 4e-3
    for count in (1, 2, 5, 8, 32):
        for part, all_of_it in zip(
            jax.tree.leaves(fast(x[-count:])), jax.tree.leaves(whole), strict=True
        ):
            assert same_bits(part, all_of_it[-count:])
