"""FP8 in the trunk: what it changes, and how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sam import fp8, trunk
from jaxinfer.sam.layers import linear
from jaxinfer.sam.params import Linear
from pallas_kernels import Fp8
from tests.sam.helpers import compiled, golden_cases, golden_config, golden_params

TINY = golden_config()


def test_products_are_as_exact_as_three_bits_of_mantissa() -> None:
    x = jax.random.normal(jax.random.key(0), (64, 256))
    w = Linear(0.05 * jax.random.normal(jax.random.key(1), (96, 256)), jnp.ones(96))
    exact, rounded = linear(x, w), linear(x, fp8._linear(w))
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact - 1)
    assert 0.01 < error < 0.05


@pytest.mark.also_gpu
def test_a_trunk_in_fp8_sees_nearly_the_same() -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), golden_params())
    pixels = jnp.asarray(golden_cases()["pixels"])
    quantised = fp8.quantise(params)
    assert all(isinstance(b.fc1.weight, Fp8) for b in quantised.trunk.blocks)
    encode = compiled(trunk.encode)
    seen, expected = (
        np.asarray(encode(p.trunk, TINY.trunk, pixels), np.float32) for p in (quantised, params)
    )
    error = np.linalg.norm(seen - expected) / np.linalg.norm(expected)
    assert 0.001 < error < 0.1
