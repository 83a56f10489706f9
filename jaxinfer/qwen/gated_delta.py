"""Gated DeltaNet: a causal convolution, then a matrix state that is decayed, corrected and read.

Per value head, with state `S [dk, dv]` in float32 and `α = exp(g)`:

    S ← α S;   S ← S + k ⊗ β (v − Sᵀ k);   o = Sᵀ q

(Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024). `recurrent` runs it
token by token, `chunk` for 64 tokens at once; they agree up to rounding.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import TRAIN, Mode
from jaxinfer.qwen.norms import gated_rms_norm, l2_normalise
from jaxinfer.qwen.params import GatedDelta
from jaxinfer.qwen.products import add_product, form_after, normed_products
from jaxinfer.qwen.state import Pieces, Rows, State
from pallas_kernels import each, rowwise, sealed
from pallas_kernels.delta_chunk import Places, delta_chunks
from pallas_kernels.delta_step import delta_step
from pallas_kernels.triangular import solve_unit_lower

# Without it float32 products run in TF32 on the GPU, and the state must not lose bits.
_EXACT = lax.Precision.HIGHEST


class Inputs(NamedTuple):
    """What the mixer's core is fed for `T` tokens of one sequence.

    Attributes:
        x: `[T, C]` inputs of the convolution (q, k, v side by side).
        g: `[T, Hv]` float32 log decay, at most 0.
        beta: `[T, Hv]` float32 write strength in (0, 1).
    """

    x: jax.Array
    g: jax.Array
    beta: jax.Array


class Memory(NamedTuple):
    """What the mixer's core remembers of one sequence.

    Attributes:
        conv: `[W-1, C]` last inputs of the convolution.
        recurrent: `[Hv, dk, dv]` float32.
    """

    conv: jax.Array
    recurrent: jax.Array


class Held(NamedTuple):
    """What a decode or verify step leaves of one layer for the next step; see `keep`.

    Attributes:
        conv: `[b, W-1, C]` last inputs of the convolution before the rows.
        x: `[b, T, C]` inputs of the convolution of the rows.
        g: `[b, T, Hv]` float32, their log decay.
        beta: `[b, T, Hv]` float32, their write strength.
    """

    conv: jax.Array
    x: jax.Array
    g: jax.Array
    beta: jax.Array


def gated_delta(
    p: GatedDelta,
    layer: int,
    cfg: Config,
    x: jax.Array,
    state: State,
    which: Pieces | Rows,
    mode: Mode,
) -> tuple[jax.Array, State, Held | None]:
    """`x + out_proj(mixer(norm(x)))` and the state after it.

    Args:
        p: stacked parameters.
        layer: index into their stack and into the state's.
        cfg: the model.
        x: `[B, T, D]`; `T` is 64 for pieces.
        state: of all sequences.
        which: pieces advance the state of their slots by their valid tokens; nothing may be pending
            there. Rows replay what is pending, leave the state there and become pending themselves.
        mode: see `Mode`.

    Returns:
        The rows, the state, and for rows what is still to be kept of them: once for all layers,
        since scattering a layer at a time costs more than the layer's arithmetic.
    """
    projections = (p.in_proj_qkv, p.in_proj_z, p.in_proj_b, p.in_proj_a)
    _, (qkv, z, b, a) = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, mode)
    if isinstance(which, Pieces):
        y, state = _pieces(p, layer, cfg, qkv, z, b, a, state, which, mode)
        held = None
    else:
        y, state, held = _rows(p, layer, cfg, qkv, z, b, a, state, which, mode)
    ready = mode.impl("delta") != "plain" and form_after(p.out_proj, layer, mode) is not None
    return add_product(x, y, p.out_proj, layer, mode, ready), state, held


def keep(state: State, rows: Rows, held: list[Held]) -> State:
    """The state with what each layer of a decode or verify step has left."""
    conv, x, g, beta = (jnp.stack(leaves) for leaves in zip(*held, strict=True))
    at = (slice(None), rows.slot, slice(0, x.shape[2]))
    return replace(
        state,
        conv=state.conv.at[:, rows.slot].set(conv),
        pending_x=state.pending_x.at[at].set(x),
        pending_g=state.pending_g.at[at].set(g),
        pending_beta=state.pending_beta.at[at].set(beta),
    )


def _pieces(
    p: GatedDelta,
    layer: int,
    cfg: Config,
    qkv: jax.Array,
    z: jax.Array,
    b: jax.Array,
    a: jax.Array,
    state: State,
    pieces: Pieces,
    mode: Mode,
) -> tuple[jax.Array, State]:
    scratch = state.pending.shape[0] - 1
    ends = jnp.append(pieces.slot[1:] != pieces.slot[:-1], True)
    entries = (jnp.where(ends, pieces.slot, scratch), pieces.snapshot)
    impl = mode.impl("delta")
    if impl != "plain":
        places = Places(pieces.slot, pieces.start, pieces.valid, pieces.source, pieces.snapshot)
        y, recurrent, conv = delta_chunks(
            qkv,
            a,
            b,
            z,
            *(p.conv1d, p.A_log, p.dt_bias, p.o_norm),
            layer,
            state.conv,
            state.recurrent,
            places,
            scratch=scratch,
            eps=cfg.rms_norm_eps,
            impl=impl,
            form=form_after(p.out_proj, layer, mode),
        )
        return y, replace(state, conv=conv, recurrent=recurrent)
    inputs = rowwise(lambda *rows: _gated(p, layer, *rows), mode.tile, qkv, b, a)
    o, after = _piece_by_piece(cfg, p.conv1d[layer], layer, state, inputs, pieces)
    conv, recurrent = state.conv, state.recurrent
    for entry in entries:
        conv = conv.at[layer, entry].set(after.conv)
        recurrent = recurrent.at[layer, entry].set(after.recurrent)
    return _gate(p, layer, cfg, o, z, mode), replace(state, conv=conv, recurrent=recurrent)


def _rows(
    p: GatedDelta,
    layer: int,
    cfg: Config,
    qkv: jax.Array,
    z: jax.Array,
    b: jax.Array,
    a: jax.Array,
    state: State,
    rows: Rows,
    mode: Mode,
) -> tuple[jax.Array, State, Held]:
    impl = mode.impl("delta")
    if impl != "plain":
        step = delta_step(
            qkv,
            a,
            b,
            z,
            *(p.conv1d, p.A_log, p.dt_bias, p.o_norm),
            layer,
            *(state.conv, state.recurrent),
            *(state.pending_x, state.pending_g, state.pending_beta, state.pending),
            rows.slot,
            eps=cfg.rms_norm_eps,
            impl=impl,
            form=form_after(p.out_proj, layer, mode),
        )
        state = replace(state, recurrent=step.recurrent)
        return step.y, state, Held(step.conv, qkv, step.g, step.beta)
    inputs = rowwise(lambda *rows: _gated(p, layer, *rows), mode.tile, qkv, b, a)
    w = p.conv1d[layer]

    def run(slot: jax.Array, new: Inputs) -> tuple[jax.Array, Memory]:
        memory = Memory(state.conv[layer, slot], state.recurrent[layer, slot])
        last = (state.pending_x, state.pending_g, state.pending_beta)
        last = Inputs(*(a[layer, slot] for a in last))
        return _replay_then_run(cfg, w, memory, last, state.pending[slot], new)

    o, memory = each(run, mode.tile, rows.slot, inputs)
    recurrent = state.recurrent.at[layer, rows.slot].set(memory.recurrent)
    held = Held(memory.conv, inputs.x, inputs.g, inputs.beta)
    return _gate(p, layer, cfg, o, z, mode), replace(state, recurrent=recurrent), held


def gated_delta_alone(p: GatedDelta, layer: int, cfg: Config, x: jax.Array) -> jax.Array:
    """`gated_delta` of whole sequences `[B, T, D]` from their beginning; `T` a multiple of 64."""
    projections = (p.in_proj_qkv, p.in_proj_z, p.in_proj_b, p.in_proj_a)
    _, (qkv, z, b, a) = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, TRAIN)
    inputs = rowwise(lambda *rows: _gated(p, layer, *rows), None, qkv, b, a)
    w = p.conv1d[layer]
    heads, dk = cfg.linear_num_value_heads, cfg.linear_key_head_dim
    memory = Memory(
        jnp.zeros((w.shape[1] - 1, w.shape[0]), x.dtype),
        jnp.zeros((heads, dk, cfg.linear_value_head_dim), jnp.float32),
    )
    valid = jnp.int32(x.shape[1])
    o = each(lambda new: _chunks(cfg, w, memory, new, valid)[0], None, inputs)
    return add_product(x, _gate(p, layer, cfg, o, z, TRAIN), p.out_proj, layer, TRAIN)


def _gated(p: GatedDelta, layer: int, qkv: jax.Array, b: jax.Array, a: jax.Array) -> Inputs:
    """Projected rows -> the core's inputs."""
    b, a = b.astype(jnp.float32), a.astype(jnp.float32)
    decay = -jnp.exp(p.A_log[layer].astype(jnp.float32))
    g = decay * jax.nn.softplus(a + p.dt_bias[layer].astype(jnp.float32))
    return Inputs(qkv, g, jax.nn.sigmoid(b))


def _gate(
    p: GatedDelta, layer: int, cfg: Config, o: jax.Array, z: jax.Array, mode: Mode
) -> jax.Array:
    """Outputs of the core `[B, T, Hv, dv]` and the gate `[B, T, Hv·dv]` -> rows for `out_proj`."""

    def rows(o: jax.Array, z: jax.Array) -> jax.Array:
        y = gated_rms_norm(o, p.o_norm[layer], z.reshape(o.shape), cfg.rms_norm_eps)
        return y.reshape(z.shape)

    return rowwise(rows, mode.tile, o, z)


def _heads(cfg: Config, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolved rows `[T, C]` -> q, k `[T, Hv, dk]` (normalised, q scaled) and v `[T, Hv, dv]`.

    Value head `h` uses query/key head `h // (Hv / Hk)`. All float32.
    """
    T, repeat = mixed.shape[0], cfg.linear_num_value_heads // cfg.linear_num_key_heads
    q, k, v = jnp.split(mixed, (cfg.key_dim, 2 * cfg.key_dim), axis=-1)
    q, k = (
        jnp.repeat(l2_normalise(a.reshape(T, -1, cfg.linear_key_head_dim)), repeat, axis=1)
        for a in (q, k)
    )
    v = v.reshape(T, -1, cfg.linear_value_head_dim).astype(jnp.float32)
    return q * cfg.linear_key_head_dim**-0.5, k, v


def _convolve(w: jax.Array, rows: jax.Array) -> jax.Array:
    """Causal depthwise convolution and silu: rows `[W-1+T, C]`, taps `[C, W]` -> `[T, C]`.

    The last tap multiplies the current token.
    """
    taps = w.shape[1]
    T = rows.shape[0] - taps + 1
    w = w.astype(jnp.float32)
    y = sum(rows[i : i + T].astype(jnp.float32) * w[:, i] for i in range(taps))
    return jax.nn.silu(y).astype(rows.dtype)


def recurrent(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: state `[H, dk, dv]`, q and k `[H, dk]`, v `[H, dv]`, g and beta `[H]`.

    Returns the next state and the output `[H, dv]`, all float32.
    """
    state = state * jnp.exp(g)[:, None, None]
    read = jnp.einsum("hkv,hk->hv", state, k, precision=_EXACT)
    delta = beta[:, None] * (v - read)
    state = state + k[:, :, None] * delta[:, None, :]
    return state, jnp.einsum("hkv,hk->hv", state, q, precision=_EXACT)


def _replay_then_run(
    cfg: Config, w: jax.Array, memory: Memory, last: Inputs, accepted: jax.Array, new: Inputs
) -> tuple[jax.Array, Memory]:
    """Advance over the accepted rows of the last step, then run the new rows from there.

    Returns outputs `[T, Hv, dv]` of the new rows, and the memory *before* them.
    """
    taps, pending = w.shape[1], last.x.shape[0]

    # One loop for both: a row replayed must leave the state that it left when it was run.
    def step(carry: tuple[jax.Array, jax.Array], row: tuple[jax.Array, ...]):
        return sealed(advance, *carry, *row)

    def advance(
        state: jax.Array,
        before: jax.Array,
        number: jax.Array,
        window: jax.Array,
        g: jax.Array,
        beta: jax.Array,
    ):
        q, k, v = _heads(cfg, _convolve(w, window))
        after, o = recurrent(state, q[0], k[0], v[0], g, beta)
        is_new = number >= pending
        state = jnp.where(is_new | (number < accepted), after, state)
        return (state, jnp.where(is_new, before, state)), o

    history = jnp.concatenate([memory.conv, last.x])
    conv = lax.dynamic_slice_in_dim(history, accepted, taps - 1)
    windows = [_windows(x, taps) for x in (history, jnp.concatenate([conv, new.x]))]
    gates = [jnp.concatenate(pair) for pair in ((last.g, new.g), (last.beta, new.beta))]
    rows = (jnp.arange(gates[0].shape[0]), jnp.concatenate(windows), *gates)
    (_, before), o = lax.scan(step, (memory.recurrent, memory.recurrent), rows)
    return o[pending:], Memory(conv, before)


def _windows(rows: jax.Array, taps: int) -> jax.Array:
    """`[W-1+T, C]` -> `[T, W, C]`: for each token the inputs that its convolution sees."""
    count = rows.shape[0] - taps + 1
    return jnp.stack([rows[i : i + count] for i in range(taps)], axis=1)


def _piece_by_piece(
    cfg: Config, w: jax.Array, layer: int, state: State, inputs: Inputs, pieces: Pieces
) -> tuple[jax.Array, Memory]:
    """`_chunks` for one piece after another, so that the split of a prompt cannot show.

    Returns outputs `[P, 64, Hv, dv]` and the memory after each piece `[P, …]`.
    """
    same = pieces.slot[1:] == pieces.slot[:-1]
    goes_on = jnp.concatenate([jnp.zeros(1, bool), same])

    def step(before: Memory, piece: tuple) -> tuple[Memory, tuple[jax.Array, Memory]]:
        return sealed(advance, before, *piece)

    def advance(
        before: Memory,
        new: Inputs,
        goes_on: jax.Array,
        source: jax.Array,
        start: jax.Array,
        valid: jax.Array,
    ) -> tuple[Memory, tuple[jax.Array, Memory]]:
        held = Memory(state.conv[layer, source], state.recurrent[layer, source])
        held = jax.tree.map(lambda a: jnp.where(start > 0, a, 0), held)
        memory = jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), before, held)
        o, after = _chunks(cfg, w, memory, new, valid)
        return after, (o, after)

    nothing = Memory(jnp.zeros_like(state.conv[0, 0]), jnp.zeros_like(state.recurrent[0, 0]))
    rows = (inputs, goes_on, pieces.source, pieces.start, pieces.valid)
    return lax.scan(step, nothing, rows)[1]


def _chunks(
    cfg: Config, w: jax.Array, memory: Memory, new: Inputs, valid: jax.Array
) -> tuple[jax.Array, Memory]:
    """Run `T` tokens, a multiple of 64, of which the first `valid` are real.

    Returns outputs `[T, Hv, dv]` (past `valid` meaningless) and the memory after `valid` tokens.
    """
    T, taps = new.x.shape[0], w.shape[1]
    rows = jnp.concatenate([memory.conv, new.x])
    q, k, v = _heads(cfg, _convolve(w, rows))
    # A token with g = 0 and beta = 0 leaves the state as it is.
    real = (jnp.arange(T) < valid)[:, None]
    g, beta = jnp.where(real, new.g, 0.0), jnp.where(real, new.beta, 0.0)
    q, k, v, g, beta = (
        a.reshape(-1, CHUNK, *a.shape[1:]).swapaxes(1, 2) for a in (q, k, v, g, beta)
    )
    U, W = jax.vmap(chunk_corrections)(k, v, g, beta)
    state, o = lax.scan(lambda s, a: chunk(s, *a), memory.recurrent, (q, k, U, W, g))
    o = o.swapaxes(1, 2).reshape(T, *o.shape[1:2], -1)
    return o, Memory(lax.dynamic_slice_in_dim(rows, valid, taps - 1), state)


def chunk_corrections(
    k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the tokens of a chunk write, given that each corrects what those before it wrote.

    With `c` the running sum of `g` and `D_ij = exp(c_i − c_j)` for `i ≥ j`, solves
    `(I + A) [U W] = β [V  e^c K]` where `A` is the strictly lower part of `β K Kᵀ ∘ D` (Yang et al.
    2024, section 3.3). It does not need the state, so all chunks of a prompt are solved at once.

    Args:
        k: `[H, C, dk]`.
        v: `[H, C, dv]`.
        g: `[H, C]`.
        beta: `[H, C]`.

    Returns:
        U `[H, C, dv]` and W `[H, C, dk]`, float32.
    """
    among = jnp.einsum("hid,hjd->hij", k * beta[..., None], k, precision=_EXACT) * _decay(g)
    past = k * (beta * jnp.exp(_running_sum(g)))[..., None]
    right = jnp.concatenate([v * beta[..., None], past], axis=-1)
    solved = solve_unit_lower(among, right)
    return solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]


def chunk(
    state: jax.Array, q: jax.Array, k: jax.Array, U: jax.Array, W: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`C` tokens at once: `V' = U − W S`, `O = e^c Q S + (Q Kᵀ ∘ D) V'`.

    Then `S ← e^{c_last} S + Kᵀ e^{c_last − c} V'`; see `chunk_corrections` for the symbols.

    Args:
        state: `[H, dk, dv]`.
        q: `[H, C, dk]`.
        k: `[H, C, dk]`.
        U: `[H, C, dv]`.
        W: `[H, C, dk]`.
        g: `[H, C]`.

    Returns:
        The next state and outputs `[H, C, dv]`, float32.
    """
    total = _running_sum(g)
    fresh = U - jnp.einsum("hck,hkv->hcv", W, state, precision=_EXACT)
    o = jnp.einsum("hck,hkv->hcv", q * jnp.exp(total)[..., None], state, precision=_EXACT)
    scores = jnp.einsum("hid,hjd->hij", q, k, precision=_EXACT) * _decay(g)
    o = o + jnp.einsum("hij,hjv->hiv", scores, fresh, precision=_EXACT)
    left = jnp.exp(total[:, -1:] - total)[..., None]
    state = state * jnp.exp(total[:, -1])[:, None, None]
    return state + jnp.einsum("hck,hcv->hkv", k * left, fresh, precision=_EXACT), o


def _running_sum(g: jax.Array) -> jax.Array:
    """Inclusive sums along `[H, C]`, as a product: XLA would fuse a cumsum into all its readers."""
    return jnp.einsum("hj,ij->hi", g, jnp.tril(jnp.ones((g.shape[1],) * 2)), precision=_EXACT)


def _decay(g: jax.Array) -> jax.Array:
    """`[H, C]` -> `D [H, C, C]`: how much of what token j wrote is left when token i reads."""
    total = _running_sum(g)
    lower = jnp.tril(jnp.ones((g.shape[1],) * 2, bool))
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    return jnp.exp(jnp.where(lower, total[:, :, None] - total[:, None, :], -jnp.inf))
