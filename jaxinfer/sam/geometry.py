"""Geometry tokens: the class token, and the boxes that a prompt shows as examples.

Nothing in the model depends on the order of a prompt's tokens, so the class token stands in front.
"""

import math

import jax
import jax.numpy as jnp

from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import attend, feed_forward, layer_norm, linear, multi_head, part, stack
from jaxinfer.sam.params import Geometry
from jaxinfer.sam.positions import grid_sine, sine

BINS = 7
"""Cells along a side of what is pooled from a box."""


def tokens(
    p: Geometry,
    cfg: Config,
    x1: jax.Array,
    boxes: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Class token and boxes, `[P, 1 + N, D]`.

    `x1`: `[P, g, g, D]`, the picture of each prompt; `boxes`: `[P, N, 4]`, cx, cy, w, h as parts of
    the picture's sides; `labels`: `[P, N]`, 1 alike, 0 unlike; `mask`: `[P, N]`, True at boxes.
    """
    count = len(x1)
    cls = jnp.broadcast_to(p.cls.astype(x1.dtype), (count, 1, cfg.width))
    z = jnp.concatenate([cls, embed_boxes(p, cfg, x1, boxes, labels)], 1)
    z = layer_norm(linear(z, p.final), p.norm)
    seen = jnp.concatenate([jnp.ones((count, 1), bool), mask], 1)
    picture = x1.reshape(count, -1, cfg.width)
    placed = picture + grid_sine(x1.shape[1], cfg.width).astype(x1.dtype)
    # Of all layers at once.
    keys = linear(placed, stack([part(layer.cross_attention, 1) for layer in p.layers]))
    values = linear(picture, stack([part(layer.cross_attention, 2) for layer in p.layers]))
    heads = cfg.num_heads
    for i, layer in enumerate(p.layers):
        h = layer_norm(z, layer.norm1)
        z = z + multi_head(layer.self_attention, h, h, h, heads, seen)
        query = linear(layer_norm(z, layer.norm2), part(layer.cross_attention, 0))
        out = attend(query, keys, values, heads, first=(0, i, i))
        z = z + linear(out, layer.cross_attention.out_proj)
        z = z + feed_forward(layer_norm(z, layer.norm3), layer.linear1, layer.linear2)
    return layer_norm(z, p.output_norm)


def embed_boxes(
    p: Geometry, cfg: Config, x1: jax.Array, boxes: jax.Array, labels: jax.Array
) -> jax.Array:
    """What a box is, where it lies, what the picture holds there, and its label: `[P, N, D]`."""
    boxes = boxes.astype(jnp.float32)
    cx, cy, w, h = (boxes[..., i] for i in range(4))
    half = cfg.width // 2
    place = [sine(cy, half), sine(cx, half), h[..., None], w[..., None]]
    pooled = pool(layer_norm(x1, p.image_norm), boxes)
    embedded = (
        linear(boxes, p.box_direct)
        + linear(pooled.reshape(*boxes.shape[:2], BINS**2 * cfg.width), p.box_pool)
        + linear(jnp.concatenate(place, -1), p.box_positions)
        + p.labels[labels]
    )
    return embedded.astype(x1.dtype)


def pool(x: jax.Array, boxes: jax.Array) -> jax.Array:
    """RoIAlign of `[P, g, g, D]`, `[P, N, 4]` cx, cy, w, h to `[P, N, 7, 7, D]` float32.

    Each cell is the mean of samples of the picture, interpolated bilinearly: as many along each
    axis as the cell spans, rounded up (torchvision's `roi_align` with its defaults). Mean and
    interpolation both separate into rows and columns, so that it is two products of matrices.
    """
    grid = x.shape[1]
    cx, cy, w, h = (boxes[..., i] * grid for i in range(4))
    rows, columns = _pooling(cy, h, grid), _pooling(cx, w, grid)
    return jnp.einsum(
        "pniy,pnjx,pyxd->pnijd", rows, columns, x.astype(jnp.float32), precision="highest"
    )


def _pooling(centre: jax.Array, size: jax.Array, grid: int) -> jax.Array:
    """The share that each of `grid` pixels has in each cell along one axis, `[..., 7, grid]`."""
    start = centre - size / 2
    cell = jnp.maximum(size, 1)[..., None, None] / BINS
    count = jnp.ceil(cell)
    most = math.ceil(grid / BINS)
    sample = jnp.arange(most)
    at = start[..., None, None] + (jnp.arange(BINS)[:, None] + (sample + 0.5) / count) * cell
    inside = (sample < count) & (at >= -1) & (at <= grid)
    distance = jnp.abs(jnp.clip(at, 0, grid - 1)[..., None] - jnp.arange(grid))
    shares = jnp.maximum(1 - distance, 0) * inside[..., None]
    return shares.sum(-2) / count
