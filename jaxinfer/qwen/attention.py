"""Gated full attention with partial, interleaved multimodal rotary embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.qwen.cache import Cache, Place
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import TRAIN, Mode
from jaxinfer.qwen.norms import rms_norm
from jaxinfer.qwen.params import Attention
from jaxinfer.qwen.products import add_product, form_after, normed_products
from pallas_kernels import each, rowwise, sealed
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention

BLOCK = 4 * CHUNK
"""Tokens of a sequence that are attended to together."""


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

    if mode.chunked and mode.impl("attention") == "kernel":
        # On a GPU each number is a thread's own: all at once, they are computed alike.
        cos, sin = sealed(angles, positions.reshape(-1, 3))
        return cos.reshape(*positions.shape[:2], half), sin.reshape(*positions.shape[:2], half)
    return rowwise(angles, mode.tile, positions)


def attention(
    p: Attention,
    layer: int,
    cfg: Config,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    cache: Cache,
    place: Place,
    mode: Mode,
) -> tuple[jax.Array, Cache]:
    """`x + o_proj(attend(norm(x)) · sigmoid(gate))`, and the cache with these tokens written.

    Args:
        p: stacked parameters.
        layer: index into their stack.
        cfg: the model.
        x: `[B, T, D]`; in chunked mode `T` is 64.
        turn: cosines and sines from `rotary`.
        cache: pages of all layers, and which of them this one uses.
        place: where these tokens stand.
        mode: see `Mode`.
    """
    B, T = x.shape[:2]
    projections = (p.q_proj, p.k_proj, p.v_proj)
    _, (q_gate, k, v) = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, mode)
    impl = mode.impl("attention")
    if impl != "plain":
        form = form_after(p.o_proj, layer, mode)
        kernel = prefill_attention if mode.chunked else paged_attention
        y, k, v = kernel(
            q_gate,
            k,
            v,
            *turn,
            p.q_norm,
            p.k_norm,
            layer,
            cache.layer,
            cache.k,
            cache.v,
            *place,
            eps=cfg.rms_norm_eps,
            impl=impl,
            form=form,
        )
        ready = form is not None
        return add_product(x, y, p.o_proj, layer, mode, ready), cache._replace(k=k, v=v)

    q, gate, k, v = rowwise(
        lambda *rows: _turned(p, layer, cfg, *rows), mode.tile, q_gate, k, v, *turn
    )
    cache = cache.write(place, k, v)

    # A piece, or a row, at a time: then the split of a prompt, or the drafts beside a token, cannot
    # show in its bits.
    together = T if mode.chunked else 1
    index = place.start[:, None] + jnp.arange(T)
    table = jnp.repeat(place.table, T // together, axis=0)
    o = each(
        lambda q, table, index: attend_pages(q, cache, table, index),
        mode.tile,
        q.reshape(-1, together, *q.shape[2:]),
        table,
        index.reshape(-1, together),
    )
    y = rowwise(_opened, mode.tile, o.reshape(B, T, -1), gate)
    return add_product(x, y, p.o_proj, layer, mode), cache


def attention_alone(
    p: Attention, layer: int, cfg: Config, x: jax.Array, turn: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """`attention` of whole sequences `[B, T, D]` from their beginning, without a cache."""
    projections = (p.q_proj, p.k_proj, p.v_proj)
    _, products = normed_products(x, p.norm, projections, layer, cfg.rms_norm_eps, TRAIN)
    q, gate, k, v = rowwise(lambda *rows: _turned(p, layer, cfg, *rows), None, *products, *turn)
    index = jnp.arange(x.shape[1])
    o = each(lambda q, k, v: attend(q, k, v, index), None, q, k, v)
    return add_product(x, _opened(o.reshape(gate.shape), gate), p.o_proj, layer, TRAIN)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array) -> jax.Array:
    """Causal attention of some tokens over their sequence; softmax in float32.

    Args:
        q: `[T, H, d]`; query head `h` reads key head `h // (H / Hkv)`.
        k: `[S, Hkv, d]`.
        v: the same.
        index: `[T]`, each token sees rows `0 … index`.

    Returns:
        `[T, H, d]` in the type of `q`.
    """
    scores = _scores(q, k, jnp.arange(k.shape[0]), index)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    o = jnp.einsum("tghs,sgd->tghd", weights, v, preferred_element_type=jnp.float32)
    return o.reshape(q.shape).astype(q.dtype)


def attend_pages(q: jax.Array, cache: Cache, table: jax.Array, index: jax.Array) -> jax.Array:
    """`attend` over the pages of a table `[M]`, `BLOCK` tokens at a time.

    The blocks are cut at fixed positions and added up from the first to the last, with the running
    maximum of a streamed softmax (Milakov and Gimelshein, 2018): blocks past `index` change no bit,
    so the size of the table does not show.
    """
    T, H, d = q.shape
    G = cache.k.shape[3]
    step = BLOCK // CHUNK
    table = jnp.pad(table, (0, -table.shape[0] % step))
    last = index[-1]

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, o = carry
        k, v = cache.read(lax.dynamic_slice_in_dim(table, number * step, step), q.dtype)
        places = number * BLOCK + jnp.arange(BLOCK)
        # What nobody has written may be anything, and nothing times infinity is not nothing.
        v = jnp.where((places <= last)[:, None, None], v, 0)
        scores = _scores(q, k, places, index)
        peak = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights, fade = jnp.exp(scores - peak[..., None]), jnp.exp(highest - peak)
        part = jnp.einsum(
            "tghs,sgd->tghd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        total = total * fade + jnp.sum(weights, axis=-1)
        return lax.optimization_barrier((peak, total, o * fade[..., None] + part))

    start = (
        jnp.full((T, G, H // G), -jnp.inf),
        jnp.zeros((T, G, H // G)),
        jnp.zeros((T, G, H // G, d)),
    )
    # A loop whose end depends on data makes a GPU's host wait at every turn.
    bound = last // BLOCK + 1 if jax.default_backend() == "cpu" else table.shape[0] // step
    _, total, o = lax.fori_loop(0, bound, block, start)
    return (o / total[..., None]).reshape(q.shape).astype(q.dtype)


def _scores(q: jax.Array, k: jax.Array, places: jax.Array, index: jax.Array) -> jax.Array:
    """`[T, Hkv, H/Hkv, S]` float32, minus infinity for keys at places after a token's index."""
    T, _, d = q.shape
    grouped = q.reshape(T, k.shape[1], -1, d)
    scores = jnp.einsum("tghd,sgd->tghs", grouped, k, preferred_element_type=jnp.float32)
    seen = places <= index[:, None]
    return jnp.where(seen[:, None, None], scores * d**-0.5, -jnp.inf)


def _turned(
    p: Attention,
    layer: int,
    cfg: Config,
    q_gate: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Projected rows -> q `[M, H, d]`, gate `[M, H·d]`, k and v `[M, Hkv, d]`."""
    M, d = k.shape[0], cfg.head_dim
    # q_proj holds query and gate side by side within each head.
    q, gate = jnp.split(q_gate.reshape(M, -1, 2 * d), 2, axis=-1)
    q = _turn(rms_norm(q, p.q_norm[layer], cfg.rms_norm_eps), cos, sin)
    k = _turn(rms_norm(k.reshape(M, -1, d), p.k_norm[layer], cfg.rms_norm_eps), cos, sin)
    return q, gate.reshape(M, -1), k, v.reshape(M, -1, d)


def _opened(o: jax.Array, gate: jax.Array) -> jax.Array:
    return o * jax.nn.sigmoid(gate)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first dimensions of each head, half against half; the rest pass through."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    turned = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate([t.astype(x.dtype) for t in turned] + [rest], axis=-1)
