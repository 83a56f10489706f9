"""The DETR decoder: queries that become objects, and one token that says whether there are any.

Its state is float32 throughout: a few hundred rows, whose boxes are refined from layer to layer.
Only attention to the picture is computed in the picture's type.
"""

import math

import jax
import jax.numpy as jnp

from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import feed_forward, layer_norm, linear, multi_head, perceptron
from jaxinfer.sam.params import Decoder, DecoderLayer, Scoring
from jaxinfer.sam.positions import sine
from jaxinfer.tree import tree

MAX_LOGIT = 12.0
"""Scores are clipped to this."""


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
    count, width = len(memory), cfg.width
    z = jnp.concatenate([p.presence_token, p.queries]).astype(jnp.float32)
    z = jnp.broadcast_to(z, (count, *z.shape))
    boxes = jax.nn.sigmoid(p.references.astype(jnp.float32))
    boxes = jnp.broadcast_to(boxes, (count, *boxes.shape))
    placed = memory + positions.astype(memory.dtype)
    prompt, seen = prompt.astype(jnp.float32), mask[:, None, None]
    hidden = z[:, 1:]
    for layer in p.layers:
        waves = sine(boxes[..., jnp.array([1, 0, 2, 3])], width // 2)
        where = perceptron(waves.reshape(count, -1, 2 * width), p.reference_head)
        where = jnp.pad(where, ((0, 0), (1, 0), (0, 0)))
        bias = box_bias(p, boxes, cfg.trunk.grid).astype(memory.dtype)
        z = _layer(layer, cfg, z, where, prompt, seen, placed, memory, bias)
        hidden = layer_norm(z[:, 1:], p.norm)
        boxes = jax.nn.sigmoid(_logit(boxes) + perceptron(hidden, p.box_head))
    presence = perceptron(layer_norm(z[:, 0], p.presence_norm), p.presence_head)
    return Decoded(hidden, boxes, presence[:, 0])


def _layer(
    p: DecoderLayer,
    cfg: Config,
    z: jax.Array,
    where: jax.Array,
    prompt: jax.Array,
    seen: jax.Array,
    placed: jax.Array,
    memory: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    heads = cfg.num_heads
    h = z + where
    z = layer_norm(z + multi_head(p.self_attention, h, h, z, heads), p.self_norm)
    out = multi_head(p.text_attention, z + where, prompt, prompt, heads, seen)
    z = layer_norm(z + out, p.text_norm)
    h = (z + where).astype(memory.dtype)
    z = layer_norm(
        z + multi_head(p.image_attention, h, placed, memory, heads, bias=bias), p.image_norm
    )
    return layer_norm(z + feed_forward(z, p.linear1, p.linear2), p.mlp_norm)


def box_bias(p: Decoder, boxes: jax.Array, grid: int) -> jax.Array:
    """How far each cell lies from a query's box, `[P, heads, 1 + Q, g²]` to add to the scores.

    The sum of a function of the row and one of the column; the presence token has none.
    """
    centre, size = boxes[..., :2], boxes[..., 2:]
    corners = jnp.stack([centre - size / 2, centre + size / 2], -1)
    cells = (jnp.arange(grid) / grid)[:, None]
    distance = 8 * (cells - corners[..., None, :])
    distance = jnp.sign(distance) * jnp.log2(jnp.abs(distance) + 1) / math.log2(8)
    columns = perceptron(distance[:, :, 0], p.bias_x)
    rows = perceptron(distance[:, :, 1], p.bias_y)
    bias = rows[:, :, :, None] + columns[:, :, None]
    bias = bias.reshape(*boxes.shape[:2], grid**2, -1).transpose(0, 3, 1, 2)
    return jnp.pad(bias, ((0, 0), (0, 0), (1, 0), (0, 0)))


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
