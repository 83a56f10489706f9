"""The DETR encoder: the picture's tokens attend to one another and to the prompt."""

import jax

from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import attend, feed_forward, layer_norm, linear, multi_head, part, stack
from jaxinfer.sam.params import CrossLayer


def encode(
    layers: tuple[CrossLayer, ...],
    cfg: Config,
    picture: jax.Array,
    positions: jax.Array,
    image: jax.Array,
    prompt: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """The memory `[P, T, D]`.

    `picture`: `[B, T, D]`; `positions`: `[T, D]`; `image`: `[P]`, the picture of each prompt;
    `prompt`: `[P, S, D]`; `mask`: `[P, S]`, True at tokens.
    """
    # Of all layers at once.
    prompts = linear(prompt, stack([part(layer.cross_attention, 1, 2) for layer in layers]))
    # Up to here prompts have no part in it: once a picture.
    x = attend_to_itself(layers[0], cfg, picture, positions)[image]
    for i, layer in enumerate(layers):
        x = attend_to_itself(layer, cfg, x, positions) if i else x
        query = linear(layer_norm(x, layer.norm2), part(layer.cross_attention, 0))
        place = 0, 2 * i, 2 * i + 1
        out = attend(query, prompts, prompts, cfg.num_heads, mask, first=place)
        x = x + linear(out, layer.cross_attention.out_proj)
        x = x + feed_forward(layer_norm(x, layer.norm3), layer.linear1, layer.linear2)
    return x


def attend_to_itself(p: CrossLayer, cfg: Config, x: jax.Array, positions: jax.Array) -> jax.Array:
    """The self-attention of a layer and its residual, `[B, T, D]`."""
    h = layer_norm(x, p.norm1)
    placed = h + positions.astype(h.dtype)
    return x + multi_head(p.self_attention, placed, placed, h, cfg.num_heads)
