"""The DETR decoder: queries that become objects, and one token that says whether there are any.

Its state is float32 throughout: a few hundred rows, whose boxes are refined from layer to layer.
Attention is computed in the picture's type.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import (
    attend,
    feed_forward,
    layer_norm,
    linear,
    multi_head,
    on_gpu,
    part,
    perceptron,
    stack,
)
from jaxinfer.sam.params import Attention, Decoder, DecoderLayer, Scoring
from jaxinfer.sam.positions import sine
from jaxinfer.tree import tree
from pallas_kernels.box_bias import box_bias, fits

MAX_LOGIT = 12.0
"""Scores are clipped to this."""

ROWS = 8
"""Tokens of a prompt are a multiple of this. Of other numbers XLA would pad the inputs of every
product, and cut its results, since cuBLAS is slow with them."""


@tree
class Decoded:
    """`hidden`: `[P, Q, D]`; `boxes`: `[P, Q, 4]`, cx, cy, w, h; `presence`: `[P]`, a logit."""

    hidden: jax.Array
    boxes: jax.Array
    presence: jax.Array


def decode(
    p: Decoder,
    cfg: Config,
    memory: jax.Array,
    positions: jax.Array,
    prompt: jax.Array,
    mask: jax.Array,
) -> Decoded:
    """Objects from the memory `[P, T, D]`; see `encoder.encode` for the other arguments."""
    count, width, dtype = len(memory), cfg.width, memory.dtype
    queries = len(p.queries)
    # After the queries, some that nobody sees.
    more = ((0, -(1 + queries) % ROWS), (0, 0))
    z = jnp.concatenate([p.presence_token, jnp.pad(p.queries, more)]).astype(jnp.float32)
    seen = jnp.broadcast_to(jnp.arange(len(z)) <= queries, (count, len(z)))
    z = jnp.broadcast_to(z, (count, *z.shape))
    boxes = jax.nn.sigmoid(jnp.pad(p.references, more).astype(jnp.float32))
    boxes = jnp.broadcast_to(boxes, (count, *boxes.shape))
    # Of all layers at once.
    prompts = linear(prompt, stack([part(layer.text_attention, 1, 2) for layer in p.layers]))
    placed = memory + positions.astype(dtype)
    keys = linear(placed, stack([part(layer.image_attention, 1) for layer in p.layers]))
    values = linear(memory, stack([part(layer.image_attention, 2) for layer in p.layers]))
    hidden = z[:, 1:]
    for i, layer in enumerate(p.layers):
        placed_at = jnp.pad(boxes, ((0, 0), (1, 0), (0, 0)))
        waves = sine(placed_at[..., jnp.array([1, 0, 2, 3])], width // 2)
        where = perceptron(waves.reshape(count, -1, 2 * width).astype(dtype), p.reference_head)
        where = where.at[:, 0].set(0)  # The presence token has no place.
        text = partial(attend, key=prompts, value=prompts, seen=mask, first=(0, 2 * i, 2 * i + 1))
        bias = distances(p, boxes, cfg.trunk.grid, dtype)
        image = partial(attend, key=keys, value=values, bias=bias, first=(0, i, i))
        z = _layer(layer, cfg.num_heads, z, where, seen, text, image)
        hidden = layer_norm(z[:, 1:], p.norm)
        boxes = jax.nn.sigmoid(_logit(boxes) + perceptron(hidden, p.box_head))
    presence = perceptron(layer_norm(z[:, 0], p.presence_norm), p.presence_head)
    return Decoded(hidden[:, :queries], boxes[:, :queries], presence[:, 0])


def _layer(
    p: DecoderLayer,
    heads: int,
    z: jax.Array,
    where: jax.Array,
    seen: jax.Array,
    text: Callable[..., jax.Array],
    image: Callable[..., jax.Array],
) -> jax.Array:
    """A layer, given how a query attends to the prompt's tokens and to the picture's."""
    dtype = where.dtype

    def ask(p: Attention, z: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        query = linear((z + where).astype(dtype), part(p, 0))
        return linear(attend(query, heads=heads), p.out_proj)

    h = (z + where).astype(dtype)
    own = multi_head(p.self_attention, h, h, z.astype(dtype), heads, seen)
    z = layer_norm(z + own, p.self_norm)
    z = layer_norm(z + ask(p.text_attention, z, text), p.text_norm)
    z = layer_norm(z + ask(p.image_attention, z, image), p.image_norm)
    return layer_norm(z + feed_forward(z, p.linear1, p.linear2), p.mlp_norm)


def distances(p: Decoder, boxes: jax.Array, grid: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """How far rows and columns of cells lie from queries' boxes, see `box_bias`; for attention in
    `dtype`. The presence token has no box."""
    first, second = jax.tree.map(lambda *axes: jnp.stack(axes), p.bias_x, p.bias_y)
    kernel = on_gpu(dtype) and fits(*second.weight.shape[1:])
    columns, rows = box_bias(
        boxes,
        first.weight,
        first.bias,
        second.weight,
        second.bias,
        grid,
        impl="kernel" if kernel else "plain",
    )
    return rows, columns


def _logit(x: jax.Array) -> jax.Array:
    """Of a probability, kept from the ends."""
    return jnp.log(jnp.maximum(x, 1e-3) / jnp.maximum(1 - x, 1e-3))


def score(p: Scoring, hidden: jax.Array, prompt: jax.Array, mask: jax.Array) -> jax.Array:
    """How well queries `[P, Q, D]` fit the prompt `[P, S, D]`: logits `[P, Q]` float32."""
    prompt = prompt.astype(jnp.float32)
    prompt = layer_norm(prompt + feed_forward(prompt, p.prompt1, p.prompt2), p.prompt_norm)
    share = mask / mask.sum(1, keepdims=True)
    wanted = linear(jnp.einsum("ps,psd->pd", share, prompt), p.prompt_proj)
    logits = jnp.einsum("pqd,pd->pq", linear(hidden, p.query_proj), wanted)
    return jnp.clip(logits / math.sqrt(hidden.shape[-1]), -MAX_LOGIT, MAX_LOGIT)
