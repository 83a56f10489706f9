"""What experts have in common, however they are computed."""

import jax
import jax.numpy as jnp
from jax import lax


def route(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Router logits `[M, E]` -> experts `[M, k]` and weights `[M, k]` float32 that add up to one.

    Softmax over all experts, the `k` largest, renormalised.
    """
    top, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    return chosen, top / jnp.sum(top, axis=-1, keepdims=True)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """`silu(gate) · up` of rows whose first half is gate and second half up."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
