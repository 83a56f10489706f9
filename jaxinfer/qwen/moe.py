"""Mixture of experts: a router, `k` of `E` experts a token, and a gated shared expert."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.mode import Mode
from jaxinfer.qwen.params import Moe
from jaxinfer.qwen.products import form, normed_products
from pallas_kernels import Dense, Impl, Observed, dequantise, each, linear, rowwise, take
from pallas_kernels.experts import Layer, experts
from pallas_kernels.grouped_experts import Shared, all_experts
from pallas_kernels.matmul import matmuls, place
from pallas_kernels.normed import Form, normed
from pallas_kernels.normed_rows import normed_rows
from pallas_kernels.routing import route, swiglu


def moe(p: Moe, layer: int, cfg: Config, x: jax.Array, mode: Mode) -> jax.Array:
    """`x + routed(h) + sigmoid(h · gate) · shared(h)` with `h = norm(x)`, for `x [B, T, D]`."""
    impl = mode.impl("experts") if _fit(p, layer) else "plain"
    if impl != "plain":
        return (_many_rows if mode.chunked else _few_rows)(p, layer, cfg, x, impl)
    projections = (p.router, p.shared_gate)
    h, (logits, gate) = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, mode)
    chosen, weights, shared = rowwise(
        lambda *rows: _front(p, layer, cfg, *rows), mode.tile, h, logits, gate
    )
    if mode.tile is None:
        routed = rowwise(lambda *a: _all_at_once(p, layer, cfg, *a), None, h, chosen, weights)
    elif mode.chunked:
        routed = rowwise(
            lambda *a: _expert_by_expert(p, layer, cfg, *a), mode.tile, h, chosen, weights
        )
    else:
        routed = rowwise(lambda *a: _row_by_row(p, layer, mode, *a), None, h, chosen, weights)
    return x + (routed + shared).astype(x.dtype)


def _fit(p: Moe, layer: int) -> bool:
    """Whether the kernels take these formats: experts' inputs stay as they are, routers too."""
    experts = (p.gate_up, p.down, p.shared_gate_up, p.shared_down)
    if any(isinstance(w, Observed) for w in (*experts, p.router, p.shared_gate)):
        return False
    routers = (place(w, layer)[0] for w in (p.router, p.shared_gate))
    return all(form(w, layer).scale is None for w in experts) and all(
        isinstance(w, Dense) for w in routers
    )


def _few_rows(p: Moe, layer: int, cfg: Config, x: jax.Array, impl: Impl) -> jax.Array:
    """Each row through its own experts, all rows in the same few kernels."""
    rows, k = x.reshape(-1, x.shape[-1]), cfg.num_experts_per_tok
    forms = [form(w, layer) for w in (p.gate_up, p.shared_gate_up)]
    small = [place(w, layer) for w in (p.router, p.shared_gate)]
    first = normed(rows, p.norm, layer, forms, small, eps=cfg.rms_norm_eps, impl=impl)
    (h, h_shared), (logits, gate) = first
    weights = Layer(p.gate_up, p.shared_gate_up, p.down, p.shared_down)
    y = experts(rows, h, h_shared, logits, gate, weights, layer, k, impl=impl)
    return y.reshape(x.shape)


def _many_rows(p: Moe, layer: int, cfg: Config, x: jax.Array, impl: Impl) -> jax.Array:
    """All rows through every expert that one of them was sent to."""
    rows = x.reshape(-1, x.shape[-1])
    kinds = [Dense, *(type(place(w, layer)[0]) for w in (p.gate_up, p.shared_gate_up))]
    forms = {kind: Form(kind) for kind in kinds}
    eps = cfg.rms_norm_eps
    made = normed_rows(rows, p.norm, layer, list(forms.values()), eps=eps, impl=impl)
    h = dict(zip(forms, made, strict=True))
    small = [p.router, p.shared_gate]
    logits, gate = matmuls([h[Dense]] * 2, small, layer, dtype=x.dtype, impl=impl)
    shared = Shared(h[kinds[2]], gate, p.shared_gate_up, p.shared_down, rows)
    k = cfg.num_experts_per_tok
    y = all_experts(h[kinds[1]], logits, p.gate_up, p.down, shared, layer, k, impl=impl)
    return y.reshape(x.shape)


def _front(
    p: Moe, layer: int, cfg: Config, h: jax.Array, logits: jax.Array, gate: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normed rows -> chosen experts, their weights, the shared expert's part in float32."""
    chosen, weights = route(logits, cfg.num_experts_per_tok)
    shared = linear(swiglu(linear(h, p.shared_gate_up, layer)), p.shared_down, layer)
    return chosen, weights, jax.nn.sigmoid(gate.astype(jnp.float32)) * shared.astype(jnp.float32)


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
    inner = swiglu(jnp.einsum("md,end->men", h, up))
    inner = inner * _shares(cfg, chosen, weights)[..., None].astype(h.dtype)
    return jnp.einsum("mei,edi->md", inner, down, preferred_element_type=jnp.float32)


def _shares(cfg: Config, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    """Chosen experts and weights `[M, k]` -> weight of every expert `[M, E]`."""
    one_hot = chosen[..., None] == jnp.arange(cfg.num_experts)
    return jnp.sum(jnp.where(one_hot, weights[..., None], 0.0), axis=1)


def _expert(p: Moe, layer: int, expert: jax.Array, h: jax.Array) -> jax.Array:
    """Rows through one expert; float32."""
    inner = swiglu(linear(h, p.gate_up, (layer, expert)))
    return linear(inner, p.down, (layer, expert)).astype(jnp.float32)
