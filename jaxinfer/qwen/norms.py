"""RMS norms. Statistics and scaling in float32, one cast at the end."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x̂ · (1 + weight)` over the last axis: the zero-centred norm of every text layer."""
    return (_normalise(x, eps) * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def gated_rms_norm(x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """`x̂ · weight · silu(gate)` over the last axis, in `gate.dtype`: Gated DeltaNet's output norm.

    This weight is not zero-centred.
    """
    scaled = _normalise(x, eps) * weight.astype(jnp.float32)
    return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def l2_normalise(x: jax.Array) -> jax.Array:
    """`x / sqrt(Σx² + 1e-6)` over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
