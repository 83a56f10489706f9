"""Projections of decode rows: `y = h Wᵀ`, for one or several weights in one launch.

A program takes some rows of one weight and all of K for up to 64 rows of `h`, each of which is
treated as if it were alone. K is cut into parts that are added up in a tree, as in
`pallas_kernels.products`. Parts lie side by side in a tile where the weight has few rows; where it
has many they take turns, each adding to a total of its own, and no column is computed in vain.
E4M3 weights meet E4M3 inputs as they are (`pallas_kernels.e4m3`); others are converted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.e4m3 import e4m3_dot
from pallas_kernels.matmul import SPANS, place, rounds, scales, source, words
from pallas_kernels.products import (
    columns,
    diagonal,
    fetch,
    multiply,
    shape,
    tree_of,
    width,
)
from pallas_kernels.weights import Dense, Fp8, Nvfp4, Weight, linear

MOST = 64
"""Rows that share a load of the weights."""


@dataclass(frozen=True)
class Tiles:
    """How a projection is cut.

    Attributes:
        rows: of a weight a program takes.
        parts: into which K is split.
        beside: parts that lie side by side in a tile; the others take turns.
        step: elements of a part that are loaded together, at most; half as many if unquantised.
        width: bytes of the inputs of one product at one place of K, at most: rows times parts side
            by side times the size of an element.
        warps: a program.
        stages: steps on their way from memory, if there are several.
    """

    rows: int = 64
    parts: int = 1
    beside: int = 1
    step: int = 256
    width: int = 128
    warps: int = 4
    stages: int = 3


HEAD = Tiles()
TALL = Tiles(width=64, stages=4)
SHORT = Tiles(rows=16, parts=4, beside=4, step=128, stages=6)
"""For the most output features, for many, and for few: the fastest of those tried on an H200."""


def tiles_for(weights: Sequence[Dense | Fp8 | Nvfp4]) -> Tiles:
    """How to cut weights that are multiplied in one launch. Rows of inputs must not matter here."""
    features = sum(shape(w)[0] for w in weights)
    return HEAD if features >= 1 << 16 else TALL if features >= 4096 else SHORT


def reference(
    h: Sequence[jax.Array],
    weights: Sequence[Weight],
    layer: int,
    residual: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
) -> list[jax.Array]:
    """See `project`."""
    stacks = [place(w, layer)[0] for w in weights]
    kinds = [Dense if rounds(w) else type(w) for w in stacks]
    rows = [natural(x, kind) for x, kind in zip(h, kinds, strict=True)]
    out = [linear(x, w, layer, dtype) for x, w in zip(rows, weights, strict=True)]
    return out if residual is None else [residual + y for y in out]


def natural(x: jax.Array, kind: type) -> jax.Array:
    """Inputs in the order of a kind of weight `[..., K]` -> as they were."""
    K = x.shape[-1]
    return x[..., jnp.argsort(source(kind, jnp.arange(K), K))]


def project(
    h: Sequence[jax.Array],
    weights: Sequence[Weight],
    layer: int,
    *,
    residual: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    impl: Impl,
    tiles: Tiles | None = None,
) -> list[jax.Array]:
    """Multiply rows with weights, each with its own input.

    Args:
        h: for each weight `[R, K_i]` in its form, see `pallas_kernels.normed`: E4M3 if it has an
            input scale, else in the order of its kind.
        weights: stacks `[L, N_i, K_i]` in any formats.
        layer: which of the stacks' matrices.
        residual: `[R, N]` to add, if there is one weight.
        dtype: of the results.
        impl: how to compute.
        tiles: see `Tiles`; None for `tiles_for`.

    Returns:
        For each weight `[R, N_i]`.
    """
    if impl == "plain":
        return reference(h, weights, layer, residual, dtype)
    placed = [place(w, layer) for w in weights]
    stacks, index = [w for w, _ in placed], as_data(*(at for _, at in placed))
    tiles = tiles or tiles_for(stacks)
    return _launch(index, list(h), stacks, residual, dtype=jnp.dtype(dtype), impl=impl, tiles=tiles)


@partial(jax.jit, static_argnames=("dtype", "impl", "tiles"))
def _launch(
    index: jax.Array,
    h: list[jax.Array],
    stacks: list[Dense | Fp8 | Nvfp4],
    residual: jax.Array | None,
    *,
    dtype: Any,
    impl: Impl,
    tiles: Tiles,
) -> list[jax.Array]:
    R = h[0].shape[0]
    widest = max(x.dtype.itemsize for x in h) * tiles.beside
    together = min(MOST, tiles.width // widest, 1 << (R - 1).bit_length())
    sizes = [shape(w) for w in stacks]
    counts = [-(-n // tiles.rows) for n, _ in sizes]
    flat, tree = jax.tree.flatten((index, h, residual, [words(w) for w in stacks]))
    out = [jax.ShapeDtypeStruct((R, n), dtype) for n, _ in sizes]

    def body(*refs: Any) -> None:
        index, h, residual, weights = jax.tree.unflatten(tree, refs[: len(flat)])
        tile, first, before = pl.program_id(0), pl.program_id(1) * together, 0
        for i, w in enumerate(weights):
            pl.when((tile >= before) & (tile < before + counts[i]))(
                partial(
                    _tile,
                    h[i],
                    residual,
                    w,
                    refs[len(flat) + i],
                    (tile - before) * tiles.rows,
                    first,
                    index=index[i],
                    size=sizes[i],
                    kind=type(stacks[i]),
                    rounded=rounds(stacks[i]),
                    together=together,
                    impl=impl,
                    tiles=tiles,
                )
            )
            before += counts[i]

    return triton_call(
        body,
        *flat,
        grid=(sum(counts), -(-R // together)),
        out_shape=out,
        impl=impl,
        name="project",
        warps=tiles.warps,
        stages=tiles.stages,
    )


def split(parts: int, step: int, K: int, kind: type) -> tuple[int, int]:
    """Parts of K, and steps of each: no finer than the order of a kind of weight allows."""
    finest = max(min(SPANS[kind], K), 16)
    parts = min(parts, K // finest)
    return parts, max(1, K // parts // max(step, finest))


def _tile(
    h: Any,
    residual: Any,
    w: Any,
    out: Any,
    start: jax.Array,
    first: jax.Array,
    *,
    index: jax.Array,
    size: tuple[int, int],
    kind: type,
    rounded: bool,
    together: int,
    impl: Impl,
    tiles: Tiles,
) -> None:
    """Some rows of one weight with some rows of inputs, which may be `rounded` to E4M3."""
    (N, K), rows, R = size, tiles.rows, out.shape[0]
    step = tiles.step // 2 if kind is Dense else tiles.step
    parts, steps = split(tiles.parts, step, K, kind)
    beside, span = min(tiles.beside, parts), K // parts
    m = jnp.arange(beside * rows)
    # Rows past the end are taken from its beginning, and not kept.
    n, part, turns = (start + m % rows) % N, m // rows, parts // beside
    inputs = columns(h, first, R, together, beside, span)

    def add(turn: int, number: Any, total: jax.Array) -> jax.Array:
        raw = fetch(w, (index,), n, turn * beside + part, span, span // steps, number)
        x = inputs(turn * beside * span + number * (span // steps), span // steps)
        return total + (e4m3_dot(raw[0], x.T) if rounded else multiply(kind, raw, x, impl))

    def add_all(number: Any, totals: list[jax.Array]) -> list[jax.Array]:
        return [add(turn, number, total) for turn, total in enumerate(totals)]

    zero = jnp.zeros((m.shape[0], width(beside, together)), jnp.float32)
    totals = lax.fori_loop(0, steps, add_all, [zero] * turns)
    y = tree_of([diagonal(total, beside, together) for total in totals])
    n = start + jnp.arange(rows)
    scale = scales(w, (index,), n % N, N, impl)
    if scale is not None:
        y = y * scale[:, None]
    y = y.astype(out.dtype)
    r = first + jnp.arange(together)
    kept = jnp.broadcast_to((n < N)[:, None] & (r < R)[None, :], y.shape)
    at = (r[None, :], n[:, None])
    if residual is not None:
        y = y + plt.load(residual.at[at], mask=kept, other=jnp.zeros((), residual.dtype))
    plt.store(out.at[at], y, mask=kept)
