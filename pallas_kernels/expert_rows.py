"""Mixture of experts for very few rows: each goes to its experts by itself, in two launches.

The formula is that of `pallas_kernels.experts`, and so are the bits. There is no list of who is
sent where: a program of the first half finds the expert that its row chose, and leaves it for the
second half, in which the experts of a row are parts of one product.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
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
from pallas_kernels.matmul import placed_at, scales
from pallas_kernels.products import columns, diagonal, shape
from pallas_kernels.register_tiles import (
    added,
    fetch,
    multiplied,
    multiply,
    nothing,
    prepared,
)
from pallas_kernels.routing import expert_of, keys_of, logit_of, rest


@dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        up: rows of an expert's gate a program takes, and as many of its up.
        shared_up: the same of the shared expert.
        down: rows of `down` a program takes, of all experts of a row.
        warps: a program.
    """

    up: int = 16
    shared_up: int = 4
    down: int = 8
    warps: int = 4


class Sizes(NamedTuple):
    """Rows, width, inner width of an expert and of the shared one, experts a row."""

    R: int
    D: int
    inner: int
    shared: int
    k: int


def expert_rows(
    x: jax.Array,
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    stacks: Any,
    index: jax.Array,
    *,
    k: int,
    impl: Impl,
    tiles: Tiles = Tiles(),
) -> jax.Array:
    """See `pallas_kernels.experts.experts`.

    Args:
        x: residual stream `[R, D]`.
        h: normed rows in the order of `stacks.up`'s kind.
        h_shared: the same in that of `stacks.shared_up`'s.
        logits: of the router, `[R, E]` bfloat16.
        gate: the shared expert's logit, `[R, 1]`.
        stacks: `up`, `shared_up`, `down` and `shared_down`.
        index: int32, where in each of them the layer is.
        k: experts a row, a power of two.
        impl: "kernel" or "interpret".
        tiles: see `Tiles`.
    """
    (R, D), up, shared_up = x.shape, stacks.up, stacks.shared_up
    sizes = Sizes(R, D, shape(up)[0] // 2, shape(shared_up)[0] // 2, k)
    inner, keys = _inner(h, h_shared, logits, stacks, index, sizes, impl, tiles)
    return _outer(x, inner, keys, gate, stacks, index, sizes, impl, tiles)


def _inner(
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    w: Any,
    index: jax.Array,
    sizes: Sizes,
    impl: Impl,
    tiles: Tiles,
) -> tuple[jax.Array, jax.Array]:
    """`[R, k·I + S]`, see `pallas_kernels.experts`; and keys `[R, k]` of the experts chosen."""
    R, D, inner, shared, k = sizes
    up = _tall(UP, tiles.up, type(w.up), inner, D)
    one = _tall(SHARED_UP, tiles.shared_up, type(w.shared_up), shared, D)
    after, after_one = type(w.down), type(w.shared_down)
    ready = prepared(w.up, _rows(up), up.size), prepared(w.shared_up, _rows(one), one.size)
    flat, tree = jax.tree.flatten((index, h, h_shared, logits, *ready))

    def half(w: Any, at: tuple, t: Tiling, tile: jax.Array, height: int, x: Any) -> jax.Array:
        def where(m: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
            return at, *gate_and_up_of(t, m, tile, height)

        y = multiplied(w, where, t, _rows(t), x, impl)
        return activated(y, w, at, t, tile, height, 1, h.dtype, impl).reshape(t.rows)

    def body(*refs: Any) -> None:
        index, h, h_shared, logits, w, w_one = jax.tree.unflatten(tree, refs[:-2])
        (out, chosen), program, r = refs[-2:], pl.program_id(0), pl.program_id(1)
        routed = k * up.tiles

        @pl.when(program < routed)
        def _() -> None:
            # Neighbours take different experts: those chosen last take longest to find.
            tile, choice = lax.div(program, k), lax.rem(program, k)
            keys = lax.fori_loop(0, choice, lambda _, keys: rest(keys), keys_of(logits, r))
            key = jnp.max(keys)
            at = index[0], expert_of(key)
            x = columns(h, r, R, 1, up.parts, up.span)
            y = half(w, at, up, tile, inner, x)
            place = choice * inner + placed_at(after, tile * up.rows + jnp.arange(up.rows), inner)
            plt.store(out.at[r, place], y.astype(out.dtype))
            chosen[r, choice] = key

        @pl.when(program >= routed)
        def _() -> None:
            tile = program - routed
            x = columns(h_shared, r, R, 1, one.parts, one.span)
            y = half(w_one, (index[1],), one, tile, shared, x)
            place = placed_at(after_one, tile * one.rows + jnp.arange(one.rows), shared)
            plt.store(out.at[r, k * inner + place], y.astype(out.dtype))

    return triton_call(
        body,
        *flat,
        grid=(k * up.tiles + one.tiles, R),
        out_shape=(
            jax.ShapeDtypeStruct((R, k * inner + shared), h.dtype),
            jax.ShapeDtypeStruct((R, k), jnp.int32),
        ),
        impl=impl,
        name="expert_inner",
        warps=tiles.warps,
    )


def _outer(
    x: jax.Array,
    inner: jax.Array,
    keys: jax.Array,
    gate: jax.Array,
    w: Any,
    index: jax.Array,
    sizes: Sizes,
    impl: Impl,
    tiles: Tiles,
) -> jax.Array:
    """The second half, weighted and added to the residual stream: `[R, D]`."""
    R, D, width, shared, k = sizes
    t = tiling(_of(DOWN, tiles.down), type(w.down), D, width)
    one = tiling(_of(SHARED_DOWN, tiles.down), type(w.shared_down), D, shared)
    rows = k * t.rows
    # Some parts of the shared expert's tile again, to make it as tall as the other.
    tall = max(_rows_of_one(one), rows)
    ready = prepared(w.down, rows, width), prepared(w.shared_down, tall, one.size)
    flat, tree = jax.tree.flatten((index, x, inner, keys, gate, *ready))

    def body(*refs: Any) -> None:
        index, x, inner, keys, gate, w, w_one = jax.tree.unflatten(tree, refs[:-1])
        out, start, r = refs[-1], pl.program_id(0) * t.rows, pl.program_id(1)

        def routed(m: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
            """Experts lie on one another in the tile."""
            expert = expert_of(plt.load(keys.at[r, m // t.rows]))
            return (index[2], expert), start + m % t.rows, 0 * m

        def last(m: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
            return (index[3],), start + m % t.rows, m // t.rows % one.parts

        zero = nothing(index[2])
        raw = fetch(w, routed, rows, width, width, np.int32(0), zero)
        raw_one = [fetch(w_one, last, tall, one.span, one.size, s, zero) for s in _numbers(one)]
        n, m = start + jnp.arange(t.rows), jnp.arange(rows)
        before = plt.load(x.at[r, n])
        opening = jax.nn.sigmoid(plt.load(gate.at[r, 0 * r]).astype(jnp.float32))
        highest = logit_of(plt.load(keys.at[r, 0 * r]))
        total = jnp.float32(0)
        for j in range(k):
            total = total + jnp.exp(logit_of(plt.load(keys.at[r, np.int32(j)])) - highest)
        weight = jnp.exp(logit_of(plt.load(keys.at[r, m // t.rows])) - highest) / total
        lead, row, _ = routed(m)
        scale = scales(w, lead, row, D, impl)
        weight = weight if scale is None else weight * scale

        inputs = columns(inner, r, R, 1, k, width)(np.int32(0), width)
        y = multiply(type(w), raw, rows, inputs, impl) * weight[:, None]
        y = diagonal(y, k, 1).reshape(t.rows)
        z = columns(inner, r, R, 1, one.parts, one.span)
        z = added(
            w_one,
            raw_one,
            tall,
            [z(k * width + s * one.size, one.size) for s in _numbers(one)],
            impl,
        )
        # What a part gives that is there again meets no column of its own.
        z = diagonal(z, tall // t.rows, 1).reshape(t.rows)
        scale = scales(w_one, (index[3],), n, D, impl)
        z = z if scale is None else z * scale
        y = y + opening * z
        plt.store(out.at[r, n], before + y.astype(out.dtype))

    return triton_call(
        body,
        *flat,
        grid=(t.tiles, R),
        out_shape=jax.ShapeDtypeStruct((R, D), x.dtype),
        impl=impl,
        name="expert_outer",
        warps=tiles.warps,
    )


def _of(cut: Cut, rows: int) -> Cut:
    return Cut(rows, cut.parts, cut.step)


def _tall(cut: Cut, rows: int, kind: type, height: int, K: int) -> Tiling:
    return tiling(_of(cut, rows), kind, height, K)


def _rows(t: Tiling) -> int:
    """Of a tile of gate and up."""
    return 2 * t.rows * t.parts


def _rows_of_one(t: Tiling) -> int:
    return t.rows * t.parts


def _numbers(t: Tiling) -> list[np.int32]:
    """Of a part's steps; the interpreter takes no Python numbers beside arrays."""
    return [np.int32(number) for number in range(t.steps)]
