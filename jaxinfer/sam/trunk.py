"""The vision transformer.

Its tokens lie window by window from the first block to the last, so that a window's are neighbours
and no block has to gather them; global attention does not mind the order, given that its rotary
angles lie in the same.
"""

from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sam.config import TrunkConfig
from jaxinfer.sam.layers import (
    by_heads,
    gelu,
    has_derivatives,
    input_step,
    layer_norm,
    linear,
    linear_of_rounded,
    on_gpu,
)
from jaxinfer.sam.params import Block, Trunk
from jaxinfer.tree import tree
from pallas_kernels.picture_attention import by_parts, picture_attention, rounded, turn
from pallas_kernels.picture_attention_mosaic import picture_attention_mosaic

ATTENTION: Literal["cudnn", "triton", "mosaic"] = "mosaic"
"""Which kernel attends in bfloat16 on a GPU, if it can."""


@tree
class Rotary:
    """Cosines and sines by which pairs of channels turn, both `[n, head width / 2]` float32."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


def encode(p: Trunk, cfg: TrunkConfig, pixels: jax.Array) -> jax.Array:
    """RGB pictures `[B, S, S, 3]` uint8 to `[B, g, g, D]`, g the grid."""
    size = cfg.image_size
    if pixels.shape[1:] != (size, size, 3) or pixels.dtype != jnp.uint8:
        raise ValueError(
            f"pictures are {pixels.dtype}{list(pixels.shape)}; resize them to uint8 RGB, "
            f"[B, {size}, {size}, 3]"
        )
    places = coordinates(cfg)
    x = linear(patches(cfg, pixels).astype(p.patch.weight.dtype), p.patch)
    rows, columns = (places % cfg.table).T
    x = layer_norm(x + p.positions[rows * cfg.table + columns], p.norm, cfg.layer_norm_eps)
    # Only of products with rows in one axis does XLA let cuBLASLt round the results to E4M3.
    x = x.reshape(-1, x.shape[-1])
    window, everything = jax.tree.map(jnp.asarray, rotaries(cfg))  # once for all layers
    for i, layer in enumerate(p.blocks):
        x = block(layer, cfg, x, everything if i in cfg.global_layers else window)
    return from_windows(cfg, x)


def block(p: Block, cfg: TrunkConfig, x: jax.Array, rotary: Rotary) -> jax.Array:
    """One pre-norm layer, `[B T, D]`; every n tokens attend to one another, n those of `rotary`."""
    qkv = linear(layer_norm(x, p.norm1, cfg.layer_norm_eps), p.attention.in_proj)
    out = p.attention.out_proj
    x = x + linear_of_rounded(attend(qkv, rotary, input_step(out)), out, x.dtype)
    hidden = linear(layer_norm(x, p.norm2, cfg.layer_norm_eps), p.fc1)
    return x + linear(gelu(hidden, cfg.gelu), p.fc2)


def attend(qkv: jax.Array, rotary: Rotary, step: jax.Array | None = None) -> jax.Array:
    """Attention among every n tokens, `[B T, 3 D]` to `[B T, D]`; in E4M3 if there is a `step`."""
    cos, sin = jnp.asarray(rotary.cos), jnp.asarray(rotary.sin)
    if ATTENTION == "mosaic" and on_gpu(qkv.dtype):
        return picture_attention_mosaic(qkv, cos, sin, impl="kernel", step=step)
    y = _attend_otherwise(qkv, cos, sin)
    return y if step is None else rounded(y, step)


def _attend_otherwise(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    if ATTENTION == "triton" and on_gpu(qkv.dtype):
        return picture_attention(qkv, cos, sin, impl="kernel")
    parts = by_parts(qkv, cos)
    # Pairs turned as words have no derivative.
    given = parts.astype(jnp.float32) if has_derivatives() else parts
    query, key = (turn(given, part, cos, sin).astype(qkv.dtype) for part in (0, 1))
    return by_heads(query, key, parts[:, :, 2]).reshape(*qkv.shape[:-1], -1)


def patches(cfg: TrunkConfig, pixels: jax.Array) -> jax.Array:
    """Patches from -1 to 1, window by window, `[B, T, h w 3]` float32."""
    side, window, patch = cfg.grid // cfg.window, cfg.window, cfg.patch_size
    x = pixels.reshape(-1, side, window, patch, side, window, patch, 3)
    x = x.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, cfg.grid**2, 3 * patch**2)
    return x.astype(jnp.float32) / 127.5 - 1


def from_windows(cfg: TrunkConfig, x: jax.Array) -> jax.Array:
    """Tokens `[B T, D]`, window by window, to the grid `[B, g, g, D]`."""
    side, window, grid = cfg.grid // cfg.window, cfg.window, cfg.grid
    x = x.reshape(-1, side, side, window, window, x.shape[-1])
    return x.swapaxes(2, 3).reshape(-1, grid, grid, x.shape[-1])


@cache
def coordinates(cfg: TrunkConfig) -> np.ndarray:
    """Row and column of the tokens, window by window, `[T, 2]`."""
    side = cfg.grid // cfg.window
    x = np.indices((cfg.grid, cfg.grid)).reshape(2, side, cfg.window, side, cfg.window)
    return x.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


@cache
def rotaries(cfg: TrunkConfig) -> tuple[Rotary, Rotary]:
    """For attention within a window, and for attention to the whole picture.

    Angles are position times theta^(-4 m / d): the first d / 4 by the column, the rest by the row.
    In the whole picture positions are scaled to the range that they have in a window.
    """
    quarter = cfg.hidden_size // cfg.num_heads // 4
    frequencies = cfg.rope_theta ** (-np.arange(quarter) / quarter)

    def rotary(places: np.ndarray) -> Rotary:
        angles = (places[:, ::-1, None] * frequencies).reshape(len(places), -1)
        return Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    places = coordinates(cfg)
    return rotary(places[: cfg.window**2]), rotary(places * (cfg.window / cfg.grid))
