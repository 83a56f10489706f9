"""How far cells lie from boxes: the formula, and none for the token that is no box."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.box_bias import box_bias

Drawn = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def drawn(prompts: int, queries: int, heads: int, width: int) -> Drawn:
    shapes = (2, width, 2), (2, width), (2, heads, width), (2, heads)
    keys = jax.random.split(jax.random.key(0), 5)
    boxes = jax.random.uniform(keys[0], (prompts, queries, 4))
    w1, b1, w2, b2 = (
        jax.random.normal(k, s) / s[-1] for k, s in zip(keys[1:], shapes, strict=True)
    )
    return boxes, w1, b1, w2, b2


@pytest.mark.parametrize("width", [64, 128])
def test_agrees_with_the_formula(width: int) -> None:
    args = drawn(3, 5, 3, width)
    exact = box_bias(*args, 9, impl="plain")
    out = box_bias(*args, 9, impl="interpret", cells=32)
    assert out.shape == exact.shape == (2, 3, 6, 3, 9)
    np.testing.assert_allclose(out, exact, atol=2e-2 * float(jnp.abs(exact).max()))
    np.testing.assert_array_equal(out[:, :, 0], 0)


def test_a_perceptron_of_one_channel_by_hand() -> None:
    boxes = jnp.array([[[0.5, 0.25, 0.5, 0.5]]])  # x from 1/4 to 3/4, y from 0 to 1/2
    w1, b1 = jnp.array([[[1.0, 0.0]], [[0.0, -1.0]]]), jnp.zeros((2, 1))
    out = box_bias(boxes, w1, b1, jnp.ones((2, 1, 1)), jnp.zeros((2, 1)), 4, impl="plain")
    step = np.log2(1 + 8 / 4) / 3
    twice = np.log2(1 + 8 / 2) / 3
    np.testing.assert_allclose(out[0, 0, 1, 0], [0, 0, step, twice], atol=1e-6)
    np.testing.assert_allclose(out[1, 0, 1, 0], [twice, step, 0, 0], atol=1e-6)


def test_what_there_is_no_kernel_for_is_refused() -> None:
    with pytest.raises(ValueError, match="not 3 and 20: ask for plain"):
        box_bias(*drawn(1, 1, 3, 20), 4, impl="kernel")


@pytest.mark.gpu
def test_kernel_agrees_on_real_shapes() -> None:
    args = drawn(8, 200, 8, 256)
    with jax.default_matmul_precision("highest"):
        exact = box_bias(*args, 72, impl="plain")
    out = box_bias(*args, 72, impl="kernel")
    assert jnp.abs(out - exact).max() < 2e-2 * jnp.abs(exact).max()
