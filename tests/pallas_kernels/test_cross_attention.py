"""Attention to other tokens: the formula, whatever the blocks, and nothing of what is not seen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cross_attention import Tiles, cross_attention

HEADS, D = 2, 16


def drawn(length: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Queries of three prompts, and tokens with keys and values of two layers."""
    keys = jax.random.split(jax.random.key(0))
    shapes = (3, length, HEADS * D), (3, count, 4 * HEADS * D)
    query, tokens = (
        jax.random.normal(k, shape).astype(jnp.bfloat16)
        for k, shape in zip(keys, shapes, strict=True)
    )
    return query, tokens


def biases(length: int, grid: int, heads: int = HEADS) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    rows, columns = (jax.random.normal(k, (3, length, heads, grid)) for k in keys)
    return rows, columns


def close(out: jax.Array, exact: jax.Array) -> None:
    assert out.dtype == jnp.bfloat16
    error = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 1e-2


@pytest.mark.parametrize("tiles", [Tiles(16, 16), Tiles(32, 64)])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("what", ["all", "some", "biased"])
def test_agrees_with_the_formula(what: str, length: int, tiles: Tiles) -> None:
    grid = 9
    query, tokens = drawn(length, grid**2)
    seen = jax.random.uniform(jax.random.key(2), tokens.shape[:2]) < 0.3 if what == "some" else None
    bias = biases(length, grid) if what == "biased" else None

    def attend(query: jax.Array, tokens: jax.Array, impl) -> jax.Array:
        return cross_attention(
            query,
            tokens,
            tokens,
            HEADS,
            seen=seen,
            bias=bias,
            first=(0, 2, 3),
            impl=impl,
            tiles=tiles,
        )

    exact = attend(query.astype(jnp.float32), tokens.astype(jnp.float32), "plain")
    close(attend(query, tokens, "interpret"), exact)


def test_a_bias_is_that_of_the_keys_row_and_column() -> None:
    query, tokens = drawn(1, 9)
    rows, columns = (jnp.full((3, 1, HEADS, 3), -1e4) for _ in range(2))
    bias = rows.at[..., 1].set(0), columns.at[..., 2].set(0)
    for impl in ("plain", "interpret"):
        out = cross_attention(query, tokens, tokens, HEADS, bias=bias, first=(0, 0, 1), impl=impl)
        np.testing.assert_array_equal(out[:, 0], tokens[:, 5, HEADS * D : 2 * HEADS * D])


@pytest.mark.parametrize("impl", ["plain", "interpret"])
def test_queries_may_lie_beside_keys(impl) -> None:
    _, tokens = drawn(1, 24)
    width = HEADS * D
    out = cross_attention(
        tokens, tokens, tokens, HEADS, first=(1, 2, 0), width=width, impl=impl, tiles=Tiles(16, 16)
    )
    parts = [tokens[..., i * width : (i + 1) * width] for i in (1, 2, 0)]
    apart = cross_attention(*parts, HEADS, impl=impl, tiles=Tiles(16, 16))
    np.testing.assert_array_equal(out, apart)


def test_what_is_not_seen_does_not_matter() -> None:
    query, tokens = drawn(20, 40)
    seen = jnp.arange(40) >= 32
    seen = jnp.broadcast_to(seen, (3, 40))
    tiles = Tiles(16, 16)  # the first two blocks hold nothing
    out, other = (
        cross_attention(
            query, x, x, HEADS, seen=seen, first=(0, 0, 1), impl="interpret", tiles=tiles
        )
        for x in (tokens, tokens.at[:, :32].set(100))
    )
    np.testing.assert_array_equal(out, other)


def test_what_there_is_no_kernel_for_is_refused() -> None:
    query, tokens = drawn(4, 4)
    with pytest.raises(ValueError, match="float32 with 16, so ask for plain"):
        cross_attention(query.astype(jnp.float32), tokens, tokens, HEADS, impl="kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["picture to prompt", "objects to picture", "picture"])
def test_kernel_agrees_on_real_shapes(case: str) -> None:
    length, count = {
        "picture to prompt": (5184, 33),
        "objects to picture": (201, 5184),
        "picture": (5184, 5184),
    }[case]
    prompts = 1 if case == "picture" else 3  # The formula writes scores down.
    q, k, v = (
        jax.random.normal(jax.random.key(i), (prompts, n, 256)).astype(jnp.bfloat16)
        for i, n in enumerate((length, count, count))
    )
    options: dict[str, Any] = {}
    if case == "picture to prompt":
        options["seen"] = jnp.broadcast_to(jnp.arange(33) % 3 == 0, (3, 33))
    if case == "objects to picture":
        options["bias"] = biases(length, 72, heads=8)
    a, b, c = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        exact = cross_attention(a, b, c, 8, **options, impl="plain")
    close(cross_attention(q, k, v, 8, **options, impl="kernel"), exact)
