"""The text encoder."""

import jax
import jax.numpy as jnp

from jaxinfer.sam.config import TextConfig
from jaxinfer.sam.layers import gelu, layer_norm, linear, multi_head
from jaxinfer.sam.params import Text


def encode(p: Text, cfg: TextConfig, ids: jax.Array) -> jax.Array:
    """Ids `[P, T]` int32 to `[P, T, D]`; a token sees those before it, so padding is harmless."""
    length = ids.shape[1]
    if length > cfg.context:
        raise ValueError(f"a prompt has {length} tokens, the model takes {cfg.context}; cut it")
    x = p.tokens[ids] + p.positions[:length]
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    for layer in p.blocks:
        h = layer_norm(x, layer.norm1)
        x = x + multi_head(layer.attention, h, h, h, cfg.num_heads, causal)
        x = x + linear(gelu(linear(layer_norm(x, layer.norm2), layer.fc1)), layer.fc2)
    return linear(layer_norm(x, p.norm), p.resizer)
