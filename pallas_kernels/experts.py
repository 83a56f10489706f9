"""Mixture of experts for the rows of a decode step: an expert's weights are read once for them all.

For a row with router logits `l` let `e_1 … e_k` be the `k` experts of the largest, of equal ones
the lower first, and `w_j = exp(l_{e_j}) / Σ_i exp(l_{e_i})` (softmax over all, renormalised). Then

    inner_j = silu(h G_jᵀ) · (h U_jᵀ)                                (`expert_inner`)
    part_j = w_j inner_j D_jᵀ                                        (`expert_outer`)
    y = x + Σ_j part_j + sigmoid(gate) · inner_s D_sᵀ                (`expert_sum`)

with `[G; U]` an expert's `gate_up` and `s` the shared expert, which has a logit `gate` of its own.
Before all that `pallas_kernels.expert_choice` lists the pairs of row and choice that are sent to
each expert: a program multiplies a tile of one expert's weights with several pairs at once. How
products are cut and added up is said in `pallas_kernels.expert_tiles`, so that a row has the same
bits whatever the others are, and in every kernel that keeps to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.expert_choice import Choice, list_pairs
from pallas_kernels.expert_rows import expert_rows
from pallas_kernels.expert_tiles import (
    DOWN,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    Cut,
    Tiling,
    activated,
    gate_and_up,
    tiling,
)
from pallas_kernels.experts_mosaic import experts_mosaic, fits
from pallas_kernels.matmul import place, placed_at, scales, words
from pallas_kernels.products import (
    Columns,
    columns,
    diagonal,
    gathered,
    product,
    product_at_once,
    shape,
    tree_of,
    width,
)
from pallas_kernels.projection import natural
from pallas_kernels.routing import route, swiglu
from pallas_kernels.weights import Dense, linear

ALONE = 4
"""The most rows that each go to their experts by themselves."""


@dataclass(frozen=True)
class Tiles:
    """How the work is cut, within what `expert_tiles` leaves open.

    Attributes:
        up: rows of an expert's gate a program takes, and as many of its up.
        up_pairs: pairs of row and choice that it multiplies them with at once.
        down: rows of an expert's `down` a program takes.
        down_pairs: pairs that it multiplies them with at once.
        down_step: input features that it loads together.
        shared: rows that the shared expert is multiplied with at once.
        warps: a program.
        stages: steps on their way from memory; 1 to have a tile in registers before multiplying.
    """

    up: int = 32
    up_pairs: int = 8
    down: int = 128
    down_pairs: int = 16
    down_step: int = 256
    shared: int = 8
    warps: int = 8
    stages: int = 5


class Layer(NamedTuple):
    """A layer's experts: stacks, or references to them.

    Attributes:
        up: `[L, E, 2I, D]`, NVFP4 or unquantised.
        shared_up: the shared expert's, `[L, 2S, D]`.
        down: `[L, E, D, I]`.
        shared_down: `[L, D, S]`.
    """

    up: Any
    shared_up: Any
    down: Any
    shared_down: Any


def reference(
    x: jax.Array,
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    weights: Layer,
    layer: int,
    k: int,
) -> jax.Array:
    """See `experts`."""
    kinds = [type(place(w, layer)[0]) for w in (weights.up, weights.shared_up)]
    h, h_shared = (natural(rows, kind) for rows, kind in zip((h, h_shared), kinds, strict=True))

    def one(row: tuple[jax.Array, ...]) -> jax.Array:
        h, h_shared, gate = (entry[None] for entry in row[:3])
        inner = swiglu(linear(h_shared, weights.shared_up, layer))
        last = linear(inner, weights.shared_down, layer, jnp.float32)
        y = jax.nn.sigmoid(gate.astype(jnp.float32)) * last
        for j in range(k):
            at = layer, row[3][j]
            inner = swiglu(linear(h, weights.up, at))
            y = y + row[4][j] * linear(inner, weights.down, at, jnp.float32)
        return y[0]

    return x + lax.map(one, (h, h_shared, gate, *route(logits, k))).astype(x.dtype)


def experts(
    x: jax.Array,
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    weights: Layer,
    layer: int,
    k: int,
    *,
    impl: Impl,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Send rows through their experts and the shared one.

    Args:
        x: residual stream `[R, D]`.
        h: normed rows `[R, D]` bfloat16, in the order of `weights.up`'s kind.
        h_shared: the same in the order of `weights.shared_up`'s.
        logits: of the router, `[R, E]` bfloat16, `E` a power of two.
        gate: the shared expert's logit, `[R, 1]`.
        weights: see `Layer`.
        layer: which of the stacks' layers.
        k: experts a row, a power of two.
        impl: how to compute.
        tiles: see `Tiles`; None for those, or for the kernels of `pallas_kernels.expert_rows` and
            `pallas_kernels.experts_mosaic` where they are faster.

    Returns:
        `[R, D]`.
    """
    if impl == "plain":
        return reference(x, h, h_shared, logits, gate, weights, layer, k)
    stacks, at = zip(*(place(w, layer) for w in weights), strict=True)
    args = as_data(*at), x, h, h_shared, logits, gate, Layer(*stacks)
    return _launch(*args, k=k, impl=impl, tiles=tiles)


@partial(jax.jit, static_argnames=("k", "impl", "tiles"))
def _launch(
    index: jax.Array,
    x: jax.Array,
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    stacks: Layer,
    *,
    k: int,
    impl: Impl,
    tiles: Tiles | None,
) -> jax.Array:
    if tiles is None and x.shape[0] <= ALONE:
        return expert_rows(x, h, h_shared, logits, gate, stacks, index, k=k, impl=impl)
    if tiles is None and impl == "kernel" and fits(stacks):
        return experts_mosaic(x, h, h_shared, logits, gate, stacks, index, k=k, impl=impl)
    tiles, choice = tiles or Tiles(), list_pairs(logits, k, impl)
    args = choice, stacks, index, k, impl, tiles
    inner = _inner(h, h_shared, *args)
    return _sum(x, _outer(inner, *args), gate, impl)


# --- the two products -----------------------------------------------------------------------------

Pairs = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From slots `[n]` of a tile to the pairs in them `[n]` int32, and which of them there are."""


def _inner(
    h: jax.Array,
    h_shared: jax.Array,
    choice: Choice,
    w: Layer,
    index: jax.Array,
    k: int,
    impl: Impl,
    tiles: Tiles,
) -> jax.Array:
    """`[R, k·I + S]`: of a row's experts in the order of choice, then of the shared one; each in
    the order in which it is multiplied.
    """
    (R, D), inter, S = h.shape, shape(w.up)[0] // 2, shape(w.shared_up)[0] // 2
    t = _fitted(replace(UP, rows=tiles.up), w.up, inter, D)
    one = _fitted(SHARED_UP, w.shared_up, S, D)
    after, after_one = type(w.down), type(w.shared_down)
    multiplied = partial(_multiplied, impl=impl, tiles=tiles)
    together, slots = _together(tiles, R), tiles.up_pairs

    def alone(ins: Any, out: Any, program: jax.Array) -> None:
        index, _, h, _, w = ins
        tile, first = lax.rem(program, one.tiles), lax.div(program, one.tiles) * together
        x, at = columns(h, first, R, together, one.parts, one.span), (index[1],)
        y = multiplied(w, at, *gate_and_up(one, tile, S), one, x)
        y = activated(y, w, at, one, tile, S, together, out.dtype, impl).astype(out.dtype)
        place = k * inter + placed_at(after_one, tile * one.rows + jnp.arange(one.rows), S)
        r = first + jnp.arange(together)
        kept = jnp.broadcast_to((r < R)[None, :], y.shape)
        plt.store(out.at[r[None, :], place[:, None]], y, mask=kept)

    def sent(ins: Any, out: Any, expert: jax.Array, tile: jax.Array, pairs: Pairs) -> None:
        index, h, _, w, _ = ins
        c = jnp.arange(width(t.parts, slots))
        part, (pair, there) = c // slots, pairs(c % slots)
        x = gathered(h, lax.div(pair, k), part * t.span, there & (part < t.parts))
        at = index[0], expert
        y = multiplied(w, at, *gate_and_up(t, tile, inter), t, x)
        y = activated(y, w, at, t, tile, inter, slots, out.dtype, impl).astype(out.dtype)
        pair, there = pairs(jnp.arange(slots))
        place = placed_at(after, tile * t.rows + jnp.arange(t.rows), inter)[:, None]
        place = (lax.rem(pair, k) * inter)[None, :] + place
        row = jnp.broadcast_to(lax.div(pair, k)[None, :], place.shape)
        kept = jnp.broadcast_to(there[None, :], place.shape)
        plt.store(out.at[row, place], y, mask=kept)

    return _tiled(
        alone,
        sent,
        (index, h, h_shared, words(w.up), words(w.shared_up)),
        choice,
        (one.tiles * -(-R // together), t.tiles, slots),
        jax.ShapeDtypeStruct((R, k * inter + S), h.dtype),
        impl=impl,
        name="expert_inner",
        tiles=tiles,
    )


def _outer(
    inner: jax.Array,
    choice: Choice,
    w: Layer,
    index: jax.Array,
    k: int,
    impl: Impl,
    tiles: Tiles,
) -> jax.Array:
    """`[R, k + 1, D]` float32: weighted, of a row's experts in the order of choice; the shared
    one's as it is.
    """
    R, (D, inter), S = inner.shape[0], shape(w.down), shape(w.shared_down)[1]
    t = _fitted(replace(DOWN, rows=tiles.down, step=tiles.down_step), w.down, D, inter)
    one = _fitted(SHARED_DOWN, w.shared_down, D, S)
    multiplied = partial(_multiplied, impl=impl, tiles=tiles)
    together, slots = _together(tiles, R), tiles.down_pairs

    def alone(ins: Any, out: Any, program: jax.Array) -> None:
        index, inner, _, _, w = ins
        tile, first = lax.rem(program, one.tiles), lax.div(program, one.tiles) * together
        x, at = columns(inner, first, R, together, one.parts, one.span), (index[3],)
        m, n = jnp.arange(one.parts * one.rows), tile * one.rows + jnp.arange(one.rows)
        rows = tile * one.rows + m % one.rows
        y = multiplied(w, at, rows, m // one.rows, one, lambda i, size: x(k * inter + i, size))
        y, scale = diagonal(y, one.parts, together), scales(w, at, n, D, impl)
        y = y if scale is None else y * scale[:, None]
        r = first + jnp.arange(together)
        kept = jnp.broadcast_to((r < R)[None, :], y.shape)
        plt.store(out.at[r[None, :], k, n[:, None]], y, mask=kept)

    def sent(ins: Any, out: Any, expert: jax.Array, tile: jax.Array, pairs: Pairs) -> None:
        index, inner, weights, w, _ = ins
        at, n = (index[2], expert), tile * t.rows + jnp.arange(t.rows)
        pair, there = pairs(jnp.arange(width(1, slots)))
        row, number = lax.div(pair, k), lax.rem(pair, k)
        weight = plt.load(weights.at[pair], mask=there, other=jnp.float32(0))[None, :]
        x = gathered(inner, row, number * inter, there)
        y, scale = multiplied(w, at, n, 0 * n, t, x), scales(w, at, n, D, impl)
        y = y * (weight if scale is None else weight * scale[:, None])
        kept = jnp.broadcast_to(there[None, :], y.shape)
        plt.store(out.at[row[None, :], number[None, :], n[:, None]], y, mask=kept)

    return _tiled(
        alone,
        sent,
        (index, inner, choice.weights, words(w.down), words(w.shared_down)),
        choice,
        (one.tiles * -(-R // together), t.tiles, slots),
        jax.ShapeDtypeStruct((R, k + 1, D), jnp.float32),
        impl=impl,
        name="expert_outer",
        tiles=tiles,
    )


def _fitted(cut: Cut, w: Any, height: int, K: int) -> Tiling:
    # What is on its way has to fit into shared memory: of unquantised weights fewer elements.
    cut = replace(cut, step=cut.step // 4) if isinstance(w, Dense) else cut
    return tiling(cut, type(w), height, K)


def _together(tiles: Tiles, R: int) -> int:
    return min(tiles.shared, pl.next_power_of_2(R))


def _multiplied(
    w: Any,
    at: tuple,
    rows: jax.Array,
    part: jax.Array,
    t: Tiling,
    x: Columns,
    *,
    impl: Impl,
    tiles: Tiles,
) -> jax.Array:
    """A tile's product `[M, columns]` before scales."""
    way = product_at_once if tiles.stages == 1 else product
    return way(w, at, rows, part, t.span, t.steps, x, impl)


def _tiled(
    alone: Callable[..., None],
    sent: Callable[..., None],
    args: tuple,
    choice: Choice,
    counts: tuple[int, int, int],
    out: jax.ShapeDtypeStruct,
    *,
    impl: Impl,
    name: str,
    tiles: Tiles,
) -> jax.Array:
    """Run `alone(args, out, number)` for the shared expert's tiles, and for every tile of every
    other expert and some of its pairs `sent(args, out, expert, tile, pairs)`.

    Args:
        alone: see above.
        sent: the same.
        args: pytree of arrays.
        choice: who is sent where.
        counts: of the shared expert's tiles, of another expert's, and of pairs at once.
        out: what is written.
        impl: how to compute.
        name: of the kernel.
        tiles: for warps and stages.
    """
    (of_shared, each, slots), k = counts, choice.weights.size // choice.pairs.shape[1]
    flat, tree = jax.tree.flatten((choice.pairs, choice.busy, *args))

    def body(*refs: Any) -> None:
        pairs, busy, *args = jax.tree.unflatten(tree, refs[:-1])
        program, out = pl.program_id(0), refs[-1]
        pl.when(program < of_shared)(partial(alone, args, out, program))

        @pl.when(program >= of_shared)
        def _() -> None:
            number, tile = lax.div(program - of_shared, each), lax.rem(program - of_shared, each)
            expert, count = busy[0, number], busy[1, number]

            def some(lap: jax.Array, _: None) -> None:
                def own(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
                    slot = lap * slots + slot
                    at, there = pairs.at[expert, slot], slot < count
                    # What is not there has a number past all others, for the same reason.
                    return plt.load(at, mask=there, other=jnp.int32(pairs.shape[1] * k)), there

                sent(args, out, expert, tile, own)

            lax.fori_loop(0, lax.div(count + slots - 1, slots), some, None)

    return triton_call(
        body,
        *flat,
        grid=(of_shared + choice.busy.shape[1] * each,),
        out_shape=out,
        impl=impl,
        name=name,
        warps=tiles.warps,
        stages=tiles.stages,
    )


def _sum(x: jax.Array, parts: jax.Array, gate: jax.Array, impl: Impl) -> jax.Array:
    """`x [R, D]` plus parts `[R, k + 1, D]`, the last of them times the sigmoid of its gate."""
    R, D = x.shape
    k, cols = parts.shape[1] - 1, min(512, D & -D)

    def body(x: Any, parts: Any, gate: Any, out: Any) -> None:
        n, r = pl.program_id(0) * cols + jnp.arange(cols), pl.program_id(1)
        *routed, shared = (plt.load(parts.at[r, j, n]) for j in range(k + 1))
        y = tree_of(routed) + jax.nn.sigmoid(gate[r, 0].astype(jnp.float32)) * shared
        plt.store(out.at[r, n], plt.load(x.at[r, n]) + y.astype(x.dtype))

    return triton_call(
        body,
        *(x, parts, gate),
        grid=(D // cols, R),
        out_shape=jax.ShapeDtypeStruct((R, D), x.dtype),
        impl=impl,
        name="expert_sum",
        warps=4,
    )
