"""The text encoder."""

import jax
import jax.numpy as jnp

from jaxinfer.sam.config import TextConfig
from jaxinfer.sam.layers import gelu, layer_norm, linear
from jaxinfer.sam.params import Attention, Text


def encode(p: Text, cfg: TextConfig, ids: jax.Array) -> jax.Array:
    """Ids `[P, T]` int32 to `[P, T, D]`; a token sees those before it, so padding is harmless."""
    length = ids.shape[1]
    if length > cfg.context:
        raise ValueError(f"a prompt has {length} tokens, the model takes {cfg.context}; cut it")
    x = p.tokens[ids] + p.positions[:length]
    for layer in p.blocks:
        h = layer_norm(x, layer.norm1)
        x = x + _attend(layer.attention, h, cfg.num_heads)
        x = x + linear(gelu(linear(layer_norm(x, layer.norm2), layer.fc1)), layer.fc2)
    return linear(layer_norm(x, p.norm), p.resizer)


def _attend(p: Attention, h: jax.Array, heads: int) -> jax.Array:
    """Attention of `[P, T, D]` to what stands before."""
    qkv = linear(h, p.in_proj)
    parts = jnp.moveaxis(qkv.reshape(*h.shape[:2], 3, heads, -1), 2, 0)
    out = jax.nn.dot_product_attention(*parts, is_causal=True, implementation="xla")
    return linear(out.reshape(h.shape), p.out_proj)
