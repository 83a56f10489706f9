"""Gated DeltaNet layers: norm, projections, the gated delta rule, projection.

The rule itself is in `pallas_kernels`, where plain JAX and kernels stand side by side: row by row
(`delta_step`) and 64 tokens at once (`delta_chunk`); they agree up to rounding.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import TRAIN, Mode
from jaxinfer.qwen.params import GatedDelta
from jaxinfer.qwen.products import add_product, form_after, normed_products
from jaxinfer.qwen.state import Pieces, Rows, State
from pallas_kernels import each
from pallas_kernels.delta_chunk import delta_chunks
from pallas_kernels.delta_plain import Memory, Places, chunk
from pallas_kernels.delta_settle import gated
from pallas_kernels.delta_step import Dims, delta_step, gates


def gated_delta(
    p: GatedDelta,
    layer: int,
    cfg: Config,
    x: jax.Array,
    state: State,
    which: Pieces | Rows,
    mode: Mode,
) -> tuple[jax.Array, State]:
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
    """
    projections = (p.in_proj_qkv, p.in_proj_z, p.in_proj_b, p.in_proj_a)
    _, (qkv, z, b, a) = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, mode)
    impl = mode.impl("delta")
    form = form_after(p.out_proj, layer, mode) if impl != "plain" else None
    inputs = (qkv, a, b, z, p.conv1d, p.A_log, p.dt_bias, p.o_norm, layer)
    memory = state.conv, state.recurrent
    if isinstance(which, Pieces):
        places = Places(which.slot, which.start, which.valid, which.source, which.snapshot)
        scratch = state.pending.shape[0] - 1
        how = {"scratch": scratch, "eps": cfg.rms_norm_eps, "form": form}
        y, recurrent, conv = delta_chunks(*inputs, *memory, places, impl=impl, **how)
        state = replace(state, conv=conv, recurrent=recurrent)
    else:
        pending = state.pending_x, state.pending_g, state.pending_beta, state.pending
        how = {"eps": cfg.rms_norm_eps, "form": form}
        step = delta_step(*inputs, *memory, *pending, which.slot, impl=impl, **how)
        y, state = step.y, replace(state, **step.pools())
    return add_product(x, y, p.out_proj, layer, mode, form is not None), state


def gated_delta_alone(p: GatedDelta, layer: int, cfg: Config, x: jax.Array) -> jax.Array:
    """`gated_delta` of whole sequences `[B, T, D]` from their beginning; `T` a multiple of 64."""
    projections = (p.in_proj_qkv, p.in_proj_z, p.in_proj_b, p.in_proj_a)
    _, (qkv, z, b, a) = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, TRAIN)
    g, beta = gates(a, b, p.A_log[layer], p.dt_bias[layer])
    w, heads = p.conv1d[layer], cfg.linear_num_value_heads
    dims = Dims(cfg.linear_num_key_heads, heads, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    nothing = Memory(
        jnp.zeros((w.shape[1] - 1, w.shape[0]), x.dtype),
        jnp.zeros((heads, dims.dk, dims.dv), jnp.float32),
    )

    def sequence(*rows: jax.Array) -> jax.Array:
        def step(memory: Memory, piece: tuple[jax.Array, ...]) -> tuple[Memory, jax.Array]:
            x, g, beta = piece
            return chunk(dims, w, memory, x, g, beta, jnp.int32(CHUNK))

        pieces = tuple(a.reshape(-1, CHUNK, *a.shape[1:]) for a in rows)
        return lax.scan(step, nothing, pieces)[1].reshape(x.shape[1], heads, -1)

    o = each(sequence, None, qkv, g, beta)
    y = gated(o, z.reshape(o.shape), p.o_norm[layer], cfg.rms_norm_eps)
    return add_product(x, y.reshape(z.shape), p.out_proj, layer, TRAIN)
