"""The neck: feature maps at four, two and one times the grid."""

import jax

from jaxinfer.sam.layers import convolve, double, double_then, gelu, linear
from jaxinfer.sam.params import Neck


def pyramid(p: Neck, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The trunk's `[B, g, g, C]` to `[B, 4g, 4g, D]`, `[B, 2g, 2g, D]` and `[B, g, g, D]`."""
    x4 = gelu(double(x, p.x4_up1))
    return (
        convolve(double(x4, double_then(p.x4_up2, p.x4_conv1)), p.x4_conv3),
        convolve(double(x, double_then(p.x2_up, p.x2_conv1)), p.x2_conv3),
        convolve(linear(x, p.x1_conv1), p.x1_conv3),
    )
