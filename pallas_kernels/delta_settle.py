"""The second kernel of a Gated DeltaNet step: the output norm, and rows that become pending.

    y = o / rms(o) · o_norm · silu(z)

of a head of a row a program. The programs of the first rows also leave the pools as the next step
of `pallas_kernels.delta_step` needs them, each for some channels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.normed import Form, form_type, store

Pools = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""`conv`, `pending_x`, `pending_g` and `pending_beta` of `delta_step`."""


def gated(o: jax.Array, z: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`o / rms(o) · scale · silu(z)` over the last axis, in the type of z."""
    mean = jnp.sum(o * o, axis=-1, keepdims=True) / o.shape[-1]
    scaled = o * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)
    return (scaled * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def settle(
    pools: Pools,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    o: jax.Array,
    z: jax.Array,
    o_norm: jax.Array,
    layer: int,
    pending: jax.Array,
    slot: jax.Array,
    *,
    eps: float,
    impl: Impl,
    form: Form | None,
    warps: int = 4,
) -> tuple[jax.Array, Pools]:
    """The output norm, and the pools with the new rows pending.

    Args:
        pools: see `Pools`; donate them.
        rows: what goes into the last three of the new rows.
        o: `[b, T, Hv·dv]` float32.
        z: the same, in the model's type.
        o_norm: `[Lg, dv]`.
        layer: which of the stacks.
        pending: as `delta_step` has it.
        slot: the same.
        eps: added to the mean square.
        impl: "kernel" or "interpret".
        form: in which what follows wants its inputs; None for as they are.
        warps: warps a program.

    Returns:
        `[b, T, Hv·dv]` in the type of z, or of the form; and the pools.
    """
    index, scales = as_data(layer, form.index if form else 0), form.scale if form else None
    given = index, pools, rows, (o, z, o_norm, scales), (pending, slot)
    kind = form.kind if form else None
    y, *pools_out = _launch(*given, kind=kind, eps=eps, impl=impl, warps=warps)
    return y, tuple(pools_out)


@partial(jax.jit, static_argnames=("kind", "eps", "impl", "warps"))
def _launch(
    index: jax.Array,
    pools: Pools,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    normed: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    whose: tuple[jax.Array, jax.Array],
    *,
    kind: type | None,
    eps: float,
    impl: Impl,
    warps: int,
) -> Any:
    """`index` says which layer, and which of the form's scales."""
    o, z, o_norm, scales = normed
    (seqs, T, width), dv = o.shape, o_norm.shape[-1]
    heads, (before, C), P = width // dv, pools[0].shape[2:], pools[1].shape[2]
    share = -(-C // heads)
    form = None if kind is None else Form(kind, scales)
    args, tree = jax.tree.flatten((pools, rows, index, normed, whose))

    def norm(at: Any, index: Any, given: Any, out: Any) -> None:
        (seq, t, head), (o, z, o_norm, scales) = at, given
        k = head * dv + jnp.arange(dv)[None]
        scale = plt.load(o_norm.at[index[0], jnp.arange(dv)]).astype(jnp.float32)
        y = gated(plt.load(o.at[seq, t, k]), plt.load(z.at[seq, t, k]), scale[None], eps)
        store(out, (seq, t), k, y, form, scales, index[1])

    def keep(at: Any, layer: Any, pools: Any, rows: Any, whose: Any, outs: Any) -> None:
        (seq, zero, head), (pending, slot) = at, whose
        slot, times = plt.load(slot.at[seq]), [zero + t for t in range(T)]
        accepted = jnp.clip(plt.load(pending.at[slot]), 0, P)
        within = jnp.arange(pl.next_power_of_2(share))
        channel = head * share + within
        mine = (within < share) & (channel < C)

        def last(number: jax.Array) -> jax.Array:
            """What the convolution looked back to so many rows after the first that it kept."""
            conv, pending_x = pools[:2]
            old = conv.at[layer, slot, jnp.minimum(number, before - 1), channel]
            new = pending_x.at[layer, slot, jnp.clip(number - before, 0, P - 1), channel]
            is_old, nothing = number < before, jnp.zeros((), conv.dtype)
            old = plt.load(old, mask=mine & is_old, other=nothing)
            return jnp.where(is_old, old, plt.load(new, mask=mine & ~is_old, other=nothing))

        x, *gates = rows
        window = [last(accepted + i) for i in range(before)]
        fresh = [plt.load(x.at[seq, t, channel], mask=mine, other=0.0) for t in times]
        if impl == "kernel":
            # What one thread overwrites another has read.
            plt.debug_barrier()
        conv, pending_x, *pending_gates = outs
        for i, values in enumerate(window):
            plt.store(conv.at[layer, slot, zero + i, channel], values, mask=mine)
        for t, values in zip(times, fresh, strict=True):
            plt.store(pending_x.at[layer, slot, t, channel], values, mask=mine)
            for gate, out in zip(gates, pending_gates, strict=True):
                plt.store(out.at[layer, slot, t, head], plt.load(gate.at[seq, t, head]))

    def body(*refs: Any) -> None:
        given, (out, *outs) = refs[: len(args)], refs[len(args) :]
        pools, rows, index, normed, whose = jax.tree.unflatten(tree, given)
        at = [pl.program_id(axis) for axis in range(3)]
        norm(at, index, normed, out)
        pl.when(at[1] == 0)(lambda: keep(at, index[0], pools, rows, whose, outs))

    shape = jax.ShapeDtypeStruct
    return triton_call(
        body,
        *args,
        grid=(seqs, T, heads),
        out_shape=(
            shape(z.shape, form_type(form, z.dtype)),
            *(shape(pool.shape, pool.dtype) for pool in pools),
        ),
        impl=impl,
        name="delta_settle",
        warps=warps,
        aliases={i: i + 1 for i in range(len(pools))},
    )
