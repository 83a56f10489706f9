"""The two products of experts for rows that are sorted by expert, and of one that takes all rows.

`expert_up` and `expert_down` make tiles of one expert's product, see `pallas_kernels.matmul`. The
grid has room for the most tiles there can be; those left over end at once.

A tile of few pairs is all about reading the weight. Its pieces then go straight to registers, see
`pallas_kernels.register_tiles`, and wait there for their turn, while the inputs are brought to
shared memory: what a step waits for was asked for a round before. The sums are the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.grouping import Groups
from pallas_kernels.matmul import Tiles, fit, height, product, scales, source, words
from pallas_kernels.register_tiles import fetch, fits, multiply, nothing, prepared
from pallas_kernels.weights import Dense, Fp8, Nvfp4

LOW = 16
"""Pairs of a tile up to which weights go straight to registers."""

AHEAD = 4
"""Pieces of a weight that wait there: as many as leave room for four programs."""


class Expert(NamedTuple):
    """The routed experts, or the shared one.

    Attributes:
        gate_up: `[L, E, 2I, D]`, or of the shared one `[L, 2I, D]`.
        down: `[L, E, D, I]`, or `[L, D, I]`.
        at: where in the index the layer of `gate_up` is; that of `down` follows.
        h: rows `[M, D]` in the order of `gate_up`'s kind.
        groups: who is sent where; None for the shared one.
    """

    gate_up: Dense | Fp8 | Nvfp4
    down: Dense | Fp8 | Nvfp4
    at: int
    h: jax.Array
    groups: Groups | None


class Half(NamedTuple):
    """One of an expert's two products.

    Attributes:
        w: the weight's stack.
        index: which of its layers; outside a kernel, where in the index that is.
        x: inputs in its order.
        rows: which of them each pair has; None: each its own.
        tiles: see `Groups`; None: all pairs are one expert's.
    """

    w: Any
    index: Any
    x: Any
    rows: Any = None
    tiles: Any = None


class Tile(NamedTuple):
    """What one program works on.

    Attributes:
        at: where in the stack its expert lies.
        pair: `[rows]` int32, which of the sorted pairs; of the shared expert, which of the rows.
        row: `[rows]` int32, their inputs.
        end: where the expert's pairs end; others follow.
        across: which tile of output features.
    """

    at: tuple
    pair: jax.Array
    row: jax.Array
    end: jax.Array | int
    across: jax.Array

    @property
    def there(self) -> jax.Array:
        """`[rows]` bool: pairs of this expert."""
        return self.pair < self.end


def both(experts: list[Expert], index: jax.Array, tiles: Tiles, impl: Impl) -> list[jax.Array]:
    """What experts make of each sorted pair `[M·k, D]`, or the shared one of each row `[M, D]`."""
    halves = []
    for one in experts:
        rows, cuts = (one.groups.row, one.groups.tiles) if one.groups else (None, None)
        halves.append(Half(one.gate_up, one.at, one.h, rows, cuts))
    inner = _up(halves, [type(one.down) for one in experts], index, tiles, impl)
    halves = [
        Half(one.down, one.at + 1, x, None, half.tiles)
        for one, half, x in zip(experts, halves, inner, strict=True)
    ]
    return _down(halves, index, tiles, impl)


def _up(
    halves: list[Half], after: list[type], index: jax.Array, tiles: Tiles, impl: Impl
) -> list[jax.Array]:
    """`silu(h Gᵀ) · (h Uᵀ)` of each pair, `[pairs, I]`, in the order of the weight that follows."""

    def body(i: int, cut: Tiles, t: Tile, half: Half, out: Any) -> None:
        inner, width = out.shape[1], cut.cols // 2

        def col(n: jax.Array) -> jax.Array:
            slot = t.across * width + lax.rem(n, width)
            return inner * lax.div(n, width) + source(after[i], slot, inner)

        y = _scaled(half, t, col, 2 * inner, cut, impl).astype(out.dtype).astype(jnp.float32)
        gate, up = jnp.unstack(y.reshape(2, width, cut.rows).transpose(1, 2, 0), axis=-1)
        # Rounded where the reference rounds.
        gate = (gate * jax.nn.sigmoid(gate)).astype(out.dtype).astype(jnp.float32)
        slot = t.across * width + jnp.arange(width)
        y = (gate * up).astype(out.dtype).T
        plt.store(out.at[t.pair[:, None], slot[None, :]], y, mask=t.there[:, None])

    return _tiled(body, halves, index, 2, tiles, impl, "expert_up")


def _down(halves: list[Half], index: jax.Array, tiles: Tiles, impl: Impl) -> list[jax.Array]:
    """`inner Dᵀ` of each pair, `[pairs, D]`."""

    def body(_: int, cut: Tiles, t: Tile, half: Half, out: Any) -> None:
        def col(n: jax.Array) -> jax.Array:
            return t.across * cut.cols + n

        y = _scaled(half, t, col, out.shape[1], cut, impl).astype(out.dtype).T
        place = t.pair[:, None], col(jnp.arange(cut.cols))[None, :]
        plt.store(out.at[place], y, mask=t.there[:, None])

    return _tiled(body, halves, index, 1, tiles, impl, "expert_down")


Columns = Callable[[jax.Array], jax.Array]
"""From rows `[n]` of a tile of the weight to those of the whole."""


def _scaled(half: Half, t: Tile, col: Columns, N: int, cut: Tiles, impl: Impl) -> jax.Array:
    columns = col(jnp.arange(cut.cols))
    if _at_hand(half.w, cut):
        y = _product(half, t, col, cut, impl)
    else:
        y = product(half.w, t.at, columns, half.x, t.row, t.there, cut.depth, impl)
    scale = scales(half.w, t.at, columns, N, impl)
    return y if scale is None else y * scale[:, None]


def _at_hand(w: Dense | Fp8 | Nvfp4, cut: Tiles) -> bool:
    """Whether tiles of a weight go straight to registers."""
    few = cut.rows <= LOW and cut.cols == 16 * cut.warps
    return few and fits(type(w), cut.cols, cut.depth)


def _product(half: Half, t: Tile, col: Columns, cut: Tiles, impl: Impl) -> jax.Array:
    """`pallas_kernels.matmul.product`, bit for bit, with the next pieces of the weight at hand."""
    (w, x), K = (half.w, half.x), half.x.shape[1]
    steps, along = K // cut.depth, jnp.arange(cut.depth)
    ahead = [np.int32(number) for number in range(min(AHEAD, steps))]
    mask = jnp.broadcast_to(t.there[:, None], (cut.rows, cut.depth))

    def where(m: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
        return t.at, col(m), 0 * m

    def piece(number: Any, there: jax.Array | None = None) -> tuple[jax.Array, ...]:
        zero = nothing(half.index)
        return fetch(w, where, cut.cols, K, cut.depth, number, zero, there)

    def inputs(number: jax.Array) -> jax.Array:
        place = t.row[:, None], (number * cut.depth + along)[None, :]
        return plt.load(x.at[place], mask=mask, other=jnp.zeros((), x.dtype)).T

    # Each round asks for what the next one multiplies; the compiler does so for the inputs.
    def round_(i: jax.Array, carry: tuple) -> tuple:
        total, *pieces = carry
        number = i * len(ahead)
        columns = [inputs(number + a) for a in ahead]
        for a, now in enumerate(pieces):
            total = total + multiply(type(w), now, cut.cols, columns[a], impl)
            if len(ahead) < steps:
                after = number + len(ahead) + a
                pieces[a] = piece(after, after < steps)
        return total, *pieces

    zero = jnp.zeros((cut.cols, cut.rows), jnp.float32)
    return lax.fori_loop(0, steps // len(ahead), round_, (zero, *map(piece, ahead)))[0]


def _tiled(
    body: Callable[..., None],
    halves: list[Half],
    index: jax.Array,
    fold: int,
    tiles: Tiles,
    impl: Impl,
    name: str,
) -> list[jax.Array]:
    """Run `body(i, cut, tile, half, out)` for every tile of pairs, across all features.

    `fold` columns of the product make one of the result.
    """
    cuts, sizes, outs = [], [], []
    for half in halves:
        if isinstance(half.w, Fp8) and half.w.input_scale is not None:
            raise ValueError("grouped experts do not round their inputs to E4M3")
        width = height(half.w) // fold
        cut = fit(tiles, half.w, half.x.shape[1])
        cut = replace(cut, cols=min(cut.cols, fold * (width & -width)))
        pairs = half.x.shape[0] if half.rows is None else half.rows.size
        count = -(-pairs // cut.rows) if half.tiles is None else half.tiles.shape[1]
        cuts.append(cut)
        sizes.append((fold * width // cut.cols, count))
        outs.append(jax.ShapeDtypeStruct((pairs, width), half.x.dtype))
    ready = [
        half._replace(
            w=prepared(half.w, cut.cols, cut.depth) if _at_hand(half.w, cut) else words(half.w),
            index=None,
        )
        for half, cut in zip(halves, cuts, strict=True)
    ]
    flat, tree = jax.tree.flatten((index, ready))

    def run(i: int, half: Half, out: Any, program: jax.Array) -> None:
        (across, _), cut, M = sizes[i], cuts[i], outs[i].shape[0]
        column, number = lax.rem(program, across), lax.div(program, across)
        if half.tiles is None:
            pair = number * cut.rows + jnp.arange(cut.rows)
            body(i, cut, Tile((half.index,), pair, pair, M, column), half, out)
            return
        expert, first, end = (half.tiles[kind, number] for kind in range(3))

        @pl.when(first < end)
        def _() -> None:
            pair = row = first + jnp.arange(cut.rows)
            if half.rows is not None:
                row = plt.load(half.rows.at[pair], mask=pair < end, other=jnp.int32(0))
            body(i, cut, Tile((half.index, expert), pair, row, end, column), half, out)

    def programs(*refs: Any) -> None:
        index, ins = jax.tree.unflatten(tree, refs[: len(flat)])
        program, before = pl.program_id(0), 0
        for i, (half, out) in enumerate(zip(ins, refs[len(flat) :], strict=True)):
            half = half._replace(index=index[halves[i].index])
            count = sizes[i][0] * sizes[i][1]
            own = partial(run, i, half, out, program - before)
            if len(halves) == 1:
                own()
            else:
                pl.when((program >= before) & (program < before + count))(own)
            before += count

    return list(
        triton_call(
            programs,
            *flat,
            grid=(sum(across * count for across, count in sizes),),
            out_shape=outs,
            impl=impl,
            name=name,
            warps=tiles.warps,
            stages=tiles.stages,
        )
    )
