"""Gated DeltaNet for the rows of a decode or verify step.

Per value head, with the state `S [dk, dv]` in float32, for one row after another:

    q, k, v = silu(causal convolution of x), q and k of unit length, q times dk^-½
    α = exp(g), g = −exp(A_log) softplus(a + dt_bias), β = sigmoid(b)
    δ = β (v − α Sᵀk);   S ← α S + k ⊗ δ;   o = Sᵀq
    y = o / rms(o) · o_norm · silu(z)

(Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.) The state lags
behind: it is first advanced over the accepted ones of the last step's rows (`pending`), kept there,
and only then run over the new rows.

One program is some columns of the state of one value head of one sequence: it reads them once,
writes them once, and holds them in registers between. Lengths of q and k are sums over keys like
any other, and divide what is read and written. The kernel of `pallas_kernels.delta_settle` norms,
and makes the new rows the pending ones. Value head `h` uses query/key head `h // (Hv / Hk)`; the
`C` channels of the convolution are all q, all k, all v.
"""

from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.delta_settle import gated, settle
from pallas_kernels.normed import Form, formed
from pallas_kernels.rows import each, rowwise, sealed

L2_EPS = 1e-6
"""Added to the squared length of q and k before they are divided by it."""

ROW_TILE = 8
"""Rows that the plain path computes together, whatever their number."""


class Step(NamedTuple):
    """What a step returns: of the pools, the entries of this layer and these slots are new.

    Attributes:
        y: `[b, T, Hv·dv]` in the type of z, the input of the output projection.
        conv: `[Lg, R, W-1, C]` inputs of the convolution before the new rows.
        recurrent: `[Lg, R, Hv, dk, dv]`, advanced over the accepted pending rows; the new rows are
            not in it.
        pending_x: `[Lg, B, P, C]` of the new rows, and so the next two.
        pending_g: `[Lg, B, P, Hv]` float32.
        pending_beta: `[Lg, B, P, Hv]` float32.
    """

    y: jax.Array
    conv: jax.Array
    recurrent: jax.Array
    pending_x: jax.Array
    pending_g: jax.Array
    pending_beta: jax.Array

    def pools(self) -> dict[str, jax.Array]:
        """All but `y`, by name."""
        return {name: leaf for name, leaf in self._asdict().items() if name != "y"}


def delta_step(
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
    pending_x: jax.Array,
    pending_g: jax.Array,
    pending_beta: jax.Array,
    pending: jax.Array,
    slot: jax.Array,
    *,
    eps: float,
    impl: Impl,
    form: Form | None = None,
    warps: int = 4,
    tile_v: int = 64,
) -> Step:
    """Replay what is pending, leave the state there, run the new rows, which become pending.

    Slots must differ, but for one that nobody reads (scratch): rows that fill up a call share it.
    How many of the new rows are accepted is for the caller to say, in `pending` of the next step.

    Args:
        x: `[b, T, C]` inputs of the convolution.
        a: `[b, T, Hv]` decay before its gate.
        b: `[b, T, Hv]` write strength before its gate.
        z: `[b, T, Hv·dv]` output gate.
        conv_weight: `[Lg, C, W]`; the last tap multiplies the current token.
        A_log: `[Lg, Hv]`.
        dt_bias: `[Lg, Hv]`.
        o_norm: `[Lg, dv]`.
        layer: index into the stacks and pools.
        conv: `[Lg, R, W-1, C]` inputs of the convolution before the pending rows; donate it, and
            the next four.
        recurrent: `[Lg, R, Hv, dk, dv]` float32, before the pending rows.
        pending_x: `[Lg, B, P, C]` inputs of the convolution of the last step's rows, `P` at least
            `T`.
        pending_g: `[Lg, B, P, Hv]` float32, their log decay.
        pending_beta: `[Lg, B, P, Hv]` float32, their write strength.
        pending: `[B]` int32, how many of them were accepted.
        slot: `[b]` int32, entry of each sequence in the pools.
        eps: of the output norm.
        impl: how to run it.
        form: in which the output projection wants `y`; None for as it is.
        warps: warps a program; with more threads than `dk`, all of them load and convolve alike.
        tile_v: columns of the state a program.
    """
    weights = (conv_weight, A_log, dt_bias, o_norm)
    held = (conv, recurrent, pending_x, pending_g, pending_beta, pending, slot)
    if impl == "plain":
        step = _reference(x, a, b, z, *weights, layer, *held, eps=eps)
        return step if form is None else step._replace(y=formed(step.y, form))
    args = (as_data(layer, 0), x, a, b, conv_weight, A_log, dt_bias, *held)
    o, recurrent, g, beta = _advance(*args, impl=impl, warps=warps, tile_v=tile_v)
    pools, rows = (conv, pending_x, pending_g, pending_beta), (x, g, beta)
    y, (conv, *new) = settle(
        pools, rows, o, z, o_norm, layer, pending, slot, eps=eps, impl=impl, form=form
    )
    return Step(y, conv, recurrent, *new)


@partial(jax.jit, static_argnames=("impl", "warps", "tile_v"))
def _advance(*args: jax.Array, impl: Impl, warps: int, tile_v: int) -> tuple[jax.Array, ...]:
    _, x, _, _, _, _, _, _, recurrent, *_ = args
    dims = Dims.of(recurrent, x)
    seqs, T = x.shape[:2]
    tile_v = min(tile_v, dims.dv)
    shape = jax.ShapeDtypeStruct
    outs = (
        shape((seqs, T, dims.Hv * dims.dv), jnp.float32),
        shape(recurrent.shape, recurrent.dtype),
        shape((seqs, T, dims.Hv), jnp.float32),
        shape((seqs, T, dims.Hv), jnp.float32),
    )
    return triton_call(
        partial(_body, dims, tile_v, warps),
        *args,
        grid=(dims.Hv, dims.dv // tile_v, seqs),
        out_shape=outs,
        impl=impl,
        name="delta_step",
        warps=warps,
        aliases={8: 1},
    )


class Dims(NamedTuple):
    """Heads and widths: query/key heads, value heads, width of a key, of a value."""

    Hk: int
    Hv: int
    dk: int
    dv: int

    @staticmethod
    def of(recurrent: jax.Array, x: jax.Array) -> "Dims":
        """From the state `[..., Hv, dk, dv]` and the convolution's inputs `[..., C]`."""
        Hv, dk, dv = recurrent.shape[-3:]
        return Dims((x.shape[-1] - Hv * dv) // (2 * dk), Hv, dk, dv)

    def channels(self, head: Any, offset: Any = 0, width: int | None = None) -> tuple[Any, ...]:
        """Where value head `head` finds its q, k and (part of its) v among the channels."""
        key = head // (self.Hv // self.Hk) * self.dk
        value = 2 * self.Hk * self.dk + head * self.dv + offset
        return (
            pl.ds(key, self.dk),
            pl.ds(self.Hk * self.dk + key, self.dk),
            pl.ds(value, width or self.dv),
        )


def _body(dims: Dims, tile_v: int, warps: int, *refs: Any) -> None:
    (index, x, a, b, conv_weight, A_log, dt_bias), refs = refs[:7], refs[7:]
    (conv, recurrent, pending_x, pending_g, pending_beta, pending, slots), refs = refs[:7], refs[7:]
    y_out, recurrent_out, g_out, beta_out = refs
    head, tile, seq = (pl.program_id(axis) for axis in range(3))
    # Known to be small, its bits do not mix with a row's: rows of the state share one address.
    tile = jnp.minimum(tile, dims.dv // tile_v - 1)
    T, P, before = x.shape[1], pending_x.shape[2], conv.shape[2]
    at = [traced(i) for i in range(before + 1)]
    rows, columns = _places(dims, tile_v, warps)
    columns += tile * tile_v
    value = head * dims.dv + columns
    key = head // (dims.Hv // dims.Hk) * dims.dk + rows
    parts = key, dims.Hk * dims.dk + key, 2 * dims.Hk * dims.dk + value
    place = head, rows[:, None, :, None], columns[None, :, None, :]

    def where() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Layer, slot, sequence (plus a zero). Asked for anew in the loop: addresses that could be
        made before it would be kept in registers, and a third program would not fit beside two."""
        again = seq + plt.load(index.at[at[1]])
        return plt.load(index.at[at[0]]), plt.load(slots.at[seq]), again

    def parts_of(ref: Any, *lead: Any) -> tuple[jax.Array, ...]:
        return tuple(plt.load(ref.at[*lead, part]) for part in parts)

    def fetch(place: tuple, number: jax.Array, accepted: jax.Array) -> tuple[tuple, tuple]:
        """The pending and the new row that this number may mean; waits for nothing."""
        layer, slot, seq = place
        old, new = jnp.clip(number, 0, P - 1), jnp.clip(number - accepted, 0, T - 1)
        gate = tuple(plt.load(ref.at[layer, slot, old, head]) for ref in (pending_g, pending_beta))
        raw = tuple(plt.load(ref.at[seq, new, head]) for ref in (a, b))
        return (*parts_of(pending_x, layer, slot, old), *gate), (*parts_of(x, seq, new), *raw)

    def choose(is_new: jax.Array, old: tuple, new: tuple) -> tuple[tuple, tuple, tuple]:
        """q, k and v before their convolution, gates if pending, what they are made of if new."""
        inputs = zip(new[:3], old[:3], strict=True)
        return tuple(jnp.where(is_new, *pair) for pair in inputs), old[3:], new[3:]

    layer, slot, _ = where()
    taps = [
        tuple(plt.load(conv_weight.at[layer, part, at[tap]]) for part in parts)
        for tap in range(before + 1)
    ]
    log_a, bias = plt.load(A_log.at[layer, head]), plt.load(dt_bias.at[layer, head])
    accepted = jnp.clip(plt.load(pending.at[slot]), 0, P)
    state = plt.load(recurrent.at[layer, slot, *place])
    window = tuple(parts_of(conv, layer, slot, at[i]) for i in range(before))
    first = fetch((layer, slot, seq), at[0], at[0])

    def advance(number: jax.Array, carry: tuple) -> tuple:
        state, window, (row, gate, (raw_a, raw_b)) = carry
        layer, slot, seq = where()
        following = fetch((layer, slot, seq), number + 1, accepted)

        window = (*window, row)
        is_new = number >= accepted
        fresh = gates(raw_a, raw_b, log_a, bias)
        g, beta = (jnp.where(is_new, *pair) for pair in zip(fresh, gate, strict=True))

        def convolved(part: int) -> jax.Array:
            pairs = ((w[part], tap[part]) for w, tap in zip(window, taps, strict=True))
            terms = (w.astype(jnp.float32) * tap.astype(jnp.float32) for w, tap in pairs)
            return _activated(reduce(add, terms), x.dtype)

        def key_like(part: int) -> tuple[jax.Array, jax.Array]:
            """Laid out as the state is, and what makes its length one."""
            values = jnp.broadcast_to(convolved(part)[:, None, :, None], state.shape)
            return values, lax.rsqrt(_over_keys(values * values) + L2_EPS)

        k, unit_k = key_like(1)
        state = jnp.exp(g) * state
        written = beta * (convolved(2) - _over_keys(state * k) * unit_k)
        state += k * (unit_k * written)[None, :, None, :]

        @pl.when(is_new)
        def _() -> None:
            new = number - accepted
            q, unit_q = key_like(0)
            o = _over_keys(state * q) * (unit_q * dims.dk**-0.5)
            plt.store(y_out.at[seq, new, value], o)
            plt.store(g_out.at[seq, new, head], g)
            plt.store(beta_out.at[seq, new, head], beta)

        # Where nothing was accepted it is in place already.
        @pl.when(number == accepted - 1)
        def _() -> None:
            plt.store(recurrent_out.at[layer, slot, *place], state)

        return state, window[1:], choose(number + 1 >= accepted, *following)

    # One loop for both, with bounds known only when it runs: a row replayed must leave the state
    # that it left when it was run, whatever the number of rows the program was compiled for.
    lax.fori_loop(0, accepted + T, advance, (state, window, choose(accepted == 0, *first)))


def _places(dims: Dims, tile_v: int, warps: int) -> tuple[jax.Array, jax.Array]:
    """Rows `[dk / lanes, lanes]` and columns `[tile_v / width, width]` of a program's state.

    Triton gives out threads from the last axis on: with the state as `[dk / lanes, tile_v / width,
    lanes, width]` a warp holds whole columns, four neighbours a thread, and sums over its keys
    without the other warps.
    """
    width = min(max(tile_v // warps, 4), tile_v)
    lanes = min(max(32 * 4 // width, 1), dims.dk)
    rows = jnp.arange(dims.dk // lanes)[:, None] * lanes + jnp.arange(lanes)[None]
    columns = jnp.arange(tile_v // width)[:, None] * width + jnp.arange(width)[None]
    return rows, columns


def _over_keys(terms: jax.Array) -> jax.Array:
    """Sum over the keys of what is laid out as the state is; see `_places`."""
    return jnp.sum(jnp.sum(terms, axis=0), axis=1)


def traced(number: int) -> jax.Array:
    """A static index for use beside others: the interpreter takes no Python numbers there."""
    return number + 0 * pl.program_id(0)


def gates(
    a: jax.Array, b: jax.Array, A_log: jax.Array, dt_bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log decay `−exp(A_log) softplus(a + dt_bias)` and write strength `sigmoid(b)`, float32."""
    shifted = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    softplus = jnp.maximum(shifted, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(shifted)))
    return -jnp.exp(A_log.astype(jnp.float32)) * softplus, jax.nn.sigmoid(b.astype(jnp.float32))


def _convolved(window: jax.Array, taps: jax.Array) -> jax.Array:
    """Window and taps `[W, C]` -> `[C]` float32, rounded to the window's type as the model does."""
    return _activated(jnp.sum(window.astype(jnp.float32) * taps, axis=0), window.dtype)


def _activated(y: jax.Array, dtype: Any) -> jax.Array:
    return jax.nn.silu(y).astype(dtype).astype(jnp.float32)


def unit(x: jax.Array) -> jax.Array:
    """Rows of length one."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def _reference(
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
    pending_x: jax.Array,
    pending_g: jax.Array,
    pending_beta: jax.Array,
    pending: jax.Array,
    slot: jax.Array,
    *,
    eps: float,
) -> Step:
    """The same in plain JAX, sequence by sequence and row by row, state products in float32."""
    dims = Dims.of(recurrent, x)
    w = conv_weight[layer].astype(jnp.float32)
    P, before = pending_x.shape[2], conv.shape[2]
    own = A_log[layer], dt_bias[layer]
    g, beta = rowwise(lambda a, b: gates(a, b, *own), ROW_TILE, a, b)

    def heads(window: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixed = _convolved(window, w.T)
        q, k, v = jnp.split(mixed, (dims.Hk * dims.dk, 2 * dims.Hk * dims.dk))
        q, k = (
            jnp.repeat(unit(part.reshape(dims.Hk, -1)), dims.Hv // dims.Hk, axis=0)
            for part in (q, k)
        )
        return q * dims.dk**-0.5, k, v.reshape(dims.Hv, -1)

    def advance(
        state: jax.Array,
        kept: jax.Array,
        accepted: jax.Array,
        number: jax.Array,
        window: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q, k, v = heads(window)
        decayed = state * jnp.exp(g)[:, None, None]
        read = jnp.sum(decayed * k[:, :, None], axis=1)
        written = beta[:, None] * (v - read)
        after = decayed + k[:, :, None] * written[:, None, :]
        o = jnp.sum(after * q[:, :, None], axis=1)
        is_new = number >= P
        state = jnp.where(is_new | (number < accepted), after, state)
        return (state, jnp.where(is_new, kept, state)), o

    def run(slot: jax.Array, x: jax.Array, g: jax.Array, beta: jax.Array):
        accepted = pending[slot]
        history = jnp.concatenate([conv[layer, slot], pending_x[layer, slot]])
        left = lax.dynamic_slice_in_dim(history, accepted, before)
        rows = [
            jnp.concatenate(
                [_windows(r, before + 1) for r in (history, jnp.concatenate([left, x]))]
            ),
            jnp.concatenate([pending_g[layer, slot], g]),
            jnp.concatenate([pending_beta[layer, slot], beta]),
        ]
        state = recurrent[layer, slot]
        (_, state), o = lax.scan(
            lambda carry, row: sealed(advance, *carry, accepted, *row),
            (state, state),
            (jnp.arange(len(rows[1])), *rows),
        )
        return o[P:], state, left

    o, state, left = each(run, 1, slot, x, g, beta)
    y = rowwise(lambda o, z: gated(o, z, o_norm[layer], eps), ROW_TILE, o, z.reshape(o.shape))
    at = layer, slot, slice(0, x.shape[1])
    return Step(
        y.reshape(z.shape),
        conv.at[layer, slot].set(left),
        recurrent.at[layer, slot].set(state),
        pending_x.at[at].set(x),
        pending_g.at[at].set(g),
        pending_beta.at[at].set(beta),
    )


def _windows(rows: jax.Array, taps: int) -> jax.Array:
    """`[W-1+T, C]` -> `[T, W, C]`: for each row the inputs that its convolution sees."""
    count = rows.shape[0] - taps + 1
    return jnp.stack([rows[i : i + count] for i in range(taps)], axis=1)
