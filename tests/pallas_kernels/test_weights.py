"""`linear` multiplies by the matrix that a weight stands for, in every format and place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer, dequantise, linear, take
from pallas_kernels.weights import unpack_e2m1

pytestmark = pytest.mark.also_gpu
N, K = 32, 64


def random_weight(kind: str, stack: tuple[int, ...], parts: int = 1, seed: int = 0):
    rng = np.random.default_rng(seed)
    scale = jnp.asarray(rng.uniform(0.5, 2, (*stack, parts)), jnp.float32)
    if kind == "dense":
        return Dense(jnp.asarray(rng.normal(size=(*stack, N, K)), jnp.float32))
    if kind.startswith("fp8"):
        q = jnp.asarray(rng.normal(size=(*stack, N, K)), jnp.float8_e4m3fn)
        inputs = jnp.full(stack, 0.01, jnp.float32) if kind == "fp8_static" else None
        return Fp8(q, scale, inputs)
    q = jnp.asarray(rng.integers(0, 256, (*stack, N, K // 2)), jnp.uint8)
    blocks = jnp.asarray(rng.uniform(0.1, 4, (*stack, N, K // 16)), jnp.float8_e4m3fn)
    return Nvfp4(q, blocks, scale)


@pytest.mark.parametrize("kind", ["dense", "fp8", "nvfp4"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("place", [None, 1, (1, 2)], ids=["alone", "layer", "expert"])
def test_linear_is_the_product_with_the_dequantised_matrix(kind, parts, place) -> None:
    stack = {None: (), 1: (3,), (1, 2): (3, 4)}[place]
    w = random_weight(kind, stack, parts)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, K)), jnp.float32)
    matrix = np.asarray(dequantise(take(w, place)), np.float64)
    assert matrix.shape == (N, K)
    with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 in TF32
        out = linear(x, w, place)
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ matrix.T, rtol=1e-4, atol=1e-4)


def test_an_expert_may_be_chosen_on_the_device() -> None:
    w = random_weight("nvfp4", (2, 4))
    x = jnp.ones((1, K), jnp.bfloat16)
    chosen = jax.jit(lambda e: linear(x, w, (1, e)))(jnp.int32(3))
    np.testing.assert_array_equal(chosen, linear(x, take(w, (1, 3))))


def test_scales_of_fused_parts_cover_their_own_rows() -> None:
    w = Nvfp4(
        jnp.full((4, 8), 0x22, jnp.uint8),
        jnp.ones((4, 1), jnp.float8_e4m3fn),
        jnp.array([1.0, 10.0]),
    )
    expected = np.repeat([[1.0], [1.0], [10.0], [10.0]], 16, axis=1)
    np.testing.assert_array_equal(dequantise(w), expected)


def test_e2m1_codes_in_order_low_nibble_first() -> None:
    codes = np.arange(16, dtype=np.uint8)
    packed = codes[0::2] | codes[1::2] << 4
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(unpack_e2m1(jnp.asarray(packed)), [*values, *-values])


def test_static_fp8_rounds_and_clips_its_inputs() -> None:
    w = Fp8(jnp.ones((1, 2), jnp.float8_e4m3fn), jnp.array([2.0]), jnp.float32(0.5))
    # 1.03 / 0.5 rounds to 2 in E4M3; 1000 / 0.5 clips at 448.
    out = linear(jnp.array([[1.03, 0.0], [1000.0, 0.0]]), w)
    np.testing.assert_array_equal(out, [[2.0], [448.0]])


def test_layers_of_different_formats_in_one_stack() -> None:
    fp8, dense = random_weight("fp8", (1,)), random_weight("dense", (2,))
    w = PerLayer((fp8, dense), ((1, 0), (0, 0), (1, 1)))
    x = jnp.ones((2, K))
    for layer, expected in enumerate([take(dense, 0), take(fp8, 0), take(dense, 1)]):
        np.testing.assert_array_equal(linear(x, w, layer), linear(x, expected))


@given(
    st.integers(0, 255),
    st.floats(2.0**-9, 448.0, allow_nan=False),
)
def test_block_scaled_codes_are_exact_in_bfloat16(byte: int, scale: float) -> None:
    w = Nvfp4(
        jnp.full((1, 8), byte, jnp.uint8),
        jnp.full((1, 1), scale, jnp.float8_e4m3fn),
        jnp.ones(1),
    )
    eye = jnp.eye(16, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(linear(eye, w, dtype=jnp.float32))[:, 0], np.asarray(dequantise(w))[0]
    )
