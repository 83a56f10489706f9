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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.expert_choice import Choice, choose_experts
from pallas_kernels.expert_rows import expert_rows
from pallas_kernels.expert_tiles import (
    DOWN,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    Cut,
    Tiling,
    activated,
    gate_and_up_of,
    tiling,
)
from pallas_kernels.matmul import place, placed_at, scales
from pallas_kernels.products import (
    Columns,
    columns,
    diagonal,
    gathered,
    shape,
    tree_of,
    width,
)
from pallas_kernels.projection import natural
from pallas_kernels.register_tiles import (
    Where,
    fetch,
    fits,
    multiplied,
    multiply,
    nothing,
    prepared,
)
from pallas_kernels.routing import route, swiglu
from pallas_kernels.weights import Dense, linear

ALONE = 4
"""The most rows that each go to their experts by themselves."""


@dataclass(frozen=True)
class Tiles:
    """How the work is cut, within what `expert_tiles` leaves open.

    Attributes:
        up: rows of an expert's gate in a tile, and as many of its up.
        up_pairs: pairs of row and choice that it is multiplied with at once.
        down: rows of an expert's `down` in a tile.
        down_pairs: pairs that it is multiplied with at once.
        shared_up: rows of the shared expert's gate in a tile.
        shared_down: rows of its `down`.
        shared: rows that it is multiplied with at once.
        run: tiles of an expert that a program takes, one after another, the next on its way.
        warps: a program.
    """

    up: int = 16
    up_pairs: int = 8
    down: int = 64
    down_pairs: int = 16
    shared_up: int = 4
    shared_down: int = 16
    shared: int = 8
    run: int = 8
    warps: int = 4


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
        tiles: see `Tiles`; None for those, or for the kernels of `pallas_kernels.expert_rows` where
            they are faster.

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
    tiles, choice = tiles or Tiles(), choose_experts(logits, k, impl)
    args = choice, stacks, index, k, impl, tiles
    inner = _inner(h, h_shared, *args)
    return _sum(x, _outer(inner, *args), gate, impl)


# --- the two products -----------------------------------------------------------------------------

Place = tuple[tuple, jax.Array, jax.Array]

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
    one = _fitted(replace(SHARED_UP, rows=tiles.shared_up), w.shared_up, S, D)
    rows, rows_of_one = (2 * cut.rows * cut.parts for cut in (t, one))
    after, after_one = type(w.down), type(w.shared_down)
    together, slots = _together(tiles, R), tiles.up_pairs

    def alone(ins: Any, out: Any, program: jax.Array) -> None:
        index, _, h, _, w = ins
        tile, first = lax.rem(program, one.tiles), lax.div(program, one.tiles) * together
        x, at = columns(h, first, R, together, one.parts, one.span), (index[1],)

        def where(m: jax.Array) -> Place:
            return at, *gate_and_up_of(one, m, tile, S)

        y = multiplied(w, where, one, rows_of_one, x, impl)
        y = activated(y, w, at, one, tile, S, together, out.dtype, impl).astype(out.dtype)
        place = k * inter + placed_at(after_one, tile * one.rows + jnp.arange(one.rows), S)
        r = first + jnp.arange(together)
        kept = jnp.broadcast_to((r < R)[None, :], y.shape)
        plt.store(out.at[r[None, :], place[:, None]], y, mask=kept)

    def sent(ins: Any, out: Any, expert: jax.Array) -> Sent:
        index, h, _, w, _ = ins
        at, c = (index[0], expert), jnp.arange(width(t.parts, slots))

        def where(tile: jax.Array) -> Where:
            return lambda m: (at, *gate_and_up_of(t, m, tile, inter))

        def inputs(pairs: Pairs) -> Columns:
            part, (pair, there) = c // slots, pairs(c % slots)
            return gathered(h, lax.div(pair, k), part * t.span, there & (part < t.parts))

        def finish(tile: jax.Array, pairs: Pairs, y: jax.Array) -> None:
            y = activated(y, w, at, t, tile, inter, slots, out.dtype, impl).astype(out.dtype)
            pair, there = pairs(jnp.arange(slots))
            place = placed_at(after, tile * t.rows + jnp.arange(t.rows), inter)[:, None]
            place = (lax.rem(pair, k) * inter)[None, :] + place
            row = jnp.broadcast_to(lax.div(pair, k)[None, :], place.shape)
            kept = jnp.broadcast_to(there[None, :], place.shape)
            plt.store(out.at[row, place], y, mask=kept)

        return Sent(w, where, inputs, finish)

    return _tiled(
        alone,
        sent,
        (
            *(index, h, h_shared),
            *(prepared(w.up, rows, t.size), prepared(w.shared_up, rows_of_one, one.size)),
        ),
        choice,
        (one.tiles * -(-R // together), t, rows, slots),
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
    t = _fitted(replace(DOWN, rows=tiles.down, step=256), w.down, D, inter)
    one = _fitted(replace(SHARED_DOWN, rows=tiles.shared_down), w.shared_down, D, S)
    rows_of_one = one.rows * one.parts
    together, slots = _together(tiles, R), tiles.down_pairs

    def alone(ins: Any, out: Any, program: jax.Array) -> None:
        index, inner, _, _, w = ins
        tile, first = lax.rem(program, one.tiles), lax.div(program, one.tiles) * together
        x, at = columns(inner, first, R, together, one.parts, one.span), (index[3],)

        def where(m: jax.Array) -> Place:
            return at, tile * one.rows + m % one.rows, m // one.rows

        y = multiplied(w, where, one, rows_of_one, lambda i, size: x(k * inter + i, size), impl)
        n = tile * one.rows + jnp.arange(one.rows)
        y, scale = diagonal(y, one.parts, together), scales(w, at, n, D, impl)
        y = y if scale is None else y * scale[:, None]
        r = first + jnp.arange(together)
        kept = jnp.broadcast_to((r < R)[None, :], y.shape)
        plt.store(out.at[r[None, :], k, n[:, None]], y, mask=kept)

    def sent(ins: Any, out: Any, expert: jax.Array) -> Sent:
        index, inner, weights, w, _ = ins
        at, c = (index[2], expert), jnp.arange(width(1, slots))

        def where(tile: jax.Array) -> Where:
            return lambda m: (at, tile * t.rows + m, 0 * m)

        def inputs(pairs: Pairs) -> Columns:
            pair, there = pairs(c)
            return gathered(inner, lax.div(pair, k), lax.rem(pair, k) * inter, there)

        def finish(tile: jax.Array, pairs: Pairs, y: jax.Array) -> None:
            n, (pair, there) = tile * t.rows + jnp.arange(t.rows), pairs(c)
            row, number = lax.div(pair, k), lax.rem(pair, k)
            weight = plt.load(weights.at[pair], mask=there, other=jnp.float32(0))[None, :]
            scale = scales(w, at, n, D, impl)
            y = y * (weight if scale is None else weight * scale[:, None])
            kept = jnp.broadcast_to(there[None, :], y.shape)
            plt.store(out.at[row[None, :], number[None, :], n[:, None]], y, mask=kept)

        return Sent(w, where, inputs, finish)

    return _tiled(
        alone,
        sent,
        (
            *(index, inner, choice.weights),
            *(prepared(w.down, t.rows, t.size), prepared(w.shared_down, rows_of_one, one.size)),
        ),
        choice,
        (one.tiles * -(-R // together), t, t.rows, slots),
        jax.ShapeDtypeStruct((R, k + 1, D), jnp.float32),
        impl=impl,
        name="expert_outer",
        tiles=tiles,
    )


def _fitted(cut: Cut, w: Any, height: int, K: int) -> Tiling:
    # What is on its way has to fit into registers: of unquantised weights fewer elements.
    cut = replace(cut, step=cut.step // 4) if isinstance(w, Dense) else cut
    return tiling(cut, type(w), height, K)


def _together(tiles: Tiles, R: int) -> int:
    return min(tiles.shared, pl.next_power_of_2(R))


class Sent(NamedTuple):
    """What an expert does with the pairs that are sent to it.

    Attributes:
        weight: its stack.
        where: from a tile to the places of its rows.
        inputs: of some pairs.
        finish: from a tile, pairs and their product before scales to what is stored.
    """

    weight: Any
    where: Callable[[jax.Array], Where]
    inputs: Callable[[Pairs], Columns]
    finish: Callable[[jax.Array, Pairs, jax.Array], None]


def _tiled(
    alone: Callable[[Any, Any, jax.Array], None],
    sent: Callable[[Any, Any, jax.Array], Sent],
    args: tuple,
    choice: Choice,
    cut: tuple[int, Tiling, int, int],
    out: jax.ShapeDtypeStruct,
    *,
    impl: Impl,
    name: str,
    tiles: Tiles,
) -> jax.Array:
    """Run `alone(args, out, number)` for the shared expert's tiles, and what `sent(args, out,
    expert)` says for every other expert, tile and pair.

    Args:
        alone: see above.
        sent: the same.
        args: pytree of arrays.
        choice: who is sent where.
        cut: number of the shared expert's tiles; how another's are cut, rows of a tile, and pairs
            at once.
        out: what is written.
        impl: how to compute.
        name: of the kernel.
        tiles: see `Tiles`.
    """
    (of_shared, t, rows, slots), k = cut, choice.weights.size // choice.pairs.shape[1]
    run = min(tiles.run, t.tiles)
    programs = t.tiles // run
    flat, tree = jax.tree.flatten((choice.pairs, choice.busy, *args))

    def body(*refs: Any) -> None:
        pairs, busy, *args = jax.tree.unflatten(tree, refs[:-1])
        program, out = pl.program_id(0), refs[-1]
        pl.when(program < of_shared)(partial(alone, args, out, program))
        number, first = (op(program - of_shared, programs) for op in (lax.div, lax.rem))

        @pl.when(program >= of_shared)
        def _() -> None:
            expert, count = busy[0, number], busy[1, number]
            job = sent(args, out, expert)

            def own(lap: jax.Array) -> Pairs:
                def some(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
                    slot = lap * slots + slot
                    at, there = pairs.at[expert, slot], slot < count
                    # What is not there has a number past all others, for the same reason.
                    return plt.load(at, mask=there, other=jnp.int32(pairs.shape[1] * k)), there

                return some

            total = lax.div(count + slots - 1, slots) * run
            pl.when(count > 0)(partial(_stream, job, own, first * run, run, total, t, rows, impl))

    return triton_call(
        body,
        *flat,
        grid=(of_shared + choice.busy.shape[1] * programs,),
        out_shape=out,
        impl=impl,
        name=name,
        warps=tiles.warps,
    )


def _stream(
    job: Sent,
    own: Callable[[jax.Array], Pairs],
    first: jax.Array,
    run: int,
    total: jax.Array,
    t: Tiling,
    rows: int,
    impl: Impl,
) -> None:
    """A run of tiles for the first pairs, for the next, and so on.

    As soon as a piece of a tile has been multiplied, the same piece of the next is asked for.
    """
    w, numbers = job.weight, [np.int32(number) for number in range(t.steps)]
    ahead = fits(type(w), rows, t.size)

    def piece(item: jax.Array, number: np.int32) -> tuple[jax.Array, ...]:
        where = job.where(first + lax.rem(jnp.minimum(item, total - 1), run))
        return fetch(w, where, rows, t.span, t.size, number, nothing(first))

    def one(item: jax.Array, held: list) -> list:
        pairs = own(lax.div(item, run))
        x, following, y = job.inputs(pairs), [], None
        for number in numbers:
            raw = held[number] if ahead else piece(item, number)
            part = multiply(type(w), raw, rows, x(number * t.size, t.size), impl)
            y = part if y is None else y + part
            following += [piece(item + 1, number)] if ahead else []
        assert y is not None
        job.finish(first + lax.rem(item, run), pairs, y)
        return following

    lax.fori_loop(0, total, one, [piece(0 * first, n) for n in numbers] if ahead else [])


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
