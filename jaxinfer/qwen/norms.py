"""RMS norms. Statistics and scaling in float32, one cast at the end."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x̂ · (1 + weight)` over the last axis: the zero-centred norm of every text layer."""
    return (_normalise(x, eps) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
