"""What sequences carry from one step to the next, and which of them a step is about."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.qwen.config import CHUNK, Config

SCRATCH_PAGE = 0
"""A page that belongs to nobody: whatever must not be kept is written there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Pools from which all sequences live, and what `B` slots hold.

    Keys and values of 64 consecutive tokens of a sequence lie in one page; which pages are whose is
    said by the tables of a call. What lies in a page past a sequence's length is never read.

    Gated DeltaNet's memory is one entry a slot, then a scratch entry, then snapshots. It lags
    behind: the rows of the last decode or verify step are kept as `pending_*`, and the next step
    replays the accepted ones before its own, so that a rejected draft costs nothing to undo.

    The last slot, `B - 1`, is scratch: rows that only fill up a call are given to it.

    Attributes:
        k, v: `[L, N, 64, Hkv, d]` keys (after norm and rotary) and values; attention layers, then
            that of the MTP head. Page 0 is scratch.
        conv: `[Lg, R, W-1, C]` last inputs of the causal convolution before the pending rows.
        recurrent: `[Lg, R, Hv, dk, dv]` float32, before the pending rows.
        pending_x: `[Lg, B, P, C]` convolution inputs of the last step's rows.
        pending_g, pending_beta: `[Lg, B, P, Hv]` float32, their log decay and write strength.
        pending: `[B]` int32, how many of those rows were accepted.
        length: `[B]` int32, tokens in the sequence.
        rope_delta: `[B]` int32, rotary position minus index, for tokens after the prompt.
    """

    k: jax.Array
    v: jax.Array
    conv: jax.Array
    recurrent: jax.Array
    pending_x: jax.Array
    pending_g: jax.Array
    pending_beta: jax.Array
    pending: jax.Array
    length: jax.Array
    rope_delta: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """The `P` pieces of a prefill call: each up to 64 tokens of a prompt, and one page.

    Pieces of one sequence stand together and in order.

    Attributes:
        table: `[P, M]` int32, pages of the piece's sequence; 0 where it has none.
        slot: `[P]` int32; scratch for a piece that only fills up the call.
        start: `[P]` int32, index of the first token, a multiple of 64.
        valid: `[P]` int32, tokens that are real; 0 for a piece that only fills up the call.
        source: `[P]` int32, the entry of Gated DeltaNet's memory from which the first piece of a
            sequence in this call goes on: its slot, or a snapshot. Not read where `start` is 0.
        snapshot: `[P]` int32, the entry to which the memory after the piece is copied; scratch for
            none.
        fresh: `[P]` bool, whether its page is to be written. It is not if it belongs to others who
            have these tokens too, or if the piece only fills up the call.
    """

    table: jax.Array
    slot: jax.Array
    start: jax.Array
    valid: jax.Array
    source: jax.Array
    snapshot: jax.Array
    fresh: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The `b` sequences of a decode or verify call.

    Attributes:
        table: `[b, M]` int32, pages of each sequence; 0 where it has none.
        slot: `[b]` int32; scratch for a row that only fills up the call.
    """

    table: jax.Array
    slot: jax.Array


def init_state(
    cfg: Config,
    slots: int,
    pages: int,
    rows: int,
    snapshots: int = 0,
    kv_dtype: str | None = None,
) -> State:
    """An empty state.

    Args:
        cfg: the model.
        slots: sequences that can run at once; the state has one slot more, for scratch.
        pages: pages of 64 tokens, scratch included.
        rows: the most rows a decode or verify step will have (P).
        snapshots: entries for copies of Gated DeltaNet's memory.
        kv_dtype: how keys and values are stored; None for the model's own type.
    """
    dtype, kept = jnp.dtype(cfg.dtype), jnp.dtype(kv_dtype or cfg.dtype)
    L, Lg = len(cfg.attention_layers) + cfg.mtp_layers, len(cfg.gdn_layers)
    B, Hv = slots + 1, cfg.linear_num_value_heads
    R = B + snapshots
    kv = (L, pages, CHUNK, cfg.num_key_value_heads, cfg.head_dim)
    return State(
        k=jnp.zeros(kv, kept),
        v=jnp.zeros(kv, kept),
        conv=jnp.zeros((Lg, R, cfg.linear_conv_kernel_dim - 1, cfg.conv_dim), dtype),
        recurrent=jnp.zeros(
            (Lg, R, Hv, cfg.linear_key_head_dim, cfg.linear_value_head_dim), jnp.float32
        ),
        pending_x=jnp.zeros((Lg, B, rows, cfg.conv_dim), dtype),
        pending_g=jnp.zeros((Lg, B, rows, Hv), jnp.float32),
        pending_beta=jnp.zeros((Lg, B, rows, Hv), jnp.float32),
        pending=jnp.zeros(B, jnp.int32),
        length=jnp.zeros(B, jnp.int32),
        rope_delta=jnp.zeros(B, jnp.int32),
    )


def own_pages(slots: int, context: int) -> jax.Array:
    """Tables `[slots, M]` that give every slot pages of its own for `context` tokens.

    For use without a scheduler; the pool needs `1 + slots · M` pages.
    """
    each = -(-context // CHUNK)
    return 1 + jnp.arange(slots * each, dtype=jnp.int32).reshape(slots, each)
