"""How the experts of a few rows are cut, and what is computed of a cut: one arithmetic for all.

The kernels that go row by row and expert by expert differ in who loads what when.
What they add up in which order is said here, so that a row has the same bits in all of them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Impl
from pallas_kernels.matmul import SPANS, scales
from pallas_kernels.products import diagonal


@dataclass(frozen=True)
class Cut:
    """How a product is cut.

    Attributes:
        rows: of a weight, a tile; of a gate and its up as many of each.
        parts: into which K is split among the rows of a tile, added up in a tree.
        step: elements of a part that are multiplied at once.
    """

    rows: int
    parts: int
    step: int = 256


UP, SHARED_UP = Cut(rows=32, parts=2), Cut(rows=8, parts=8)
DOWN, SHARED_DOWN = Cut(rows=16, parts=1, step=512), Cut(rows=16, parts=4)
"""Of the routed experts and of the shared one, of their first and their second product. `parts`
decides about bits; how many rows a tile has, and how long a step is, each kernel chooses."""


@dataclass(frozen=True)
class Tiling:
    """A product that is cut.

    Attributes:
        rows: of a tile.
        parts: of K.
        span: elements of a part.
        size: elements of a step.
        steps: of a part.
        tiles: of the whole product.
    """

    rows: int
    parts: int
    span: int
    size: int
    steps: int
    tiles: int


def tiling(cut: Cut, kind: type, height: int, K: int) -> Tiling:
    """A cut that fits a weight of some kind.

    Args:
        cut: as it is meant to be.
        kind: of weight, whose order no part and no step may tear apart.
        height: rows of the weight, a gate and its up counted once.
        K: input features.
    """
    finest = max(min(SPANS[kind], K), 16)
    rows, parts = min(cut.rows, height), min(cut.parts, K // finest)
    span = K // parts
    size = min(span, max(cut.step, finest))
    return Tiling(rows, parts, span, size, span // size, height // rows)


def gate_and_up(t: Tiling, tile: jax.Array, height: int) -> tuple[jax.Array, jax.Array]:
    """Row `[M]` of `[gate; up]` and part `[M]` of K of every row of a tile's product."""
    return gate_and_up_of(t, jnp.arange(2 * t.rows * t.parts), tile, height)


def gate_and_up_of(
    t: Tiling, m: jax.Array, tile: jax.Array, height: int
) -> tuple[jax.Array, jax.Array]:
    """The same of some rows `m`."""
    n = m % (2 * t.rows)
    return tile * t.rows + n % t.rows + n // t.rows * height, m // (2 * t.rows)


def activated(
    y: jax.Array,
    w: Any,
    at: tuple,
    t: Tiling,
    tile: jax.Array,
    height: int,
    together: int,
    dtype: Any,
    impl: Impl,
) -> jax.Array:
    """`silu(gate) · up` of a tile's product `[M, columns]` -> `[rows, together]` float32.

    Rounded to `dtype` where the plain path rounds.
    """
    y = diagonal(y, t.parts, together)
    n = jnp.arange(2 * t.rows)
    row = tile * t.rows + n % t.rows + n // t.rows * height
    scale = scales(w, at, row, 2 * height, impl)
    y = (y if scale is None else y * scale[:, None]).astype(dtype).astype(jnp.float32)
    halves = y.reshape(2, t.rows, together)
    # One of two terms is zero.
    first = jnp.arange(2)[:, None, None] == 0
    gate, up = (jnp.sum(jnp.where(which, halves, 0.0), axis=0) for which in (first, ~first))
    gate = (gate * jax.nn.sigmoid(gate)).astype(dtype).astype(jnp.float32)
    return gate * up
