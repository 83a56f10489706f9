"""Rows sorted by expert give what each row gives on its way through its own experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouping
from pallas_kernels.grouped_experts import FEW, MANY, SOME, Shared, all_experts, grouped_experts
from pallas_kernels.grouping import choose_experts, group
from pallas_kernels.matmul import Tiles, in_order
from pallas_kernels.routing import route, swiglu
from pallas_kernels.weights import Dense, Fp8, Nvfp4, Weight, linear


def random_weight(kind: str, E: int, N: int, K: int, parts: int, seed: int) -> Weight:
    rng = np.random.default_rng(seed)
    layers = 2
    if kind == "dense":
        return Dense(jnp.asarray(rng.normal(size=(layers, E, N, K)) / K**0.5, jnp.bfloat16))
    scale = jnp.asarray(rng.uniform(0.5, 2, (layers, E, parts)) / K**0.5, jnp.float32)
    if kind == "fp8":
        q = jnp.asarray(rng.normal(size=(layers, E, N, K)), jnp.float8_e4m3fn)
        return Fp8(q, scale, None)
    q = jnp.asarray(rng.integers(0, 256, (layers, E, N, K // 2), np.uint8))
    blocks = rng.uniform(0.1, 1, (layers, E, N, K // 16)).astype(np.float32)
    return Nvfp4(q, jnp.asarray(blocks, jnp.float8_e4m3fn), scale)


def random_layer(kind: str, E: int, D: int, I: int) -> tuple[Weight, Weight]:  # noqa: E741
    return random_weight(kind, E, 2 * I, D, 2, 0), random_weight(kind, E, D, I, 1, 1)


def random_rows(M: int, D: int, E: int, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, their experts, and how much each counts."""
    rng = np.random.default_rng(2)
    h = jnp.asarray(rng.normal(size=(M, D)), jnp.bfloat16)
    chosen = np.argsort(rng.random((M, E)), axis=1)[:, :k]
    weights = rng.dirichlet(np.ones(k), M)
    return h, jnp.asarray(chosen, jnp.int32), jnp.asarray(weights, jnp.float32)


def assert_close(out: jax.Array, expected: jax.Array) -> None:
    """Equal but for roundings to bfloat16 within an expert."""
    largest = np.max(np.abs(expected))
    np.testing.assert_allclose(out, expected, rtol=2.0**-6, atol=2.0**-7 * largest)


@pytest.mark.parametrize("kind", ["dense", "fp8", "nvfp4"])
def test_interpreted_kernel_is_the_reference(kind: str) -> None:
    layer, rows = random_layer(kind, 8, 128, 32), random_rows(20, 128, 8, 3)
    tiles = Tiles(rows=16, cols=64, depth=128)
    out = grouped_experts(*rows, *layer, 1, impl="interpret", tiles=tiles)
    assert out.dtype == jnp.float32
    assert_close(out, grouped_experts(*rows, *layer, 1, impl="plain"))


def test_reference_is_the_sum_over_chosen_experts() -> None:
    gate_up, down = random_layer("dense", 4, 64, 32)
    h, chosen, weights = random_rows(3, 64, 4, 2)
    expected = np.zeros((3, 64))
    for row in range(3):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            gate, up = jnp.split(linear(h[row], gate_up, (1, expert)), 2)
            y = linear(jax.nn.silu(gate) * up, down, (1, expert))
            expected[row] += weight * np.asarray(y, np.float32)
    out = grouped_experts(h, chosen, weights, gate_up, down, 1, impl="plain")
    np.testing.assert_allclose(out, expected, rtol=2.0**-6, atol=2.0**-6)


@settings(max_examples=10)
@given(st.lists(st.permutations(range(5)), min_size=9, max_size=9), st.booleans())
def test_pairs_are_sorted_and_cut(order: list[list[int]], skewed: bool) -> None:
    check_groups(order, skewed)


def test_more_pairs_than_fit_into_registers_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "MOST", 16)
    check_groups([[3, 1], [0, 4], [1, 2], [4, 3], [2, 0], [1, 0], [3, 4], [2, 1], [1, 4]], False)


def check_groups(order: list[list[int]], skewed: bool) -> None:
    k, rows = 2, 4
    chosen = np.array([one[:k] for one in order], np.int32)
    if skewed:
        chosen[:] = [3, 1]
    groups = group(jnp.asarray(chosen), 5, rows, "interpret")
    by_expert = np.argsort(chosen.reshape(-1), kind="stable")
    np.testing.assert_array_equal(groups.row, by_expert // k)
    np.testing.assert_array_equal(np.asarray(groups.place).reshape(-1)[by_expert], np.arange(18))
    covered = []
    for expert, first, end in np.asarray(groups.tiles).T:
        pairs = np.arange(first, min(first + rows, end))
        assert all(chosen.reshape(-1)[by_expert[pairs]] == expert)
        covered.extend(pairs)
    np.testing.assert_array_equal(covered, np.arange(18))


@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
def test_routed_and_shared_experts_are_added_to_the_residual_stream(kind: str) -> None:
    E, D, inner, k = 8, 128, 32, 2
    layer = random_layer(kind, E, D, inner)
    up, down = jax.tree.map(lambda a: a[:, 0], random_layer(kind, 1, D, 2 * inner))
    rng, (h, _, _) = np.random.default_rng(3), random_rows(20, D, E, k)
    x, logits, gate = (jnp.asarray(rng.normal(size=(20, n)), jnp.bfloat16) for n in (D, E, 1))
    ordered = in_order(h, Dense if kind == "dense" else Nvfp4)
    shared = Shared(ordered, gate, up, down, x)
    tiles = Tiles(rows=16, cols=64, depth=128)
    out = all_experts(ordered, logits, *layer, shared, 1, k, impl="interpret", tiles=tiles)
    assert out.dtype == x.dtype
    chosen, weights = route(logits, k)
    y = grouped_experts(h, chosen, weights, *layer, 1, impl="plain")
    y += jax.nn.sigmoid(gate.astype(jnp.float32)) * linear(
        swiglu(linear(h, up, 1)), down, 1
    ).astype(jnp.float32)
    assert_close(out, (x + y.astype(x.dtype)).astype(jnp.float32))


def test_experts_are_chosen_as_by_the_reference() -> None:
    rng = np.random.default_rng(4)
    # Few different values: many logits are equal.
    logits = jnp.asarray(rng.integers(-4, 4, (12, 16)) / 2, jnp.bfloat16)
    chosen, weights = choose_experts(logits, 4, "interpret")
    expected = route(logits, 4)
    np.testing.assert_array_equal(chosen, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
def test_tiles_and_company_change_no_bits_in_the_interpreter(kind: str) -> None:
    layer, rows = random_layer(kind, 4, 256, 64), random_rows(40, 256, 4, 2)
    high = Tiles(rows=64, cols=64, depth=128)
    expected = np.asarray(grouped_experts(*rows, *layer, 1, impl="interpret", tiles=high))
    for height in (16, 32):
        tiles = replace(high, rows=height)
        out = grouped_experts(*rows, *layer, 1, impl="interpret", tiles=tiles)
        np.testing.assert_array_equal(out, expected)
    h, chosen, weights = (a[5:8] for a in rows)
    out = grouped_experts(
        h, chosen, weights, *layer, 1, impl="interpret", tiles=replace(high, rows=16)
    )
    np.testing.assert_array_equal(out, expected[5:8])


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_weights_straight_to_registers_give_the_same_bits_in_the_interpreter(kind: str) -> None:
    """Eight pieces of the first product in two rounds, one piece of the second."""
    layer, rows = random_layer(kind, 2, 1024, 128), random_rows(6, 1024, 2, 1)
    out = grouped_experts(*rows, *layer, 1, impl="interpret", tiles=FEW)
    expected = grouped_experts(*rows, *layer, 1, impl="interpret", tiles=replace(FEW, warps=8))
    np.testing.assert_array_equal(out, expected)
    assert_close(out, grouped_experts(*rows, *layer, 1, impl="plain"))


@pytest.fixture(scope="module")
def real_layer() -> tuple[Weight, Weight]:
    return random_layer("nvfp4", 256, 2048, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [64, 320, 2048])
def test_kernel_at_real_shapes(real_layer: tuple[Weight, Weight], M: int) -> None:
    rows = random_rows(M, 2048, 256, 8)
    out = grouped_experts(*rows, *real_layer, 1, impl="kernel")
    assert_close(out, grouped_experts(*rows, *real_layer, 1, impl="plain"))


@pytest.mark.gpu
def test_bits_of_a_row_do_not_depend_on_the_others(real_layer: tuple[Weight, Weight]) -> None:
    rows = random_rows(1024, 2048, 256, 8)
    whole = np.asarray(grouped_experts(*rows, *real_layer, 1, impl="kernel"))
    for start, end in [(0, 64), (64, 192), (1000, 1001)]:
        h, chosen, weights = (a[start:end] for a in rows)
        part = grouped_experts(h, chosen, weights, *real_layer, 1, impl="kernel")
        np.testing.assert_array_equal(part, whole[start:end])


@pytest.mark.gpu
def test_all_rows_may_choose_the_same_experts(real_layer: tuple[Weight, Weight]) -> None:
    h, chosen, weights = random_rows(320, 2048, 256, 8)
    chosen = jnp.broadcast_to(chosen[:1], chosen.shape)
    out = grouped_experts(h, chosen, weights, *real_layer, 1, impl="kernel")
    assert_close(out, grouped_experts(h, chosen, weights, *real_layer, 1, impl="plain"))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_tile(real_layer: tuple[Weight, Weight]) -> None:
    """What allows other tiles for long prompts than for short ones."""
    rows = random_rows(320, 2048, 256, 8)
    expected = np.asarray(grouped_experts(*rows, *real_layer, 1, impl="kernel"))
    for tiles in (FEW, SOME, MANY, replace(MANY, rows=128), Tiles(64, 256, 128, 8, 3)):
        out = np.asarray(grouped_experts(*rows, *real_layer, 1, impl="kernel", tiles=tiles))
        np.testing.assert_array_equal(out, expected, str(tiles))
