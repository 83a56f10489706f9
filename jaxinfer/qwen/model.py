"""Qwen3.6 as three functions over (params, state): `prefill`, `decode` and `draft`.

Each takes embeddings and returns hidden states; `logits` turns those into scores. A step of the
engine is a few lines around them, compiled as one program.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.qwen.attention import attention, rotary
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.gated_delta import gated_delta
from jaxinfer.qwen.mode import PREFILL, TRAIN, Mode
from jaxinfer.qwen.moe import moe
from jaxinfer.qwen.norms import rms_norm
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import State, init_state
from pallas_kernels import linear, rowwise


def embed(params: Params, cfg: Config, tokens: jax.Array) -> jax.Array:
    """Token ids `[...]` -> embeddings `[..., D]`."""
    return params.embed_tokens[tokens].astype(cfg.dtype)


def embed_with_features(
    params: Params, cfg: Config, tokens: jax.Array, features: jax.Array
) -> jax.Array:
    """`embed` of one prompt `[T]`, image and video placeholders replaced by features `[F, D]`.

    The `F` placeholders take the features in order.
    """
    placeholder = (tokens == cfg.image_token_id) | (tokens == cfg.video_token_id)
    row = jnp.cumsum(placeholder) - 1
    x = embed(params, cfg, tokens)
    return jnp.where(placeholder[:, None], features[row].astype(x.dtype), x)


def logits(params: Params, hidden: jax.Array, mode: Mode) -> jax.Array:
    """Normed hidden states `[B, T, D]` -> scores `[B, T, V]` float32."""
    return rowwise(lambda h: linear(h, params.lm_head, dtype=jnp.float32), mode.tile, hidden)


def text_positions(start: jax.Array, count: int) -> jax.Array:
    """Rotary positions `[B, T, 3]` of `count` text tokens from position `start [B]` on."""
    return jnp.broadcast_to(
        (start[:, None] + jnp.arange(count))[..., None], (*start.shape, count, 3)
    )


def prefill(
    params: Params,
    cfg: Config,
    x: jax.Array,
    state: State,
    valid: jax.Array,
    positions: jax.Array,
    mode: Mode = PREFILL,
) -> tuple[jax.Array, State]:
    """Run prompt chunks and advance the state by them.

    Args:
        params: the model's parameters.
        cfg: its configuration.
        x: embeddings `[B, T, D]`; `T` is a multiple of 64.
        state: of `B` sequences, each of a length that is a multiple of 64, nothing pending.
        valid: `[B]`, how many tokens of each row are real; the rest is padding at the end. Zero
            leaves a sequence as it is.
        positions: rotary positions `[B, T, 3]`.
        mode: `PREFILL`, or `TRAIN` for gradients.

    Returns:
        Hidden states after the final norm `[B, T, D]`, and the state.
    """
    hidden, state = _layers(params, cfg, x, state, valid, positions, mode)
    none = jnp.zeros_like(state.pending)
    return hidden, replace(state, length=state.length + valid, pending=none)


def decode(
    params: Params, cfg: Config, x: jax.Array, state: State, mode: Mode
) -> tuple[jax.Array, State]:
    """Run `T` rows of each sequence: a token, or a token and the drafts to verify after it.

    Args:
        params: the model's parameters.
        cfg: its configuration.
        x: embeddings `[B, T, D]`, `T` at most the state's pending rows.
        state: of `B` sequences.
        mode: `decode_mode()`.

    Returns:
        Hidden states after the final norm `[B, T, D]`, and the state with these rows pending: call
        `accept` with the number of them that hold before the next step.
    """
    T = x.shape[1]
    positions = text_positions(state.length + state.rope_delta, T)
    return _layers(params, cfg, x, state, jnp.full(x.shape[:1], T), positions, mode)


def accept(state: State, rows: jax.Array) -> State:
    """Keep the first `rows [B]` rows of the last decode or verify step; the others never were."""
    return replace(state, length=state.length + rows, pending=rows)


def draft(
    params: Params,
    cfg: Config,
    x: jax.Array,
    hidden: jax.Array,
    state: State,
    start: jax.Array,
    positions: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, State]:
    """The MTP head on rows (h_i, t_{i+1}): what it expects after t_{i+1}.

    Args:
        params: with an MTP head.
        cfg: the model.
        x: embeddings of the *next* tokens `[B, T, D]`.
        hidden: the model's hidden states after its final norm, or this head's own output when it
            drafts further, `[B, T, D]`.
        state: only the MTP caches are read and written.
        start: `[B]`, index `i` of the first row.
        positions: rotary positions of the rows `i`, `[B, T, 3]`.
        mode: see `Mode`.

    Returns:
        The head's output `[B, T, D]` after its norm, input of `logits`; and the state.
    """
    p = params.mtp
    if p is None:
        raise ValueError("this checkpoint has no MTP head; draft with n-grams instead")

    def join(x: jax.Array, hidden: jax.Array) -> jax.Array:
        e = rms_norm(x, p.pre_fc_norm_embedding, cfg.rms_norm_eps)
        h = rms_norm(hidden, p.pre_fc_norm_hidden, cfg.rms_norm_eps)
        return linear(jnp.concatenate([e, h], axis=-1), p.fc)

    y = rowwise(join, mode.tile, x, hidden)
    turn = rotary(cfg, positions, mode)
    y, k, v = attention(p.attention, 0, cfg, y, turn, state.mtp_k, state.mtp_v, start, mode)
    y = moe(p.moe, 0, cfg, y, mode)
    y = rowwise(lambda r: rms_norm(r, p.norm, cfg.rms_norm_eps), mode.tile, y)
    return y, replace(state, mtp_k=k, mtp_v=v)


def train_forward(params: Params, cfg: Config, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores for whole sequences, differentiable.

    Args:
        params: with an MTP head.
        cfg: the model.
        tokens: `[B, T]`, `T` a multiple of 64.

    Returns:
        Scores `[B, T, V]` for the next token at every position, and the MTP head's scores
        `[B, T-1, V]` for the one after it (row `i` has seen tokens up to `i + 1`).
    """
    B, T = tokens.shape
    state = init_state(cfg, B, T, 1)
    positions = text_positions(state.length, T)
    x = embed(params, cfg, tokens)
    hidden, state = prefill(params, cfg, x, state, jnp.full(B, T), positions, TRAIN)
    start = jnp.zeros(B, jnp.int32)
    ahead, _ = draft(params, cfg, x[:, 1:], hidden[:, :-1], state, start, positions[:, :-1], TRAIN)
    return logits(params, hidden, TRAIN), logits(params, ahead, TRAIN)


def _layers(
    params: Params,
    cfg: Config,
    x: jax.Array,
    state: State,
    valid: jax.Array,
    positions: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, State]:
    turn = rotary(cfg, positions, mode)
    for number in range(cfg.num_layers):
        with jax.named_scope(f"layer_{number}"):
            if number in cfg.gdn_layers:
                index = cfg.gdn_layers.index(number)
                x, state = gated_delta(params.gdn, index, cfg, x, state, valid, mode)
            else:
                index = cfg.attention_layers.index(number)
                x, k, v = attention(
                    params.attention, index, cfg, x, turn, state.k, state.v, state.length, mode
                )
                state = replace(state, k=k, v=v)
            x = moe(params.moe, number, cfg, x, mode)
    return rowwise(lambda r: rms_norm(r, params.norm, cfg.rms_norm_eps), mode.tile, x), state
