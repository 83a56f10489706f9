"""Gated full attention with partial, interleaved multimodal rotary embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.mode import Mode
from jaxinfer.qwen.norms import rms_norm
from jaxinfer.qwen.params import Attention
from pallas_kernels import each, linear, rowwise


def rotary(cfg: Config, positions: jax.Array, mode: Mode) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[B, T, rotary_dim/2]` float32 for positions `[B, T, 3]` (T, H, W).

    Frequency `j` turns with the height for `j = 1, 4, 7, …`, with the width for `j = 2, 5, 8, …`
    (as many of each as `mrope_section` says), with the time otherwise.
    """
    half = cfg.rotary_dim // 2
    frequency = cfg.rope_theta ** (-2.0 * np.arange(half) / cfg.rotary_dim)
    axis = np.zeros(half, np.int32)
    for which in (1, 2):
        axis[which : 3 * cfg.mrope_section[which] : 3] = which

    def angles(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        angle = rows[:, axis].astype(jnp.float32) * frequency.astype(np.float32)
        return jnp.cos(angle), jnp.sin(angle)

    return rowwise(angles, mode.tile, positions)


def attention(
    p: Attention,
    layer: int,
    cfg: Config,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    k_cache: jax.Array,
    v_cache: jax.Array,
    start: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x + o_proj(attend(norm(x)) · sigmoid(gate))`, and the caches with this step's rows written.

    Args:
        p: stacked parameters.
        layer: index into their stack and into the caches.
        cfg: the model.
        x: `[B, T, D]`.
        turn: cosines and sines from `rotary`.
        k_cache: `[L, B, S, Hkv, d]`.
        v_cache: the same for values.
        start: `[B]`, index of the first of these tokens in its sequence; rows that fall past `S`
            are dropped.
        mode: see `Mode`.
    """
    B, T = x.shape[:2]
    index = start[:, None] + jnp.arange(T)
    q, gate, k, v = rowwise(
        lambda *rows: _project(p, layer, cfg, *rows), mode.tile, x, turn[0], turn[1]
    )
    where = (layer, jnp.arange(B)[:, None], index)
    k_cache = k_cache.at[where].set(k, mode="drop")
    v_cache = v_cache.at[where].set(v, mode="drop")

    # A chunk, or a row, at a time: then the split of a prompt, or the drafts beside a token, cannot
    # show in its bits.
    together = T if mode.tile is None else mode.tile if mode.chunked else 1

    def sequence(q: jax.Array, b: jax.Array, index: jax.Array) -> jax.Array:
        keys, values = _rows_of(k_cache, layer, b), _rows_of(v_cache, layer, b)
        pieces = q.reshape(-1, together, *q.shape[1:]), index.reshape(-1, together)
        o = each(lambda q, i: attend(q, keys, values, i), mode.tile, *pieces)
        return o.reshape(q.shape)

    o = each(sequence, mode.tile, q, jnp.arange(B), index)

    def output(x: jax.Array, o: jax.Array, gate: jax.Array) -> jax.Array:
        return x + linear(o * jax.nn.sigmoid(gate), p.o_proj, layer)

    return rowwise(output, mode.tile, x, o.reshape(B, T, -1), gate), k_cache, v_cache


def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array) -> jax.Array:
    """Causal attention of some tokens over their sequence's cache; softmax in float32.

    Args:
        q: `[T, H, d]`; query head `h` reads key head `h // (H / Hkv)`.
        k: `[S, Hkv, d]`.
        v: the same.
        index: `[T]`, each token sees cache rows `0 … index`.

    Returns:
        `[T, H, d]` in the type of `q`.
    """
    T, H, d = q.shape
    S, G = k.shape[:2]
    grouped = q.reshape(T, G, H // G, d)
    scores = jnp.einsum("tghd,sgd->tghs", grouped, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(S) <= index[:, None]
    scores = jnp.where(seen[:, None, None], scores * d**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    o = jnp.einsum("tghs,sgd->tghd", weights, v, preferred_element_type=jnp.float32)
    return o.reshape(T, H, d).astype(q.dtype)


def _project(
    p: Attention, layer: int, cfg: Config, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows `[M, D]` -> q `[M, H, d]`, gate `[M, H·d]`, k and v `[M, Hkv, d]`."""
    M, d = x.shape[0], cfg.head_dim
    h = rms_norm(x, p.norm[layer], cfg.rms_norm_eps)
    # q_proj holds query and gate side by side within each head.
    q, gate = jnp.split(linear(h, p.q_proj, layer).reshape(M, -1, 2 * d), 2, axis=-1)
    k = linear(h, p.k_proj, layer).reshape(M, -1, d)
    v = linear(h, p.v_proj, layer).reshape(M, -1, d)
    q = _turn(rms_norm(q, p.q_norm[layer], cfg.rms_norm_eps), cos, sin)
    k = _turn(rms_norm(k, p.k_norm[layer], cfg.rms_norm_eps), cos, sin)
    return q, gate.reshape(M, -1), k, v


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first dimensions of each head, half against half; the rest pass through."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    turned = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + [rest], axis=-1)


def _rows_of(cache: jax.Array, layer: int, b: jax.Array) -> jax.Array:
    return lax.dynamic_slice(cache, (layer, b, 0, 0, 0), (1, 1, *cache.shape[2:]))[0, 0]
