"""The mixture of experts of `pallas_kernels.experts`, with its large products on Mosaic.

Five launches: it is found out who is sent where (`_first`); rows are gathered into groups of one
expert (`_gathered`); their inner values (`_inner`) and parts (`_outer`) are made by
`pallas_kernels.expert_stream`, which goes through all groups with no program for any that is not
there; and each row adds up its parts (`_sum`). The shared expert's products are made beside the
first two, which leave the GPU idle otherwise. What is added up in which order is that of
`pallas_kernels.expert_tiles`, so a row has the same bits as there.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call
from pallas_kernels.expert_choice import Order, order_shapes, placed, put_in_order
from pallas_kernels.expert_registers import sigmoid
from pallas_kernels.expert_stream import HALF, LIST, SPAN, Product, Ring, stream
from pallas_kernels.expert_tiles import (
    SHARED_DOWN,
    SHARED_UP,
    Tiling,
    activated,
    gate_and_up_of,
    tiling,
)
from pallas_kernels.matmul import placed_at, scales, words
from pallas_kernels.products import Columns, columns, diagonal, shape, tree_of
from pallas_kernels.register_tiles import Where, added, fetch, nothing, prepared
from pallas_kernels.weights import Nvfp4

PAIRS = 128
"""Pairs of row and choice that a program enters into the list of groups."""


@dataclass(frozen=True)
class Tiles:
    """How the work is cut; none of it shows in the bits.

    Attributes:
        rows: in a group, 8 or 16.
        depth: see `Ring`.
        stages: the same.
        blocks: the same; two for each of an H200's multiprocessors.
        ahead: the same.
        together: rows that the shared expert is multiplied with at once.
        wide: elements of a row that a program copies.
        warps: of a program of the shared expert's first product.
    """

    rows: int = 8
    depth: int = 512
    stages: int = 2
    blocks: int = 2 * 132
    ahead: int = 1
    together: int = 8
    wide: int = 512
    warps: int = 8

    @property
    def ring(self) -> Ring:
        """Of both large products."""
        return Ring(self.depth, self.stages, self.blocks, self.ahead)


class Groups(NamedTuple):
    """Rows that go to one expert together.

    Attributes:
        expert: of each group, `[G]` int32; the last entry is how many groups there are.
        place: of each pair of row and choice, where in the groups, `[R·k]` int32.
        x: `[G·rows, D]`; a place that no pair has may hold anything, here and below.
        up: scales of gate and up, `[G, 2]` float32.
        down: weight times scale, `[G·rows]` float32.
    """

    expert: Any
    place: Any
    x: Any
    up: Any
    down: Any


def fits(w: Any) -> bool:
    """Whether these kernels can take an `experts.Layer` of such kinds and sizes."""
    if not all(isinstance(stack, Nvfp4) for stack in w):
        return False
    up, _, down, _ = (shape(stack) for stack in w)
    return up[0] % (2 * SPAN) == 0 and all(n % (2 * SPAN) == 0 for n in (up[1], *down))


def experts_mosaic(
    x: jax.Array,
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    w: Any,
    index: jax.Array,
    *,
    k: int,
    impl: Impl,
    tiles: Tiles = Tiles(),
) -> jax.Array:
    """As `experts.experts`, but that `w` is of stacks, and `index [4+]` says where in each.

    Raises:
        ValueError: the weights do not fit, see `fits`.
    """
    if not fits(w):
        raise ValueError("experts on Mosaic are NVFP4, and a multiple of 256 wide")
    order, inner_shared = _first(h_shared, logits, w, index, k, impl, tiles)
    groups, shared = _gathered(h, inner_shared, logits, order, w, index, k, impl, tiles)
    inner = _inner(groups, w.up, index, impl, tiles)
    parts = _outer(inner, groups, w.down, index, impl, tiles)
    return _sum(x, shared, parts, groups.place, gate, k, impl)


# --- before ---------------------------------------------------------------------------------------


def _first(
    h: jax.Array,
    logits: jax.Array,
    w: Any,
    index: jax.Array,
    k: int,
    impl: Impl,
    tiles: Tiles,
) -> tuple[Order, jax.Array]:
    """Who is sent where, and the inner values of the shared expert `[R, S]`."""
    (R, D), E, S = h.shape, logits.shape[1], shape(w.shared_up)[0] // 2
    one, after = tiling(SHARED_UP, type(w.shared_up), S, D), type(w.shared_down)
    together, tall = min(tiles.together, pl.next_power_of_2(R)), 2 * one.rows * one.parts
    ready = prepared(w.shared_up, tall, one.size)
    flat, tree = jax.tree.flatten((index, h, logits, ready))

    def body(*refs: Any) -> None:
        index, h, logits, w = jax.tree.unflatten(tree, refs[: len(flat)])
        out, inner, program = Order(*refs[len(flat) : -1]), refs[-1], pl.program_id(0)
        pl.when(program == 0)(lambda: put_in_order(logits, k, tiles.rows, out))

        @pl.when(program > 0)
        def _() -> None:
            tile = lax.rem(program - 1, one.tiles)
            first, at = lax.div(program - 1, one.tiles) * together, (index[1],)

            def where(m: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
                return at, *gate_and_up_of(one, m, tile, S)

            x = columns(h, first, R, together, one.parts, one.span)
            y = _multiplied(w, where, tall, one, x, impl)
            y = activated(y, w, at, one, tile, S, together, inner.dtype, impl).astype(inner.dtype)
            n = placed_at(after, tile * one.rows + jnp.arange(one.rows), S)
            r = first + jnp.arange(together)
            kept = jnp.broadcast_to((r < R)[None, :], y.shape)
            plt.store(inner.at[r[None, :], n[:, None]], y, mask=kept)

    *order, inner = triton_call(
        body,
        *flat,
        grid=(1 + one.tiles * -(-R // together),),
        out_shape=(*order_shapes(R, E, k), jax.ShapeDtypeStruct((R, S), h.dtype)),
        impl=impl,
        name="expert_order",
        warps=tiles.warps,
    )
    return Order(*order), inner


def _gathered(
    h: jax.Array,
    inner: jax.Array,
    logits: jax.Array,
    order: Order,
    w: Any,
    index: jax.Array,
    k: int,
    impl: Impl,
    tiles: Tiles,
) -> tuple[Groups, jax.Array]:
    """Groups, and the shared expert's results `[R, D]` float32."""
    (R, D), S, N, rows = h.shape, inner.shape[1], order.sent.shape[0], tiles.rows
    E = logits.shape[1]
    most = min(E, N)
    G = -(-(most + N // rows + 1) // LIST) * LIST
    one = tiling(SHARED_DOWN, type(w.shared_down), D, S)
    together, tall = min(tiles.together, pl.next_power_of_2(R)), one.rows * one.parts
    alone, listed = one.tiles * -(-R // together), -(-N // PAIRS)
    wide = min(tiles.wide, D & -D)
    scale, ready = (w.up.scale, w.down.scale), prepared(w.shared_down, tall, one.size)
    flat, tree = jax.tree.flatten((index, h, inner, logits, order, scale, ready))

    def multiply(program: jax.Array, index: Any, inner: Any, w: Any, out: Any) -> None:
        tile, at = lax.rem(program, one.tiles), (index[3],)
        first, n = lax.div(program, one.tiles) * together, tile * one.rows + jnp.arange(one.rows)

        def where(m: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
            return at, tile * one.rows + m % one.rows, m // one.rows

        scale = scales(w, at, n, D, impl)
        x = columns(inner, first, R, together, one.parts, one.span)
        y = diagonal(_multiplied(w, where, tall, one, x, impl), one.parts, together)
        y = y if scale is None else y * scale[:, None]
        r = first + jnp.arange(together)
        kept = jnp.broadcast_to((r < R)[None, :], y.shape)
        plt.store(out.at[r[None, :], n[:, None]], y, mask=kept)

    def enter(
        program: jax.Array, index: Any, logits: Any, order: Order, scale: Any, out: Groups
    ) -> None:
        """What is known of some pairs, and of the groups that they begin."""
        (up, down), pair = scale, program * PAIRS + jnp.arange(PAIRS)
        there = pair < N
        expert, place, weight = placed(logits, order, k, rows, pair, there)
        group, begins = lax.div(place, jnp.int32(rows)), lax.rem(place, jnp.int32(rows)) == 0
        begins = there & begins
        exact = 2.0**14 if impl == "interpret" else 2.0**8
        weight = weight * (exact * plt.load(down.at[index[2], expert, 0 * expert]))
        # Interpreted, a masked store writes back what it found: let that be outside.
        own = jnp.where(begins, group, G)
        for half in range(2):
            factor = exact * plt.load(up.at[index[0], expert, half + 0 * expert])
            plt.store(out.up.at[own, half + 0 * own], factor, mask=begins)
        plt.store(out.expert.at[own], expert, mask=begins)
        plt.store(out.down.at[jnp.where(there, place, G * rows)], weight, mask=there)
        plt.store(out.place.at[pair], place, mask=there)

        @pl.when(program == 0)
        def _() -> None:
            out.expert[G - 1] = order.start[E]

    def copy(program: jax.Array, h: Any, order: Order, out: Groups) -> None:
        """A piece of a row to all its places."""
        r, n = lax.rem(program, R), lax.div(program, R) * wide + jnp.arange(wide)
        some, sent = plt.load(h.at[r, n]), [order.sent[r * k + j] for j in range(k)]
        at = [(order.start[lax.rem(one, E)], lax.div(one, E)) for one in sent]
        places = [start * rows + slot for start, slot in at]
        for place in places:
            plt.store(out.x.at[place, n], some)

    def body(*refs: Any) -> None:
        index, h, inner, logits, order, scale, w = jax.tree.unflatten(tree, refs[: len(flat)])
        out, shared, program = Groups(*refs[len(flat) : -1]), refs[-1], pl.program_id(0)
        last = alone + listed
        pl.when(program < alone)(lambda: multiply(program, index, inner, w, shared))

        @pl.when((program >= alone) & (program < last))
        def _() -> None:
            enter(program - alone, index, logits, order, scale, out)

        pl.when(program >= last)(lambda: copy(program - last, h, order, out))

    shapes = (
        ((G,), jnp.int32),
        ((N,), jnp.int32),
        ((G * rows, D), h.dtype),
        ((G, 2), jnp.float32),
        ((G * rows,), jnp.float32),
        ((R, D), jnp.float32),
    )
    *out, shared = triton_call(
        body,
        *flat,
        grid=(alone + listed + R * (D // wide),),
        out_shape=[jax.ShapeDtypeStruct(*each) for each in shapes],
        impl=impl,
        name="expert_groups",
        warps=4,
    )
    return Groups(*out), shared


def _multiplied(w: Any, where: Where, tall: int, t: Tiling, x: Columns, impl: Impl) -> jax.Array:
    """`register_tiles.multiplied` that asks for the inputs first: they need no other's answer."""
    # The interpreter takes no Python numbers beside arrays.
    numbers = [np.int32(number) for number in range(t.steps)]
    zero, inputs = nothing(where(jnp.arange(1))[0][0]), [x(i * t.size, t.size) for i in numbers]
    raw = [fetch(w, where, tall, t.span, t.size, number, zero) for number in numbers]
    return added(w, raw, tall, inputs, impl)


# --- the two products -----------------------------------------------------------------------------


def _inner(groups: Groups, w: Nvfp4, index: jax.Array, impl: Impl, tiles: Tiles) -> jax.Array:
    """Inner values of groups `[G·rows, I]`, in the order in which they are multiplied."""
    (height, K), E = shape(w), w.q.shape[1]
    spans, dtype = height // 2 // SPAN, groups.x.dtype

    def at(layer: jax.Array, expert: jax.Array, tile: jax.Array, half: int) -> tuple:
        span = ((layer * E + expert) * 2 + half) * spans + lax.div(tile, 2)
        return span, slice(None), pl.ds(lax.rem(tile, 2) * 16, 16)

    def factor(scale: Any, group: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scale[group, 0], scale[group, 1]

    def finish(gate: jax.Array, up: jax.Array, scale: tuple) -> list[jax.Array]:
        gate, up = (
            (y * s).astype(dtype).astype(jnp.float32)
            for y, s in zip((gate, up), scale, strict=True)
        )
        open = jax.nn.sigmoid(gate) if impl == "interpret" else sigmoid(gate)
        return [(gate * open).astype(dtype).astype(jnp.float32) * up]

    what = Product(0, height // 2 // HALF, K, 2, 2, HALF, at, factor, finish, turned=True)
    packed: Any = words(w)
    codes = packed.q.reshape(-1, 4, SPAN // 4, K // 8)
    blocks = w.block_scale.reshape(-1, 4, SPAN // 4, K // 16)
    args = groups.expert, index, groups.x, codes, blocks, groups.up, dtype
    how: dict[str, Any] = {"rows": tiles.rows, "impl": impl, "ring": tiles.ring}
    return stream(what, *args, **how, name="expert_inner_stream")


def _outer(
    inner: jax.Array, groups: Groups, w: Nvfp4, index: jax.Array, impl: Impl, tiles: Tiles
) -> jax.Array:
    """Parts of groups `[G·rows, D]` float32, weighted."""
    (D, K), E, rows = shape(w), w.q.shape[1], tiles.rows
    high = D // (2 * HALF)

    def at(layer: jax.Array, expert: jax.Array, tile: jax.Array, _: int) -> tuple:
        return (layer * E + expert) * high + tile, slice(None), slice(None), slice(None)

    def factor(weight: Any, group: jax.Array) -> jax.Array:
        here = weight.at[pl.ds(group * rows, rows)]
        if impl == "interpret":
            return here[...]
        return plgpu.load(here, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

    def finish(low: jax.Array, up: jax.Array, weight: jax.Array) -> list[jax.Array]:
        weight = lax.broadcast_in_dim(weight, low.shape, (1,))
        return [low * weight, up * weight]

    what = Product(2, high, K, 1, 1, 2 * HALF, at, factor, finish, turned=False)
    packed: Any = words(w)
    codes = packed.q.reshape(-1, 2, 4, HALF // 4, K // 8)
    blocks = w.block_scale.reshape(-1, 2, 4, HALF // 4, K // 16)
    args = groups.expert, index, inner, codes, blocks, groups.down, jnp.float32
    how: dict[str, Any] = {"rows": rows, "impl": impl, "ring": tiles.ring}
    return stream(what, *args, **how, name="expert_outer_stream")


# --- after ----------------------------------------------------------------------------------------


def _sum(
    x: jax.Array,
    shared: jax.Array,
    parts: jax.Array,
    where: jax.Array,
    gate: jax.Array,
    k: int,
    impl: Impl,
) -> jax.Array:
    """`x [R, D]` plus each row's parts, plus the shared expert's by its gate."""
    R, D = x.shape
    cols = min(512, D & -D)

    def body(x: Any, shared: Any, parts: Any, where: Any, gate: Any, out: Any) -> None:
        n, r = pl.program_id(0) * cols + jnp.arange(cols), pl.program_id(1)
        places = [where[r * k + j] for j in range(k)]
        last, open, before = plt.load(shared.at[r, n]), gate[r, 0], plt.load(x.at[r, n])
        routed = [plt.load(parts.at[place, n]) for place in places]
        y = tree_of(routed) + jax.nn.sigmoid(open.astype(jnp.float32)) * last
        plt.store(out.at[r, n], before + y.astype(x.dtype))

    return triton_call(
        body,
        *(x, shared, parts, where, gate),
        grid=(D // cols, R),
        out_shape=jax.ShapeDtypeStruct((R, D), x.dtype),
        impl=impl,
        name="expert_sum",
        warps=4,
    )
