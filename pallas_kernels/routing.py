"""What experts have in common, however they are computed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


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


# --- choosing experts inside a kernel -------------------------------------------------------------
#
# A logit and its expert in one integer, so that a single maximum finds both: the sixteen bits of
# bfloat16 in the order of their values, then the expert counted backwards.

_LAST = 0xFFFF
_NONE = -(2**31)


def keys_of(logits: Any, r: jax.Array) -> jax.Array:
    """Keys `[E]` int32 of row `r` of a reference to router logits `[R, E]` bfloat16."""
    expert = jnp.arange(logits.shape[1])
    return _keys(plt.load(logits.at[r, expert]), expert)


def keys_of_rows(logits: Any, r: jax.Array) -> jax.Array:
    """Keys `[n, E]` of rows `r [n]`."""
    expert = jnp.arange(logits.shape[1])[None, :]
    return _keys(plt.load(logits.at[r[:, None], expert]), expert)


def _keys(logits: jax.Array, expert: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(logits, jnp.int16).astype(jnp.int32)
    return (_ordered(bits) << 16) | (_LAST - expert)


def without(keys: jax.Array, one: jax.Array) -> jax.Array:
    """Keys of which one is never the largest again."""
    return jnp.where(keys == one, _NONE, keys)


def rest(keys: jax.Array) -> jax.Array:
    """Keys without the largest."""
    return without(keys, jnp.max(keys))


def expert_of(key: jax.Array) -> jax.Array:
    """The expert that a key stands for."""
    return _LAST - (key & _LAST)


def logit_of(key: jax.Array) -> jax.Array:
    """Its logit, float32."""
    return lax.bitcast_convert_type(_ordered(key >> 16) << 16, jnp.float32)


def _ordered(bits: jax.Array) -> jax.Array:
    """Sign and magnitude to two's complement and back."""
    return jnp.where(bits < 0, bits ^ 0x7FFF, bits)
