"""Mixture of experts for few rows, each through its own experts and the shared one.

For a row with router logits `l` let `e_1 … e_k` be the `k` experts of the largest, of equal ones
the lower first, and `w_j = exp(l_{e_j}) / Σ_i exp(l_{e_i})` (softmax over all, renormalised). Then

    inner_j = silu(h G_jᵀ) · (h U_jᵀ)                                (`expert_inner`)
    y = x + Σ_j w_j inner_j D_jᵀ + sigmoid(gate) · inner_s D_sᵀ      (`expert_outer`)

with `[G; U]` an expert's `gate_up` and `s` the shared expert, which has a logit `gate` of its own.
Both kernels choose the experts themselves: that takes less time than starting another kernel. The
second treats the experts of a row as parts of one product, see `pallas_kernels.products`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.matmul import in_order, place, placed_at, scales, words
from pallas_kernels.products import columns, diagonal, product, shape
from pallas_kernels.projection import natural, split
from pallas_kernels.routing import route, swiglu
from pallas_kernels.weights import Weight, linear


@dataclass(frozen=True)
class Tiles:
    """How a half of the experts is cut.

    Attributes:
        rows: of a weight a program takes.
        parts: into which K is split among the rows of a tile.
        step: elements of a part that are loaded together, at most.
        warps: a program.
    """

    rows: int = 8
    parts: int = 8
    step: int = 512
    warps: int = 4


INNER, OUTER = Tiles(step=256), Tiles(parts=4)
"""The fastest of those tried on an H200."""


def inner_reference(
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate_up: Weight,
    shared: Weight,
    layer: int,
    k: int,
    after: tuple[type, type],
) -> jax.Array:
    """See `expert_inner`."""
    h, h_shared = (
        natural(x, type(place(w, layer)[0])) for x, w in ((h, gate_up), (h_shared, shared))
    )

    def one(row: tuple[jax.Array, ...]) -> jax.Array:
        h, h_shared, chosen = row[0][None], row[1][None], row[2]
        parts = [swiglu(linear(h, gate_up, (layer, chosen[j])))[0] for j in range(k)]
        parts = [in_order(part, after[0]) for part in parts]
        last = swiglu(linear(h_shared, shared, layer))[0]
        return jnp.concatenate([*parts, in_order(last, after[1])])

    return lax.map(one, (h, h_shared, route(logits, k)[0]))


def outer_reference(
    x: jax.Array,
    inner: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    down: Weight,
    shared: Weight,
    layer: int,
    k: int,
) -> jax.Array:
    """See `expert_outer`."""
    kinds = [type(place(w, layer)[0]) for w in (down, shared)]
    width = shape(place(down, layer)[0])[1]

    def one(row: tuple[jax.Array, ...]) -> jax.Array:
        inner, chosen, weights, gate = row
        last = natural(inner[None, k * width :], kinds[1])
        y = jax.nn.sigmoid(gate.astype(jnp.float32)) * linear(last, shared, layer, jnp.float32)
        for j in range(k):
            part = natural(inner[None, j * width : (j + 1) * width], kinds[0])
            y = y + weights[j] * linear(part, down, (layer, chosen[j]), jnp.float32)
        return y[0]

    return x + lax.map(one, (inner, *route(logits, k), gate)).astype(x.dtype)


def expert_inner(
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    gate_up: Weight,
    shared: Weight,
    layer: int,
    k: int,
    after: tuple[type, type],
    *,
    impl: Impl,
    tiles: Tiles = INNER,
) -> jax.Array:
    """The first half of the experts that each row is sent to.

    Args:
        h: normed rows `[R, D]` bfloat16, in the order of `gate_up`'s kind.
        h_shared: the same in the order of `shared`'s.
        logits: of the router, `[R, E]` bfloat16.
        gate_up: `[L, E, 2I, D]`, NVFP4 or unquantised.
        shared: the shared expert's, `[L, 2S, D]`.
        layer: which of the stacks' layers.
        k: experts a row, a power of two.
        after: kinds of the weights that follow, routed and shared, in whose order the result is.
        impl: how to compute.
        tiles: see `Tiles`; of gate, and as much again of up.

    Returns:
        `[R, k·I + S]`: the chosen experts' in the order of choice, then the shared one's.
    """
    if impl == "plain":
        return inner_reference(h, h_shared, logits, gate_up, shared, layer, k, after)
    (routed, at), (one, at_one) = (place(w, layer) for w in (gate_up, shared))
    return _inner(
        *(as_data(at, at_one), h, h_shared, logits, routed, one),
        k=k,
        after=after,
        impl=impl,
        tiles=tiles,
    )


@partial(jax.jit, static_argnames=("k", "after", "impl", "tiles"))
def _inner(
    index: jax.Array,
    h: jax.Array,
    h_shared: jax.Array,
    logits: jax.Array,
    routed: Any,
    shared: Any,
    *,
    k: int,
    after: tuple[type, type],
    impl: Impl,
    tiles: Tiles,
) -> jax.Array:
    halves = [shape(w)[0] // 2 for w in (routed, shared)]
    counts = [n // tiles.rows for n in halves]
    flat, tree = jax.tree.flatten((index, h, h_shared, logits, words(routed), words(shared)))
    R, D = h.shape[0], shape(routed)[1]

    def body(*refs: Any) -> None:
        index, h, h_shared, logits, routed, shared = jax.tree.unflatten(tree, refs[:-1])
        out, tile, r = refs[-1], pl.program_id(0), pl.program_id(1)
        half = partial(_half, out, r, D=D, R=R, impl=impl, tiles=tiles)
        of_routed = k * counts[0]

        @pl.when(tile < of_routed)
        def _() -> None:
            choice = tile // counts[0]
            keys = lax.fori_loop(0, choice, lambda _, keys: _rest(keys), _keys(logits, r))
            at, to = (index[0], _expert(jnp.max(keys))), choice * halves[0]
            half(h, routed, at, tile - choice * counts[0], to, halves[0], after[0])

        @pl.when(tile >= of_routed)
        def _() -> None:
            to = jnp.int32(k * halves[0])
            half(h_shared, shared, (index[1],), tile - of_routed, to, halves[1], after[1])

    return triton_call(
        body,
        *flat,
        grid=(k * counts[0] + counts[1], R),
        out_shape=jax.ShapeDtypeStruct((R, k * halves[0] + halves[1]), h.dtype),
        impl=impl,
        name="expert_inner",
        warps=tiles.warps,
    )


def _half(
    out: Any,
    r: jax.Array,
    h: Any,
    w: Any,
    at: tuple,
    tile: jax.Array,
    to: jax.Array,
    height: int,
    after: type,
    *,
    D: int,
    R: int,
    impl: Impl,
    tiles: Tiles,
) -> None:
    """Some rows of gate and of up of one expert with one row of inputs."""
    rows = tiles.rows
    parts, steps = split(tiles.parts, tiles.step, D, type(w))
    m, stride = jnp.arange(parts * rows), D // parts
    inputs = columns(h, r, R, 1, parts, stride)

    def one(start: jax.Array) -> jax.Array:
        y = product(w, at, start + m % rows, m // rows, stride, steps, inputs, impl)
        y = diagonal(y, parts, 1).reshape(rows)
        scale = scales(w, at, start + jnp.arange(rows), 2 * height, impl)
        # Rounded where the plain path rounds.
        return (y if scale is None else y * scale).astype(h.dtype).astype(jnp.float32)

    gate, up = one(tile * rows), one(height + tile * rows)
    gate = (gate * jax.nn.sigmoid(gate)).astype(h.dtype).astype(jnp.float32)
    place = to + placed_at(after, tile * rows + jnp.arange(rows), height)
    plt.store(out.at[r, place], (gate * up).astype(out.dtype))


def expert_outer(
    x: jax.Array,
    inner: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    down: Weight,
    shared: Weight,
    layer: int,
    k: int,
    *,
    impl: Impl,
    tiles: Tiles = OUTER,
) -> jax.Array:
    """The second half, weighted and added to the residual stream.

    Args:
        x: `[R, D]`.
        inner: from `expert_inner`, `[R, k·I + S]`, in the orders of `down` and `shared`.
        logits: of the router, `[R, E]` bfloat16.
        gate: the shared expert's logit `[R, 1]`.
        down: `[L, E, D, I]`, NVFP4 or unquantised.
        shared: the shared expert's, `[L, D, S]`.
        layer: which of the stacks' layers.
        k: experts a row, a power of two.
        impl: how to compute.
        tiles: see `Tiles`; `parts` is for the shared expert.

    Returns:
        `[R, D]`.
    """
    if impl == "plain":
        return outer_reference(x, inner, logits, gate, down, shared, layer, k)
    (routed, at), (one, at_one) = (place(w, layer) for w in (down, shared))
    args = (as_data(at, at_one), x, inner, logits, gate, routed, one)
    return _outer(*args, k=k, impl=impl, tiles=tiles)


@partial(jax.jit, static_argnames=("k", "impl", "tiles"))
def _outer(
    index: jax.Array,
    x: jax.Array,
    inner: jax.Array,
    logits: jax.Array,
    gate: jax.Array,
    routed: Any,
    shared: Any,
    *,
    k: int,
    impl: Impl,
    tiles: Tiles,
) -> jax.Array:
    width, S = shape(routed)[1], shape(shared)[1]
    flat, tree = jax.tree.flatten((index, x, inner, logits, gate, words(routed), words(shared)))
    (R, D), rows = x.shape, tiles.rows

    def body(*refs: Any) -> None:
        index, x, inner, logits, gate, routed, shared = jax.tree.unflatten(tree, refs[:-1])
        out, start, r = refs[-1], pl.program_id(0) * rows, pl.program_id(1)
        keys = _keys(logits, r)
        # Expert and weight of every row of the tile, in which experts lie on one another.
        m = jnp.arange(k * rows)
        expert, weight = jnp.zeros(m.shape, jnp.int32), jnp.zeros(m.shape, jnp.float32)
        total, highest = jnp.float32(0), _logit(jnp.max(keys))
        for j in range(k):
            first = jnp.max(keys)
            keys = _without(keys, first)
            share = jnp.exp(_logit(first) - highest)
            total = total + share
            expert = jnp.where(m // rows == j, _expert(first), expert)
            weight = jnp.where(m // rows == j, share, weight)
        lead = (index[0], expert)
        inputs = columns(inner, r, R, 1, k, width)
        y = product(routed, lead, start + m % rows, 0 * m, width, 1, inputs, impl)
        scale, weight = scales(routed, lead, start + m % rows, D, impl), weight / total
        y = y * (weight if scale is None else weight * scale)[:, None]
        y = diagonal(y, k, 1).reshape(rows)

        parts, steps = split(tiles.parts, tiles.step, S, type(shared))
        m, n, stride = jnp.arange(parts * rows), start + jnp.arange(rows), S // parts
        inputs = _shifted(columns(inner, r, R, 1, parts, stride), k * width)
        z = product(shared, (index[1],), start + m % rows, m // rows, stride, steps, inputs, impl)
        z = diagonal(z, parts, 1).reshape(rows)
        scale = scales(shared, (index[1],), n, D, impl)
        z = z if scale is None else z * scale
        y = y + jax.nn.sigmoid(gate[r, 0].astype(jnp.float32)) * z
        plt.store(out.at[r, n], plt.load(x.at[r, n]) + y.astype(x.dtype))

    return triton_call(
        body,
        *flat,
        grid=(D // rows, R),
        out_shape=jax.ShapeDtypeStruct((R, D), x.dtype),
        impl=impl,
        name="expert_outer",
        warps=tiles.warps,
    )


def _shifted(inputs: Any, by: int) -> Any:
    return lambda offset, count: inputs(by + offset, count)


# --- choosing experts -----------------------------------------------------------------------------
#
# A logit and its expert in one integer, so that a single maximum finds both: the sixteen bits of
# bfloat16 in the order of their values, then the expert counted backwards.

_LAST = 0xFFFF
_NONE = -(2**31)


def _keys(logits: Any, r: jax.Array) -> jax.Array:
    expert = jnp.arange(logits.shape[1])
    bits = lax.bitcast_convert_type(plt.load(logits.at[r, expert]), jnp.int16).astype(jnp.int32)
    return (_ordered(bits) << 16) | (_LAST - expert)


def _without(keys: jax.Array, one: jax.Array) -> jax.Array:
    return jnp.where(keys == one, _NONE, keys)


def _rest(keys: jax.Array) -> jax.Array:
    return _without(keys, jnp.max(keys))


def _expert(key: jax.Array) -> jax.Array:
    return _LAST - (key & _LAST)


def _logit(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_ordered(key >> 16) << 16, jnp.float32)


def _ordered(bits: jax.Array) -> jax.Array:
    """Sign and magnitude to two's complement and back."""
    return jnp.where(bits < 0, bits ^ 0x7FFF, bits)
