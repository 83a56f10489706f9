"""The mask head: one map of pixel features for a prompt, and one vector on it for each query."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import LAYER_NORM_EPS, convolve, layer_norm, multi_head, perceptron
from jaxinfer.sam.params import Masks, Norm

GROUPS = 8


def draw(
    p: Masks,
    cfg: Config,
    x4: jax.Array,
    x2: jax.Array,
    memory: jax.Array,
    prompt: jax.Array,
    mask: jax.Array,
    hidden: jax.Array,
) -> jax.Array:
    """Mask logits `[P, Q, 4g, 4g]` of queries `[P, Q, D]`.

    `x4`, `x2`: the neck's maps of each prompt's picture, `[P, 4g, 4g, D]` and `[P, 2g, 2g, D]`;
    `memory`: `[P, g², D]`; `prompt`: `[P, S, D]` and its `mask`.
    """
    h = layer_norm(memory, p.prompt_norm)
    y = memory + multi_head(p.prompt_attention, h, prompt, prompt, cfg.num_heads, mask)
    y = y.reshape(len(y), cfg.trunk.grid, cfg.trunk.grid, cfg.width)
    for finer, conv, norm in zip((x2, x4), p.convs, p.norms, strict=True):
        y = jax.nn.relu(group_norm(convolve(finer + enlarge(y), conv), norm))
    # The projection of the pixels, folded into the queries: E (W y + b) = (E W) y + E b.
    embedded = perceptron(hidden, p.embed)
    weight, bias = (a.astype(embedded.dtype) for a in (p.instance.weight, p.instance.bias))
    vectors = (embedded @ weight).astype(y.dtype)
    offset = (embedded @ bias).astype(y.dtype)
    return jnp.einsum("pqd,pyxd->pqyx", vectors, y) + offset[..., None, None]


def enlarge(x: jax.Array) -> jax.Array:
    """Every pixel four times, `[P, H, W, D]` to `[P, 2H, 2W, D]`."""
    return x.repeat(2, 1).repeat(2, 2)


def group_norm(x: jax.Array, p: Norm) -> jax.Array:
    """Normalise each of eight groups of channels over the whole map, `[P, H, W, D]`."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], GROUPS, -1)
    axes = (1, 2, 4)
    # Both sums in one pass: the map is large.
    mean, square = (a.mean(axes, keepdims=True) for a in (wide, jnp.square(wide)))
    scaled = (wide - mean) * lax.rsqrt(square - jnp.square(mean) + LAYER_NORM_EPS)
    return (scaled.reshape(x.shape) * p.weight + p.bias).astype(x.dtype)
