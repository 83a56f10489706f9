"""Mixture of experts: a router, `k` of `E` experts a token, and a gated shared expert."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.mode import Mode
from jaxinfer.qwen.norms import rms_norm
from jaxinfer.qwen.params import Moe
from pallas_kernels import dequantise, each, linear, rowwise, take


def moe(p: Moe, layer: int, cfg: Config, x: jax.Array, mode: Mode) -> jax.Array:
    """`x + routed(h) + sigmoid(h · gate) · shared(h)` with `h = norm(x)`, for `x [B, T, D]`."""
    h, chosen, weights, shared = rowwise(lambda rows: _front(p, layer, cfg, rows), mode.tile, x)
    if mode.tile is None:
        routed = rowwise(lambda *a: _all_at_once(p, layer, cfg, *a), None, h, chosen, weights)
    elif mode.chunked:
        routed = rowwise(
            lambda *a: _expert_by_expert(p, layer, cfg, *a), mode.tile, h, chosen, weights
        )
    else:
        routed = rowwise(lambda *a: _row_by_row(p, layer, mode, *a), None, h, chosen, weights)
    return x + (routed + shared).astype(x.dtype)


def route(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Router logits `[M, E]` -> experts `[M, k]` and weights `[M, k]` float32 that add up to one.

    Softmax over all experts, the `k` largest, renormalised.
    """
    top, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    return chosen, top / jnp.sum(top, axis=-1, keepdims=True)


def _front(
    p: Moe, layer: int, cfg: Config, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows -> normed rows, chosen experts, their weights, the shared expert's part in float32."""
    h = rms_norm(x, p.norm[layer], cfg.rms_norm_eps)
    chosen, weights = route(linear(h, p.router, layer), cfg.num_experts_per_tok)
    shared = linear(_swiglu(linear(h, p.shared_gate_up, layer)), p.shared_down, layer)
    gate = jax.nn.sigmoid(linear(h, p.shared_gate, layer).astype(jnp.float32))
    return h, chosen, weights, gate * shared.astype(jnp.float32)


def _row_by_row(
    p: Moe, layer: int, mode: Mode, h: jax.Array, chosen: jax.Array, weights: jax.Array
) -> jax.Array:
    """Each row through its own experts, in the order of the router's choice; reads no others."""

    def row(h: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        def add(total: jax.Array, one: tuple[jax.Array, jax.Array]):
            expert, weight = lax.optimization_barrier(one)
            return total + weight * _expert(p, layer, expert, h[None])[0], None

        return lax.scan(add, jnp.zeros(h.shape, jnp.float32), (chosen, weights))[0]

    return each(row, mode.tile, h, chosen, weights)


def _expert_by_expert(
    p: Moe, layer: int, cfg: Config, h: jax.Array, chosen: jax.Array, weights: jax.Array
) -> jax.Array:
    """All rows through every expert, one expert after another: each is read once."""
    share = _shares(cfg, chosen, weights)

    def add(expert: jax.Array, total: jax.Array) -> jax.Array:
        part = lax.dynamic_index_in_dim(share, expert, axis=1)
        y = _expert(p, layer, expert, h)
        return total + jnp.where(part > 0, part * y, 0.0)

    return lax.fori_loop(0, cfg.num_experts, add, jnp.zeros(h.shape, jnp.float32))


def _all_at_once(
    p: Moe, layer: int, cfg: Config, h: jax.Array, chosen: jax.Array, weights: jax.Array
) -> jax.Array:
    """All rows through every expert in two products, for gradients: nothing is sliced."""
    up, down = (dequantise(take(w, layer)).astype(h.dtype) for w in (p.gate_up, p.down))
    inner = _swiglu(jnp.einsum("md,end->men", h, up))
    inner = inner * _shares(cfg, chosen, weights)[..., None].astype(h.dtype)
    return jnp.einsum("mei,edi->md", inner, down, preferred_element_type=jnp.float32)


def _shares(cfg: Config, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    """Chosen experts and weights `[M, k]` -> weight of every expert `[M, E]`."""
    one_hot = chosen[..., None] == jnp.arange(cfg.num_experts)
    return jnp.sum(jnp.where(one_hot, weights[..., None], 0.0), axis=1)


def _expert(p: Moe, layer: int, expert: jax.Array, h: jax.Array) -> jax.Array:
    """Rows through one expert; float32."""
    inner = _swiglu(linear(h, p.gate_up, (layer, expert)))
    return linear(inner, p.down, (layer, expert)).astype(jnp.float32)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    """`silu(gate) · up` of rows whose first half is gate and second half up."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
