"""Routed experts for many rows: each expert's weights are read once for all rows sent to it.

For a row `h` with chosen experts `e_1 … e_k` and their weights `w_1 … w_k`

    y = Σ_j w_j · (silu(h G_jᵀ) · (h U_jᵀ)) D_jᵀ        added up in the order of choice

with `[G; U]` an expert's `gate_up` and `D` its `down`; what an expert gives is rounded to the type
of `h` after either product. Three steps:

1. `group` sorts the `M·k` pairs of row and choice by expert (`group_by_expert` counts, with one
   program an expert; `cut_into_tiles` says for each tile of `rows` neighbours whose it is).
2. `expert_up` and `expert_down` make tiles of one expert's product, see `pallas_kernels.matmul`.
   The grid has room for the most tiles there can be; those left over end at once.
3. `weighted_sum` gathers a row's pairs again.

No sum ever runs over rows, so the bits of a row do not depend on the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
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

TILES = Tiles(rows=32, cols=256, depth=128, warps=8, stages=3)


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
    up_tiles: Tiles = TILES,
    down_tiles: Tiles = TILES,
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
        up_tiles: how the first product is cut; half of its columns are gate, half up.
        down_tiles: how the second is; `rows` must be the same.

    Returns:
        `[M, D]` float32.
    """
    if impl == "plain" or isinstance(gate_up, Observed) or isinstance(down, Observed):
        return reference(h, chosen, weights, gate_up, down, layer)
    if up_tiles.rows != down_tiles.rows:
        raise ValueError(
            f"both products need tiles of equally many rows, not {up_tiles.rows} and "
            f"{down_tiles.rows}"
        )
    groups = group(chosen, _stack(gate_up, layer).shape[1], up_tiles.rows, impl)
    inner = _up(h, groups, gate_up, down, layer, up_tiles, impl)
    outer = _down(inner, groups, down, layer, down_tiles, impl)
    return _weighted_sum(outer, groups.place, weights, impl)


# --- 1. sorting pairs by expert -------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Pairs of row and choice sorted by expert, and by row where the expert is the same.

    Attributes:
        row: of each sorted pair, `[M·k]` int32.
        place: of each pair among the sorted, `[M, k]` int32.
        tiles: `[3, T]` int32: the expert of each tile, its first sorted pair, and where the
            expert's pairs end; a tile that starts there is left over.
    """

    row: jax.Array
    place: jax.Array
    tiles: jax.Array


def group(chosen: jax.Array, experts: int, rows: int, impl: Impl) -> Groups:
    """Sort pairs by expert and cut each expert's into tiles of `rows`.

    Args:
        chosen: `[M, k]` int32.
        experts: how many there are (E).
        rows: pairs a tile.
        impl: "kernel" or "interpret".
    """
    pairs, k = chosen.size, chosen.shape[1]
    # Every expert that has a pair has a tile for its first; each further one is full before it.
    busy = min(experts, pairs)
    count = busy + (pairs - busy) // rows
    width = max(16, pl.next_power_of_2(pairs))

    def by_expert(chosen: Any, row: Any, place: Any, counts: Any) -> None:
        expert, pair = pl.program_id(0), jnp.arange(width)
        there = pair < pairs
        all_ = plt.load(chosen.at[pair], mask=there, other=jnp.int32(experts))
        mine = (all_ == expert).astype(jnp.int32)
        start = jnp.sum((all_ < expert).astype(jnp.int32))
        at = start + jnp.cumsum(mine) - mine
        counts[expert] = jnp.sum(mine)
        plt.store(place.at[pair], at, mask=there & (mine > 0))
        plt.store(row.at[at], pair // k, mask=there & (mine > 0))

    index = jax.ShapeDtypeStruct((pairs,), jnp.int32)
    row, where, counts = triton_call(
        by_expert,
        chosen.reshape(-1),
        grid=(experts,),
        out_shape=(index, index, jax.ShapeDtypeStruct((experts,), jnp.int32)),
        impl=impl,
        name="group_by_expert",
        warps=max(1, min(16, width // 512)),
    )
    block = 64

    def into_tiles(counts: Any, tiles: Any) -> None:
        expert = jnp.arange(pl.next_power_of_2(experts))
        counts_ = plt.load(counts.at[expert], mask=expert < experts, other=jnp.int32(0))
        each = (counts_ + rows - 1) // rows
        number = pl.program_id(0) * block + jnp.arange(block)
        before = jnp.cumsum(each)[None, :] <= number[:, None]
        whose = jnp.sum(before.astype(jnp.int32), axis=1)
        number_within = number - jnp.sum(jnp.where(before, each[None], 0), axis=1)
        start = jnp.sum(jnp.where(before, counts_[None], 0), axis=1)
        own = expert[None, :] == whose[:, None]
        end = start + jnp.sum(jnp.where(own, counts_[None], 0), axis=1)
        for kind, value in enumerate((whose, start + rows * number_within, end)):
            plt.store(tiles.at[kind, number], value, mask=number < count)

    tiles = triton_call(
        into_tiles,
        counts,
        grid=(-(-count // block),),
        out_shape=jax.ShapeDtypeStruct((3, count), jnp.int32),
        impl=impl,
        name="cut_into_tiles",
    )
    return Groups(row, where.reshape(chosen.shape), tiles)


# --- 2. the two products --------------------------------------------------------------------------


class Tile(NamedTuple):
    """What one program works on.

    Attributes:
        at: where in the stack its expert lies.
        pair: `[rows]` int32, which of the sorted pairs.
        end: where the expert's pairs end; others follow.
        across: which tile of output features.
    """

    at: tuple
    pair: jax.Array
    end: jax.Array
    across: jax.Array

    @property
    def there(self) -> jax.Array:
        """`[rows]` bool: pairs of this expert."""
        return self.pair < self.end


def _up(
    h: jax.Array,
    groups: Groups,
    gate_up: Weight,
    down: Weight,
    layer: int,
    tiles: Tiles,
    impl: Impl,
) -> jax.Array:
    """`silu(h Gᵀ) · (h Uᵀ)` of each sorted pair, `[M·k, I]` in the order in which `down` is
    multiplied.
    """
    w, index = place(gate_up, layer)
    kind, D, N = type(place(down, layer)[0]), h.shape[1], height(w)
    inner = N // 2
    cut = fit(tiles, w, D)
    half = min(cut.cols // 2, inner & -inner)

    def body(t: Tile, w: Any, h: Any, row: Any, out: Any) -> None:
        slot = t.across * half + jnp.arange(half)
        own = source(kind, slot, inner)
        col = (inner * jnp.arange(2)[:, None] + own[None, :]).reshape(2 * half)
        rows = plt.load(row.at[t.pair], mask=t.there, other=jnp.int32(0))
        y = _scaled(w, t, col, N, h, rows, cut, impl).astype(out.dtype).astype(jnp.float32)
        gate, up = jnp.unstack(y.reshape(2, half, cut.rows).transpose(1, 2, 0), axis=-1)
        # Rounded where the reference rounds.
        gate = (gate * jax.nn.sigmoid(gate)).astype(out.dtype).astype(jnp.float32)
        y = (gate * up).astype(out.dtype).T
        plt.store(out.at[t.pair[:, None], slot[None, :]], y, mask=t.there[:, None])

    out = jax.ShapeDtypeStruct((groups.row.size, inner), h.dtype)
    args = (in_order(h, type(w)), groups.row)
    return _tiled(body, args, w, index, groups, inner // half, out, cut, impl, "expert_up")


def _down(
    inner: jax.Array, groups: Groups, down: Weight, layer: int, tiles: Tiles, impl: Impl
) -> jax.Array:
    """`inner Dᵀ` of each sorted pair, `[M·k, D]`."""
    w, index = place(down, layer)
    N = height(w)
    cut = fit(tiles, w, inner.shape[1])
    cols = min(cut.cols, N & -N)

    def body(t: Tile, w: Any, inner: Any, out: Any) -> None:
        col = t.across * cols + jnp.arange(cols)
        y = _scaled(w, t, col, N, inner, t.pair, cut, impl)
        y = y.astype(out.dtype).T
        plt.store(out.at[t.pair[:, None], col[None, :]], y, mask=t.there[:, None])

    out = jax.ShapeDtypeStruct((inner.shape[0], N), inner.dtype)
    return _tiled(body, (inner,), w, index, groups, N // cols, out, cut, impl, "expert_down")


def _scaled(
    w: Any, t: Tile, col: jax.Array, N: int, x: Any, row: jax.Array, cut: Tiles, impl: Impl
) -> jax.Array:
    y = product(w, t.at, col, x, row, t.there, cut.depth, impl)
    scale = scales(w, t.at, col, N, impl)
    return y if scale is None else y * scale[:, None]


def _tiled(
    body: Callable[..., None],
    args: tuple[jax.Array, ...],
    w: Dense | Fp8 | Nvfp4,
    index: int,
    groups: Groups,
    across: int,
    out: jax.ShapeDtypeStruct,
    cut: Tiles,
    impl: Impl,
    name: str,
) -> jax.Array:
    """Run `body(tile, w, *args, out)` for every tile of pairs and `across` tiles of features."""
    if isinstance(w, Fp8) and w.input_scale is not None:
        raise ValueError("grouped experts do not round their inputs to E4M3")
    # The layer's number as data: one kernel is compiled for all of them.
    layer = jnp.full(1, index, jnp.int32)
    flat, tree = jax.tree.flatten((groups.tiles, layer, words(w), *args))

    def program(*refs: Any) -> None:
        tiles, layer, w, *args = jax.tree.unflatten(tree, refs[:-1])
        expert, first, end = (tiles[kind, pl.program_id(1)] for kind in range(3))
        tile = Tile((layer[0], expert), first + jnp.arange(cut.rows), end, pl.program_id(0))
        pl.when(first < end)(partial(body, tile, w, *args, refs[-1]))

    return triton_call(
        program,
        *flat,
        grid=(across, groups.tiles.shape[1]),
        out_shape=out,
        impl=impl,
        name=name,
        warps=cut.warps,
        stages=cut.stages,
    )


# --- 3. back to rows ------------------------------------------------------------------------------


def _weighted_sum(outer: jax.Array, where: jax.Array, weights: jax.Array, impl: Impl) -> jax.Array:
    """Sorted pairs `[M·k, D]` -> each row's, weighted and added up: `[M, D]` float32."""
    (M, k), D = weights.shape, outer.shape[1]
    width = min(1024, D & -D)

    def body(outer: Any, where: Any, weights: Any, out: Any) -> None:
        m, col = pl.program_id(1), pl.program_id(0) * width + jnp.arange(width)
        parts = [plt.load(outer.at[where[m, j], col]) for j in range(k)]
        total = jnp.zeros(width, jnp.float32)
        for j, part in enumerate(parts):
            total = total + weights[m, j] * part.astype(jnp.float32)
        plt.store(out.at[m, col], total)

    return triton_call(
        body,
        outer,
        where,
        weights,
        grid=(D // width, M),
        out_shape=jax.ShapeDtypeStruct((M, D), jnp.float32),
        impl=impl,
        name="weighted_sum",
    )


def _stack(w: Weight, layer: int) -> jax.Array:
    """The array `[L, E, …]` of a layer's experts, whatever their format."""
    stored = place(w.inner if isinstance(w, Observed) else w, layer)[0]
    return stored.w if isinstance(stored, Dense) else stored.q
