"""Attention in pictures: the formula, whatever the blocks, and nothing from other windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.picture_attention import Tiles, picture_attention, turn


def drawn(groups: int, n: int, heads: int, d: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two pictures of so many groups, and angles."""
    qkv = jax.random.normal(jax.random.key(0), (2, groups * n, 3 * heads * d)).astype(jnp.bfloat16)
    angles = jax.random.uniform(jax.random.key(1), (n, d // 2), minval=-3, maxval=3)
    return qkv, jnp.cos(angles), jnp.sin(angles)


def close(out: jax.Array, exact: jax.Array, tolerance: float = 1e-2) -> None:
    assert out.dtype == jnp.bfloat16
    error = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < tolerance


def test_channels_turn_in_pairs_as_complex_numbers_do() -> None:
    qkv, cos, sin = drawn(3, 4, 2, 8)
    parts = qkv.reshape(6, 4, 3, 2, 8)
    x = np.asarray(parts[:, :, 1], np.float32).view(np.complex64)
    expected = (x * (cos + 1j * sin)[:, None]).view(np.float32)
    turned = turn(parts.astype(jnp.float32), 1, cos, sin)
    np.testing.assert_allclose(turned, expected, atol=1e-5)
    np.testing.assert_array_equal(turn(parts, 1, cos, sin), turned.astype(jnp.bfloat16))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("n", "d", "queries", "keys"),
    [
        (9, 16, 16, 16),  # a window smaller than a block
        (48, 32, 32, 32),  # half a block over
        (70, 64, 64, 32),  # some tokens over
    ],
)
def test_agrees_with_the_formula(n: int, d: int, queries: int, keys: int, ahead: bool) -> None:
    qkv, cos, sin = drawn(2, n, 2, d)
    exact = picture_attention(qkv.astype(jnp.float32), cos, sin, impl="plain")
    tiles = Tiles(queries=queries, keys=keys, ahead=ahead)
    close(picture_attention(qkv, cos, sin, impl="interpret", tiles=tiles), exact)
    close(picture_attention(qkv, cos, sin, impl="plain"), exact)


def test_what_is_in_other_windows_does_not_matter() -> None:
    n, tiles = 20, Tiles(queries=16, keys=16)
    qkv, cos, sin = drawn(3, n, 1, 16)
    out = picture_attention(qkv, cos, sin, impl="interpret", tiles=tiles)
    poisoned = qkv.at[:, :n].set(jnp.nan).at[:, 2 * n :].set(jnp.nan)
    among = picture_attention(poisoned, cos, sin, impl="interpret", tiles=tiles)
    np.testing.assert_array_equal(among[:, n : 2 * n], out[:, n : 2 * n])


def test_large_scores_do_not_overflow() -> None:
    qkv, cos, sin = drawn(1, 32, 1, 16)
    out = picture_attention(100 * qkv, cos, sin, impl="interpret", tiles=Tiles(16, 16))
    assert jnp.abs(out).max() <= 100 * jnp.abs(qkv).max()


def test_what_does_not_fit_is_refused() -> None:
    qkv, cos, sin = drawn(1, 16, 1, 16)
    with pytest.raises(ValueError, match="a multiple of 12 tokens"):
        picture_attention(qkv, cos[:12], sin[:12], impl="plain")
    with pytest.raises(ValueError, match="float32, so ask for plain"):
        picture_attention(qkv.astype(jnp.float32), cos, sin, impl="kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [Tiles(), Tiles(64, 64, 4), Tiles(keys=128), Tiles(ahead=False)])
@pytest.mark.parametrize(("groups", "n", "heads"), [(9, 576, 16), (1, 5184, 4)])
def test_kernel_agrees_on_real_shapes(groups: int, n: int, heads: int, tiles: Tiles) -> None:
    qkv, cos, sin = drawn(groups, n, heads, 64)  # Few, where the formula writes scores down.
    exact = picture_attention(qkv.astype(jnp.float32), cos, sin, impl="plain")
    close(picture_attention(qkv, cos, sin, impl="kernel", tiles=tiles), exact)
