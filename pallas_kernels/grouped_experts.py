"""Routed experts for many rows: each expert's weights are read once for all rows sent to it.

For a row `h` with chosen experts `e_1 … e_k` and their weights `w_1 … w_k`

    y = Σ_j w_j · (silu(h G_jᵀ) · (h U_jᵀ)) D_jᵀ        added up in the order of choice

with `[G; U]` an expert's `gate_up` and `D` its `down`; what an expert gives is rounded to the type
of `h` after either product. `all_experts` begins with the router's logits `l`, with experts and
weights as in `pallas_kernels.experts`, and adds a shared expert `s` to the residual stream `x`:

    x + y + sigmoid(gate) · (silu(h G_sᵀ) · (h U_sᵀ)) D_sᵀ

Steps:

1. `pallas_kernels.grouping` finds each row's experts, sorts the `M·k` pairs of row and choice by
   expert and cuts each one's into tiles of `rows` neighbours.
2. `expert_up` and `expert_down` make tiles of one expert's product, see `pallas_kernels.matmul`.
   The grid has room for the most tiles there can be; those left over end at once. The shared
   expert is one whose pairs are the rows.
3. `weighted_sum` gathers a row's pairs again.

No sum ever runs over rows, so the bits of a row do not depend on the others.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.grouping import Groups, choose_experts, group
from pallas_kernels.matmul import (
    Tiles,
    fit,
    height,
    in_order,
    place,
    product,
    scales,
    source,
    words,
)
from pallas_kernels.routing import swiglu
from pallas_kernels.weights import Dense, Fp8, Nvfp4, Observed, Weight, linear

FEW = Tiles(rows=16, cols=128, depth=128, warps=4, stages=4)
TILES = Tiles(rows=32, cols=256, depth=128, warps=8, stages=3)
MANY = Tiles(rows=64, cols=256, depth=128, warps=8, stages=3)
HIGH = Tiles(rows=64, cols=128, depth=128, warps=4, stages=3)


class Shared(NamedTuple):
    """The expert that every row goes through, and what its result is added to.

    Attributes:
        h: normed rows `[M, D]` in the order of `gate_up`'s kind.
        gate: its logit, `[M, 1]`.
        gate_up: `[L, 2S, D]`.
        down: `[L, D, S]`.
        x: the residual stream `[M, D]`.
    """

    h: jax.Array
    gate: jax.Array
    gate_up: Weight
    down: Weight
    x: jax.Array


def choose_tiles(pairs: int, experts: int) -> Tiles:
    """Tiles about as high as an expert's pairs are many. They change no bits."""
    each = pairs / experts
    return FEW if each <= 8 else TILES if each <= 40 else MANY


def reference(
    h: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight, layer: int
) -> jax.Array:
    """See `grouped_experts`; every row through every expert."""
    experts = _stack(gate_up, layer).shape[1]

    def one(expert: jax.Array, parts: jax.Array) -> jax.Array:
        inner = swiglu(linear(h, gate_up, (layer, expert)))
        y = linear(inner, down, (layer, expert)).astype(jnp.float32)
        return jnp.where((chosen == expert)[..., None], y[:, None], parts)

    parts = jnp.zeros((*chosen.shape, h.shape[1]), jnp.float32)
    parts = lax.fori_loop(0, experts, one, parts) * weights[..., None]
    return reduce(jnp.add, [parts[:, j] for j in range(chosen.shape[1])])


def grouped_experts(
    h: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: int,
    *,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """What the routed experts add to many rows.

    Args:
        h: normed rows `[M, D]`.
        chosen: each row's experts, `[M, k]` int32, all different.
        weights: how much each counts, `[M, k]` float32.
        gate_up: `[L, E, 2I, D]`.
        down: `[L, E, D, I]`.
        layer: which of the stacks' layers.
        impl: how to compute.
        tiles: how both products are cut; half of the first one's columns are gate, half up. None
            for what suits the number of rows.

    Returns:
        `[M, D]` float32.
    """
    if impl == "plain" or isinstance(gate_up, Observed) or isinstance(down, Observed):
        return reference(h, chosen, weights, gate_up, down, layer)
    experts = _stack(gate_up, layer).shape[1]
    tiles = tiles or choose_tiles(chosen.size, experts)
    groups = group(chosen, experts, tiles.rows, impl)
    h = in_order(h, type(place(gate_up, layer)[0]))
    outer = _both(h, gate_up, down, layer, groups, tiles, impl)
    return _weighted_sum(outer, groups.place, weights, None, None, impl)


def all_experts(
    h: jax.Array,
    logits: jax.Array,
    gate_up: Weight,
    down: Weight,
    shared: Shared,
    layer: int,
    k: int,
    *,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The residual stream after routed and shared experts of many rows.

    Args:
        h: normed rows `[M, D]` in the order of `gate_up`'s kind.
        logits: of the router, `[M, E]` bfloat16.
        gate_up: `[L, E, 2I, D]`.
        down: `[L, E, D, I]`.
        shared: see `Shared`.
        layer: which of the stacks' layers.
        k: experts a row, a power of two.
        impl: "kernel" or "interpret".
        tiles: how both products are cut; None for what suits the number of rows.

    Returns:
        `[M, D]` in the type of `shared.x`.
    """
    M, experts = logits.shape
    tiles = tiles or choose_tiles(M * k, experts)
    chosen, weights = choose_experts(logits, k, impl)
    groups = group(chosen, experts, tiles.rows, impl)
    outer = _both(h, gate_up, down, layer, groups, tiles, impl)
    # In kernels of their own: see `matmuls` for why products do not share one.
    tiles = HIGH if M > 512 else FEW
    beside = _both(shared.h, shared.gate_up, shared.down, layer, None, tiles, impl)
    return _weighted_sum(outer, groups.place, weights, beside, shared, impl)


# --- the two products -----------------------------------------------------------------------------


class Tile(NamedTuple):
    """What one program works on.

    Attributes:
        at: where in the stack its expert lies.
        pair: `[rows]` int32, which of the sorted pairs; of the shared expert, which of the rows.
        end: where the expert's pairs end; others follow.
        across: which tile of output features.
    """

    at: tuple
    pair: jax.Array
    end: jax.Array | int
    across: jax.Array

    @property
    def there(self) -> jax.Array:
        """`[rows]` bool: pairs of this expert."""
        return self.pair < self.end


class Half(NamedTuple):
    """One of the two products, of routed experts or of the shared one.

    Attributes:
        w: the weight's stack.
        index: which of its layers.
        x: inputs in its order.
        rows: which of them each pair has; None: each its own.
        after: kind of the weight that follows, for the order of the results.
    """

    w: Dense | Fp8 | Nvfp4
    index: int
    x: jax.Array
    rows: jax.Array | None = None
    after: type = Dense

    @property
    def pairs(self) -> int:
        """How many results there are."""
        return self.x.shape[0] if self.rows is None else self.rows.size


def _both(
    h: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: int,
    groups: Groups | None,
    tiles: Tiles,
    impl: Impl,
) -> jax.Array:
    """What experts make of each sorted pair `[M·k, D]`, or the shared one of each row `[M, D]`."""
    after = place(down, layer)
    rows = None if groups is None else groups.row
    inner = _up(Half(*place(gate_up, layer), h, rows, type(after[0])), groups, tiles, impl)
    return _down(Half(*after, inner), groups, tiles, impl)


def _up(half: Half, groups: Groups | None, tiles: Tiles, impl: Impl) -> jax.Array:
    """`silu(h Gᵀ) · (h Uᵀ)` of each pair, `[pairs, I]`."""

    def body(cut: Tiles, t: Tile, w: Any, x: Any, row: jax.Array, out: Any) -> None:
        inner, width = out.shape[1], cut.cols // 2
        slot = t.across * width + jnp.arange(width)
        own = source(half.after, slot, inner)
        col = (inner * jnp.arange(2)[:, None] + own[None, :]).reshape(2 * width)
        y = _scaled(w, t, col, 2 * inner, x, row, cut, impl)
        y = y.astype(out.dtype).astype(jnp.float32)
        gate, up = jnp.unstack(y.reshape(2, width, cut.rows).transpose(1, 2, 0), axis=-1)
        # Rounded where the reference rounds.
        gate = (gate * jax.nn.sigmoid(gate)).astype(out.dtype).astype(jnp.float32)
        y = (gate * up).astype(out.dtype).T
        plt.store(out.at[t.pair[:, None], slot[None, :]], y, mask=t.there[:, None])

    return _tiled(body, half, 2, groups, tiles, impl, "expert_up")


def _down(half: Half, groups: Groups | None, tiles: Tiles, impl: Impl) -> jax.Array:
    """`inner Dᵀ` of each pair, `[pairs, D]`."""

    def body(cut: Tiles, t: Tile, w: Any, x: Any, row: jax.Array, out: Any) -> None:
        col = t.across * cut.cols + jnp.arange(cut.cols)
        y = _scaled(w, t, col, out.shape[1], x, row, cut, impl).astype(out.dtype).T
        plt.store(out.at[t.pair[:, None], col[None, :]], y, mask=t.there[:, None])

    return _tiled(body, half, 1, groups, tiles, impl, "expert_down")


def _scaled(
    w: Any, t: Tile, col: jax.Array, N: int, x: Any, row: jax.Array, cut: Tiles, impl: Impl
) -> jax.Array:
    y = product(w, t.at, col, x, row, t.there, cut.depth, impl)
    scale = scales(w, t.at, col, N, impl)
    return y if scale is None else y * scale[:, None]


def _tiled(
    body: Callable[..., None],
    half: Half,
    fold: int,
    groups: Groups | None,
    tiles: Tiles,
    impl: Impl,
    name: str,
) -> jax.Array:
    """Run `body(cut, tile, w, x, row, out)` for every tile of pairs, across all features.

    `fold` columns of the product make one of the result. Without groups there is one expert, the
    shared one, whose pairs are the rows.
    """
    if isinstance(half.w, Fp8) and half.w.input_scale is not None:
        raise ValueError("grouped experts do not round their inputs to E4M3")
    width = height(half.w) // fold
    cut = fit(tiles, half.w, half.x.shape[1])
    cut = replace(cut, cols=min(cut.cols, fold * (width & -width)))
    M = half.x.shape[0]
    pairs, count = (M, -(-M // cut.rows)) if groups is None else (half.pairs, groups.tiles.shape[1])
    args = (groups and groups.tiles, as_data(half.index), words(half.w), half.x, half.rows)
    flat, tree = jax.tree.flatten(args)

    def program(*refs: Any) -> None:
        tiles, index, w, x, rows = jax.tree.unflatten(tree, refs[:-1])
        column, number = pl.program_id(0), pl.program_id(1)

        def run(t: Tile) -> None:
            row = t.pair
            if rows is not None:
                row = plt.load(rows.at[t.pair], mask=t.there, other=jnp.int32(0))
            body(cut, t, w, x, row, refs[-1])

        if tiles is None:
            run(Tile((index[0],), number * cut.rows + jnp.arange(cut.rows), M, column))
            return
        expert, first, end = (tiles[kind, number] for kind in range(3))
        tile = Tile((index[0], expert), first + jnp.arange(cut.rows), end, column)
        pl.when(first < end)(partial(run, tile))

    return triton_call(
        program,
        *flat,
        grid=(fold * width // cut.cols, count),
        out_shape=jax.ShapeDtypeStruct((pairs, width), half.x.dtype),
        impl=impl,
        name=name,
        warps=cut.warps,
        stages=cut.stages,
    )


# --- back to rows ---------------------------------------------------------------------------------


def _weighted_sum(
    outer: jax.Array,
    where: jax.Array,
    weights: jax.Array,
    beside: jax.Array | None,
    shared: Shared | None,
    impl: Impl,
) -> jax.Array:
    """Sorted pairs `[M·k, D]` -> each row's, weighted and added up: `[M, D]` float32.

    With a shared expert what it makes is added, and the sum to the residual stream.
    """
    (M, k), D = weights.shape, outer.shape[1]
    width = min(1024, D & -D)
    flat, tree = jax.tree.flatten(
        (outer, where, weights, beside, shared and (shared.gate, shared.x))
    )

    def body(*refs: Any) -> None:
        outer, where, weights, beside, residual = jax.tree.unflatten(tree, refs[:-1])
        m, col = pl.program_id(1), pl.program_id(0) * width + jnp.arange(width)
        parts = [plt.load(outer.at[where[m, j], col]) for j in range(k)]
        total = jnp.zeros(width, jnp.float32)
        for j, part in enumerate(parts):
            total = total + weights[m, j] * part.astype(jnp.float32)
        if beside is not None:
            gate, x = residual
            part = plt.load(beside.at[m, col]).astype(jnp.float32)
            total = total + jax.nn.sigmoid(gate[m, 0].astype(jnp.float32)) * part
            total = plt.load(x.at[m, col]) + total.astype(x.dtype)
        plt.store(refs[-1].at[m, col], total)

    dtype = jnp.float32 if shared is None else shared.x.dtype
    return triton_call(
        body,
        *flat,
        grid=(D // width, M),
        out_shape=jax.ShapeDtypeStruct((M, D), dtype),
        impl=impl,
        name="weighted_sum",
    )


def _stack(w: Weight, layer: int) -> jax.Array:
    """The array `[L, E, …]` of a layer's experts, whatever their format."""
    stored = place(w.inner if isinstance(w, Observed) else w, layer)[0]
    return stored.w if isinstance(stored, Dense) else stored.q
