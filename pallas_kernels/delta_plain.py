"""Gated DeltaNet for pieces of 64 tokens in plain JAX: what `delta_chunk`'s kernels are held to.

The formulas are those of `pallas_kernels.delta_chunk`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_settle import gated
from pallas_kernels.delta_step import Dims, gates, unit
from pallas_kernels.rows import rowwise, sealed
from pallas_kernels.triangular import solve_unit_lower

CHUNK = 64
"""Tokens a piece."""


class Chunks(NamedTuple):
    """What the pieces of a call return.

    Attributes:
        y: `[P, 64, Hv·dv]` in the type of z, or in a form with E4M3 in float16: the input of the
            output projection; past `valid` meaningless.
        recurrent: `[Lg, R, Hv, dk, dv]`, with the state after the pieces at their snapshots, and
            after the last piece of each sequence at its slot; nothing is kept at scratch.
        conv: `[Lg, R, W-1, C]`, with the inputs of the convolution before what follows, likewise.
    """

    y: jax.Array
    recurrent: jax.Array
    conv: jax.Array


class Places(NamedTuple):
    """Where pieces lie in their sequences and in the pools; fields as in the state's `Pieces`.

    Attributes:
        slot: `[P]` int32.
        start: `[P]` int32.
        valid: `[P]` int32.
        source: `[P]` int32.
        snapshot: `[P]` int32.
    """

    slot: jax.Array
    start: jax.Array
    valid: jax.Array
    source: jax.Array
    snapshot: jax.Array


def continues(places: Places) -> jax.Array:
    """`[P]` bool: whether a piece continues the one before it."""
    return jnp.append(False, places.slot[1:] == places.slot[:-1])


class Memory(NamedTuple):
    """What is known after a piece: the convolution's last inputs `[W-1, C]`, the state."""

    conv: jax.Array
    recurrent: jax.Array


def reference(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    o_norm: jax.Array,
    layer: int,
    conv: jax.Array,
    recurrent: jax.Array,
    places: Places,
    *,
    scratch: int,
    eps: float,
) -> Chunks:
    """The same in plain JAX, piece by piece, in float32."""
    dims = Dims.of(recurrent, x)
    w = conv_weight[layer]
    own = A_log[layer], dt_bias[layer]
    g, beta = rowwise(lambda a, b: gates(a, b, *own), CHUNK, a, b)

    def advance(
        before: Memory,
        x: jax.Array,
        g: jax.Array,
        beta: jax.Array,
        goes_on: jax.Array,
        source: jax.Array,
        start: jax.Array,
        valid: jax.Array,
    ) -> tuple[Memory, jax.Array]:
        held = Memory(conv[layer, source], recurrent[layer, source])
        held = jax.tree.map(lambda a: jnp.where(start > 0, a, 0), held)
        memory = jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), before, held)
        return chunk(dims, w, memory, x, g, beta, valid)

    def step(before: Memory, piece: tuple) -> tuple[Memory, tuple[jax.Array, Memory]]:
        after, o = sealed(advance, before, *piece)
        return after, (o, after)

    nothing = Memory(jnp.zeros_like(conv[0, 0]), jnp.zeros_like(recurrent[0, 0]))
    goes_on = continues(places)
    pieces = (x, g, beta, goes_on, places.source, places.start, places.valid)
    _, (o, after) = lax.scan(step, nothing, pieces)
    ends = jnp.append(~goes_on[1:], True)
    for entry in (jnp.where(ends, places.slot, scratch), places.snapshot):
        recurrent = recurrent.at[layer, entry].set(after.recurrent)
        conv = conv.at[layer, entry].set(after.conv)
    y = rowwise(
        lambda o, z: gated(o, z, o_norm[layer], eps), CHUNK, o, z.reshape(*z.shape[:2], dims.Hv, -1)
    )
    return Chunks(y.reshape(z.shape), recurrent, conv)


def chunk(
    dims: Dims,
    w: jax.Array,
    memory: Memory,
    x: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    valid: jax.Array,
) -> tuple[Memory, jax.Array]:
    """One piece in plain JAX: the memory after its valid tokens, and the outputs `[64, Hv, dv]`.

    Args:
        dims: heads and widths.
        w: taps `[C, W]`.
        memory: what is known before it.
        x: inputs of the convolution `[64, C]`.
        g: log decay `[64, Hv]` float32.
        beta: write strength `[64, Hv]` float32.
        valid: tokens that are real.
    """
    taps = w.shape[1]
    rows = jnp.concatenate([memory.conv, x])
    wide, w = rows.astype(jnp.float32), w.astype(jnp.float32)
    mixed = sum(wide[i : i + CHUNK] * w[:, i] for i in range(taps))
    mixed = jax.nn.silu(mixed).astype(x.dtype).astype(jnp.float32)
    width = dims.Hk * dims.dk
    q, k, v = (
        part.reshape(CHUNK, heads, -1).swapaxes(0, 1)
        for part, heads in zip(
            jnp.split(mixed, (width, 2 * width), axis=1), (dims.Hk, dims.Hk, dims.Hv), strict=True
        )
    )
    q, k = (jnp.repeat(unit(part), dims.Hv // dims.Hk, axis=0) for part in (q, k))
    q = q * dims.dk**-0.5
    real = jnp.arange(CHUNK) < valid
    g, beta = (jnp.where(real, value.T, 0.0)[..., None] for value in (g, beta))

    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    total = product(lower.astype(jnp.float32), g)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = jnp.exp(jnp.where(lower, total - total.mT, -jnp.inf))
    wanted = beta * (v - jnp.exp(total) * product(k, memory.recurrent))
    fresh = solve_unit_lower(product(beta * k, k.mT) * decay, wanted)
    o = product(jnp.exp(total) * q, memory.recurrent) + product(product(q, k.mT) * decay, fresh)
    last = total[:, -1:]
    state = jnp.exp(last) * memory.recurrent + product((jnp.exp(last - total) * k).mT, fresh)
    conv = lax.dynamic_slice_in_dim(rows, valid, taps - 1)
    return Memory(conv, state), o.swapaxes(0, 1)
