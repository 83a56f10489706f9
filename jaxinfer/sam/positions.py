"""Sines and cosines of positions and boxes."""

import math

import jax
import jax.numpy as jnp

TEMPERATURE = 10000.0


def sine(values: jax.Array, channels: int) -> jax.Array:
    """`[...]`, one turn from 0 to 1, to `[..., channels]` float32.

    Channel 2 i is the sine and 2 i + 1 the cosine of `2 pi value / 10000^(2 i / channels)`.
    """
    wavelengths = TEMPERATURE ** (jnp.arange(0, channels, 2) / channels)
    angles = 2 * math.pi * values.astype(jnp.float32)[..., None] / wavelengths
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1)
    return waves.reshape(*values.shape, channels)


def grid_sine(grid: int, width: int) -> jax.Array:
    """Of the cells of a square grid, row by row, `[grid², width]` float32: y in front of x."""
    axis = sine(jnp.arange(1, grid + 1) / (grid + 1e-6), width // 2)
    shape = (grid, grid, width // 2)
    rows, columns = (jnp.broadcast_to(a, shape) for a in (axis[:, None], axis[None]))
    return jnp.concatenate([rows, columns], -1).reshape(grid**2, width)
