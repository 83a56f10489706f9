"""What a batch of sequences carries from one step to the next."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp

from jaxinfer.qwen.config import Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of `B` sequences, each with room for `S` tokens.

    Keys and values of a token lie at its index in the sequence; rows past `length` are garbage
    that is never read. The Gated DeltaNet state lags behind: the rows of the last decode or verify
    step are kept as `pending_*`, and the next step replays the accepted ones before its own, so
    that a rejected draft costs nothing to undo.

    Attributes:
        k, v: `[La, B, S, Hkv, d]` keys (after norm and rotary) and values of attention layers.
        mtp_k, mtp_v: `[1, B, S, Hkv, d]`, the same for the MTP head; zero layers without one.
        conv: `[Lg, B, W-1, C]` last inputs of the causal convolution before the pending rows.
        recurrent: `[Lg, B, Hv, dk, dv]` float32, before the pending rows.
        pending_x: `[Lg, B, P, C]` convolution inputs of the last step's rows.
        pending_g, pending_beta: `[Lg, B, P, Hv]` float32, their log decay and write strength.
        pending: `[B]` int32, how many of those rows were accepted.
        length: `[B]` int32, tokens in the sequence.
        rope_delta: `[B]` int32, rotary position minus index, for tokens after the prompt.
    """

    k: jax.Array
    v: jax.Array
    mtp_k: jax.Array
    mtp_v: jax.Array
    conv: jax.Array
    recurrent: jax.Array
    pending_x: jax.Array
    pending_g: jax.Array
    pending_beta: jax.Array
    pending: jax.Array
    length: jax.Array
    rope_delta: jax.Array


PER_SEQUENCE = ("pending", "length", "rope_delta")


def init_state(cfg: Config, batch: int, context: int, rows: int) -> State:
    """An empty state for `batch` sequences of up to `context` tokens.

    Args:
        cfg: the model.
        batch: sequences (B).
        context: tokens a sequence can hold (S).
        rows: the most rows a decode or verify step will have (P).
    """
    dtype = jnp.dtype(cfg.dtype)
    La, Lg, Hv = len(cfg.attention_layers), len(cfg.gdn_layers), cfg.linear_num_value_heads
    kv = (batch, context, cfg.num_key_value_heads, cfg.head_dim)
    taps, C = cfg.linear_conv_kernel_dim - 1, cfg.conv_dim
    state = (Lg, batch, Hv, cfg.linear_key_head_dim, cfg.linear_value_head_dim)
    return State(
        k=jnp.zeros((La, *kv), dtype),
        v=jnp.zeros((La, *kv), dtype),
        mtp_k=jnp.zeros((cfg.mtp_layers, *kv), dtype),
        mtp_v=jnp.zeros((cfg.mtp_layers, *kv), dtype),
        conv=jnp.zeros((Lg, batch, taps, C), dtype),
        recurrent=jnp.zeros(state, jnp.float32),
        pending_x=jnp.zeros((Lg, batch, rows, C), dtype),
        pending_g=jnp.zeros((Lg, batch, rows, Hv), jnp.float32),
        pending_beta=jnp.zeros((Lg, batch, rows, Hv), jnp.float32),
        pending=jnp.zeros(batch, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        rope_delta=jnp.zeros(batch, jnp.int32),
    )


def read_slot(state: State, slot: jax.Array) -> State:
    """The state of one sequence, as a batch of one."""

    def read(name: str) -> jax.Array:
        axis = 0 if name in PER_SEQUENCE else 1
        return jax.lax.dynamic_slice_in_dim(getattr(state, name), slot, 1, axis)

    return State(**{f.name: read(f.name) for f in fields(State)})


def write_slot(state: State, slot: jax.Array, one: State) -> State:
    """`state` with one sequence replaced."""

    def write(name: str) -> jax.Array:
        axis = 0 if name in PER_SEQUENCE else 1
        whole, part = getattr(state, name), getattr(one, name)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, slot, axis)

    return State(**{f.name: write(f.name) for f in fields(State)})
