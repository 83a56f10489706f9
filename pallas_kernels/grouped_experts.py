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
2. `pallas_kernels.grouped_products` multiplies each tile with its expert's weights. The shared
   expert is one whose pairs are the rows.
3. `weighted_sum` gathers a row's pairs again.

No sum ever runs over rows, so the bits of a row do not depend on the others.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.grouped_products import LOW, Expert, both
from pallas_kernels.grouping import choose_experts, group
from pallas_kernels.matmul import Tiles, in_order, place
from pallas_kernels.routing import swiglu
from pallas_kernels.weights import Dense, Fp8, Nvfp4, Observed, Weight, linear

FEW = Tiles(rows=16, cols=64, depth=128, warps=4, stages=2)
SOME = Tiles(rows=32, cols=128, depth=128, warps=4, stages=3)
MANY = Tiles(rows=64, cols=128, depth=128, warps=4, stages=3)


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
    return FEW if each <= 8 else SOME if each <= 24 else MANY


def reference(
    h: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight, layer: int
) -> jax.Array:
    """See `grouped_experts`; every row through every expert."""
    stored = place(gate_up.inner if isinstance(gate_up, Observed) else gate_up, layer)[0]
    experts = _experts(stored)

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
    (up, a), (after, b) = place(gate_up, layer), place(down, layer)
    experts = _experts(up)
    tiles = tiles or choose_tiles(chosen.size, experts)
    groups = group(chosen, experts, tiles.rows, impl)
    routed = Expert(up, after, 0, in_order(h, type(up)), groups)
    (outer,) = both([routed], as_data(a, b), tiles, impl)
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
    placed = [place(w, layer) for w in (gate_up, down, shared.gate_up, shared.down)]
    stacks, at = zip(*placed, strict=True)
    # Numbers of layers as data: kernels are traced and compiled once for all of them.
    args = as_data(*at), h, logits, stacks, shared[:2], shared.x
    return _launch(*args, k=k, impl=impl, tiles=tiles)


@partial(jax.jit, static_argnames=("k", "impl", "tiles"))
def _launch(
    index: jax.Array,
    h: jax.Array,
    logits: jax.Array,
    stacks: tuple,
    beside: tuple[jax.Array, jax.Array],
    x: jax.Array,
    *,
    k: int,
    impl: Impl,
    tiles: Tiles | None,
) -> jax.Array:
    M, experts = logits.shape
    tiles = tiles or choose_tiles(M * k, experts)
    chosen, weights = choose_experts(logits, k, impl)
    groups = group(chosen, experts, tiles.rows, impl)
    h_shared, gate = beside
    up, down, shared_up, shared_down = stacks
    routed = Expert(up, down, 0, h, groups)
    shared = Expert(shared_up, shared_down, 2, h_shared, None)
    if tiles.rows <= LOW:
        one, outer = both([shared, routed], index, tiles, impl)
    else:
        # In kernels of their own: see `matmuls` for why products do not share one.
        (outer,) = both([routed], index, tiles, impl)
        (one,) = both([shared], index, MANY if M > 512 else FEW, impl)
    return _weighted_sum(outer, groups.place, weights, one, (gate, x), impl)


# --- back to rows ---------------------------------------------------------------------------------


def _weighted_sum(
    outer: jax.Array,
    where: jax.Array,
    weights: jax.Array,
    beside: jax.Array | None,
    residual: tuple[jax.Array, jax.Array] | None,
    impl: Impl,
) -> jax.Array:
    """Sorted pairs `[M·k, D]` -> each row's, weighted and added up: `[M, D]` float32.

    With a shared expert what it makes is added, and the sum to the residual stream; `residual` is
    the expert's gate and the stream.
    """
    (M, k), D = weights.shape, outer.shape[1]
    width = min(1024, D & -D)
    flat, tree = jax.tree.flatten((outer, where, weights, beside, residual))

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

    dtype = jnp.float32 if residual is None else residual[1].dtype
    return triton_call(
        body,
        *flat,
        grid=(D // width, M),
        out_shape=jax.ShapeDtypeStruct((M, D), dtype),
        impl=impl,
        name="weighted_sum",
    )


def _experts(w: Dense | Fp8 | Nvfp4) -> int:
    """How many there are in a stack `[L, E, …]`."""
    return (w.w if isinstance(w, Dense) else w.q).shape[1]
