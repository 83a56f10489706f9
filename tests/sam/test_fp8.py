"""FP8 in the trunk: what it changes, and how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sam import fp8, trunk
from jaxinfer.sam.layers import linear
from jaxinfer.sam.leaves import init
from jaxinfer.sam.params import Linear
from jaxinfer.sam.structure import structure
from pallas_kernels import Fp8
from tests.sam.helpers import golden_config

TINY = golden_config()


def test_products_are_as_exact_as_three_bits_of_mantissa() -> None:
    x = jax.random.normal(jax.random.key(0), (64, 256))
    w = Linear(0.05 * jax.random.normal(jax.random.key(1), (96, 256)), jnp.ones(96))
    exact, rounded = linear(x, w), linear(x, fp8._linear(w))
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact - 1)
    assert 0.01 < error < 0.05


@pytest.mark.also_gpu
def test_a_trunk_in_fp8_sees_nearly_the_same() -> None:
    params = init(structure(TINY), jax.random.key(0), jnp.bfloat16)
    size = TINY.trunk.image_size
    pixels = jax.random.randint(jax.random.key(1), (1, size, size, 3), 0, 256).astype(jnp.uint8)
    quantised = fp8.quantise(params)
    assert all(isinstance(b.fc1.weight, Fp8) for b in quantised.trunk.blocks)
    seen, expected = (
        np.asarray(trunk.encode(p.trunk, TINY.trunk, pixels), np.float32)
        for p in (quantised, params)
    )
    error = np.linalg.norm(seen - expected) / np.linalg.norm(expected)
    assert 0.001 < error < 0.1
