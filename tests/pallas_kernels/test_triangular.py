"""The blocked solve against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triangular import solve_unit_lower

pytestmark = pytest.mark.also_gpu


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a = a.astype(np.float64)
    return np.linalg.solve(np.eye(a.shape[-1]) + np.tril(a, -1), b.astype(np.float64))


@pytest.mark.parametrize("size", [16, 64])
def test_random_systems(size: int) -> None:
    rng = np.random.default_rng(size)
    a = rng.uniform(-0.3, 0.3, (3, size, size)).astype(np.float32)
    b = rng.standard_normal((3, size, 20)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(solve_unit_lower)(a, b), exact(a, b), rtol=1e-3, atol=1e-3)


def test_the_same_token_64_times() -> None:
    """Keys all alike, nothing forgotten: the inverse is small though powers of `a` are huge."""
    a = np.ones((1, 64, 64), np.float32)
    b = np.random.default_rng(0).standard_normal((1, 64, 8)).astype(np.float32)
    np.testing.assert_allclose(solve_unit_lower(jnp.asarray(a), b), exact(a, b), atol=1e-4)


def test_what_lies_on_and_above_the_diagonal_is_not_read() -> None:
    rng = np.random.default_rng(1)
    a = rng.uniform(-0.3, 0.3, (2, 32, 32)).astype(np.float32)
    b = rng.standard_normal((2, 32, 4)).astype(np.float32)
    other = np.where(np.tril(np.ones((32, 32), bool), -1), a, np.float32(7.0))
    np.testing.assert_array_equal(solve_unit_lower(a, b), solve_unit_lower(other, b))
