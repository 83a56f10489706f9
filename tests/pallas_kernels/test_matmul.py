"""The tensor-core projection computes what `linear` does, and each row as if it were alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import (
    BUSY,
    E4M3_SIZES,
    SIZES,
    Tiles,
    choose,
    in_order,
    matmul,
    matmuls,
    source,
)
from pallas_kernels.normed import Form
from pallas_kernels.normed_rows import normed_rows
from pallas_kernels.weights import Dense, Fp8, Nvfp4, PerLayer, Weight

KINDS = ["dense", "fp8", "fp8_static", "nvfp4"]
REAL = {  # kind, output features, input features
    "qkv": ("fp8_static", 8192, 2048),
    "out": ("fp8_static", 2048, 4096),
    "shared_gate_up": ("nvfp4", 1024, 2048),
    "shared_down": ("nvfp4", 2048, 512),
    "router": ("dense", 256, 2048),
    "gates": ("dense", 32, 2048),
    "shared_gate": ("dense", 1, 2048),
}


def random_weight(kind: str, N: int, K: int, parts: int = 1, layers: int = 2) -> Weight:
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.uniform(0.5, 2, (layers, parts)) / K, jnp.float32)
    if kind == "dense":
        return Dense(jnp.asarray(rng.normal(size=(layers, N, K)), jnp.bfloat16))
    if kind.startswith("fp8"):
        q = jnp.asarray(rng.normal(size=(layers, N, K)), jnp.float8_e4m3fn)
        inputs = jnp.asarray(rng.uniform(0.005, 0.01, layers), jnp.float32)
        return Fp8(q, scale, inputs if kind == "fp8_static" else None)
    q = jnp.asarray(rng.integers(0, 256, (layers, N, K // 2)), jnp.uint8)
    blocks = jnp.asarray(2.0 ** rng.uniform(-9, 8.8, (layers, N, K // 16)), jnp.float8_e4m3fn)
    return Nvfp4(q, blocks, scale)


def random_rows(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def assert_close(out: jax.Array, expected: jax.Array) -> None:
    """Equal but for the order of additions, which may tip the rounding to bfloat16.

    Twice where there is a residual: that of the product, and then that of the sum.
    """
    wide = np.asarray(expected, np.float64)
    atol = 2.0**-11 * np.max(np.abs(wide))
    np.testing.assert_allclose(np.asarray(out, np.float64), wide, rtol=2.0**-6, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("N", "K"), [(128, 256), (8, 96)], ids=["even", "ragged"])
def test_interpreted_kernel_is_the_reference(kind: str, N: int, K: int) -> None:
    w, x, residual = random_weight(kind, N, K, parts=2), random_rows(20, K), random_rows(20, N)
    tiles = Tiles(rows=16, cols=64, depth=64)
    out = matmul(x, w, 1, residual=residual, impl="interpret", tiles=tiles)
    assert out.dtype == jnp.bfloat16
    assert_close(out, matmul(x, w, 1, residual=residual, impl="plain"))


def test_type_of_the_product_is_chosen() -> None:
    w, x = random_weight("fp8", 16, 32), random_rows(4, 32)
    out = matmul(x, w, 0, dtype=jnp.float32, impl="interpret")
    assert out.dtype == jnp.float32
    expected = matmul(x, w, 0, dtype=jnp.float32, impl="plain")
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_matrix_may_stand_alone_or_among_other_formats() -> None:
    fp8, dense = random_weight("fp8", 16, 32, layers=1), random_weight("dense", 16, 32, layers=2)
    assert isinstance(fp8, Fp8)
    assert isinstance(dense, Dense)
    x = random_rows(4, 32)
    mixed = PerLayer((fp8, dense), ((1, 0), (0, 0), (1, 1)))
    second = matmul(x, dense, 1, impl="interpret")
    np.testing.assert_array_equal(matmul(x, mixed, 2, impl="interpret"), second)
    np.testing.assert_array_equal(matmul(x, Dense(dense.w[1]), None, impl="interpret"), second)


def test_products_together_are_the_same_as_alone() -> None:
    """The norm leaves the inputs; of three weights two are high enough for kernels of their own."""
    kinds = [("fp8_static", 128), ("dense", 16), ("nvfp4", 64)]
    weights = [random_weight(kind, N, 128) for kind, N in kinds]
    x, norm = random_rows(20, 128), random_rows(2, 128, seed=5) * 0.1
    fp8 = weights[0]
    assert isinstance(fp8, Fp8)
    forms = [Form(Dense, fp8.input_scale, 1), Form(Dense), Form(Nvfp4)]
    rows = normed_rows(x, norm, 1, forms, eps=1e-6, impl="interpret")
    assert [r.dtype for r in rows] == [jnp.float8_e4m3fn, jnp.bfloat16, jnp.bfloat16]
    plain = normed_rows(x, norm, 1, forms, eps=1e-6, impl="plain")
    for row, expected in zip(rows, plain, strict=True):
        np.testing.assert_allclose(
            np.asarray(row, np.float32), np.asarray(expected, np.float32), rtol=2.0**-7
        )
    out = matmuls(rows, weights, 1, dtype=jnp.bfloat16, impl="interpret")
    # The dense weight wants its rows as they are.
    for y, w in zip(out, weights, strict=True):
        assert_close(y, matmul(rows[1], w, 1, impl="plain"))


@pytest.mark.parametrize("sizes", [SIZES, E4M3_SIZES], ids=["in registers", "e4m3"])
def test_short_prompts_are_cut_into_lower_tiles(sizes: tuple[Tiles, ...]) -> None:
    for M in (64, 128, 1024):
        for N in (257, 2048, 12288):
            tiles = choose(M, N, sizes)
            programs = -(-M // tiles.rows) * -(-N // tiles.cols)
            assert programs >= BUSY or tiles == sizes[-1]


def test_e4m3_is_added_up_in_float32_after_every_step() -> None:
    """In pieces or not, and whatever the depth of other products."""
    w, x = random_weight("fp8_static", 128, 512), random_rows(20, 512)
    tiles = Tiles(rows=16, cols=128, depth=64, pieces=2)
    out = matmul(x, w, 1, dtype=jnp.float32, impl="interpret", tiles=tiles)
    other = replace(tiles, rows=32, depth=128, pieces=1)
    one = matmul(x, w, 1, dtype=jnp.float32, impl="interpret", tiles=other)
    np.testing.assert_allclose(out, one, rtol=1e-6, atol=1e-7)
    expected = matmul(x, w, 1, dtype=jnp.float32, impl="plain")
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "N"), [("dense", 8), ("fp8_static", 128), ("nvfp4", 128)])
def test_tiles_and_company_change_no_bits_in_the_interpreter(kind: str, N: int) -> None:
    w, x = random_weight(kind, N, 256), random_rows(70, 256)
    expected = np.asarray(matmul(x, w, 1, impl="interpret", tiles=SIZES[0]), np.float32)
    out = matmul(x, w, 1, impl="interpret", tiles=SIZES[3])
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
    part = matmul(x[3:9], w, 1, impl="interpret")
    np.testing.assert_array_equal(np.asarray(part, np.float32), expected[3:9])


@pytest.mark.parametrize("kind", [Dense, Fp8, Nvfp4])
@pytest.mark.parametrize("K", [32, 64, 96, 512])
def test_every_input_is_multiplied_once(kind: type, K: int) -> None:
    order = source(kind, jnp.arange(K), K)
    np.testing.assert_array_equal(np.sort(order), np.arange(K))
    np.testing.assert_array_equal(in_order(jnp.arange(K), kind), order)


def test_an_odd_number_of_features_is_refused() -> None:
    with pytest.raises(ValueError, match="48 input features"):
        matmul(random_rows(4, 48), random_weight("dense", 16, 48), 0, impl="interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_kernel_at_real_shapes(name: str) -> None:
    kind, N, K = REAL[name]
    w = random_weight(kind, N, K, parts=2 if N % 2 == 0 else 1)
    x, residual = random_rows(320, K), random_rows(320, N)
    out = matmul(x, w, 1, residual=residual, impl="kernel")
    assert_close(out, matmul(x, w, 1, residual=residual, impl="plain"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_bits_of_a_row_do_not_depend_on_the_others(name: str) -> None:
    kind, N, K = REAL[name]
    w, x = random_weight(kind, N, K), random_rows(1024, K)
    whole = np.asarray(matmul(x, w, 1, impl="kernel"), np.float32)
    for start, end in [(0, 64), (64, 192), (1000, 1001)]:
        part = matmul(x[start:end], w, 1, impl="kernel")
        np.testing.assert_array_equal(np.asarray(part, np.float32), whole[start:end])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qkv", "out", "shared_gate_up", "router", "gates"])
def test_bits_do_not_depend_on_the_tile(name: str) -> None:
    """What allows other tiles for long prompts than for short ones."""
    kind, N, K = REAL[name]
    w, x = random_weight(kind, N, K), random_rows(320, K)
    expected = np.asarray(matmul(x, w, 1, impl="kernel"), np.float32)
    sizes = E4M3_SIZES if kind == "fp8_static" else SIZES
    for tiles in [
        *sizes,
        SIZES[0],
        replace(SIZES[0], cols=256),
        replace(SIZES[3], depth=64, warps=8),
    ]:
        out = matmul(x, w, 1, impl="kernel", tiles=tiles)
        np.testing.assert_array_equal(np.asarray(out, np.float32), expected, str(tiles))
