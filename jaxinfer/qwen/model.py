"""Qwen3.6 as three functions over (params, state): `prefill`, `decode` and `draft`.

Each takes embeddings and returns hidden states; `logits` turns those into scores. A step of the
engine is a few lines around them, compiled as one program.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.qwen.attention import attention, attention_alone, rotary
from jaxinfer.qwen.cache import Cache, Place
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.gated_delta import gated_delta, gated_delta_alone
from jaxinfer.qwen.mode import PREFILL, TRAIN, Mode
from jaxinfer.qwen.moe import moe
from jaxinfer.qwen.norms import rms_norm
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.products import norm, product
from jaxinfer.qwen.state import Pieces, Rows, State
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
    return product(hidden, params.lm_head, jnp.float32, mode)


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
    pieces: Pieces,
    positions: jax.Array,
    mode: Mode = PREFILL,
) -> tuple[jax.Array, State]:
    """Run pieces of prompts and advance the state of their slots by them.

    Args:
        params: the model's parameters.
        cfg: its configuration.
        x: embeddings `[P, 64, D]`.
        state: nothing may be pending in the slots of the pieces.
        pieces: what they are.
        positions: rotary positions `[P, 64, 3]`.
        mode: `prefill_mode()`.

    Returns:
        Hidden states after the final norm `[P, 64, D]`, and the state.
    """
    place = Place(pieces.table, pieces.start, jnp.where(pieces.fresh, CHUNK, 0))
    hidden, state = _layers(params, cfg, x, state, pieces, place, positions, mode)
    # Of several pieces in one slot the last is the longest, whatever the order of the writes.
    length = state.length.at[pieces.slot].set(0)
    length = length.at[pieces.slot].max(pieces.start + pieces.valid)
    pending = state.pending.at[pieces.slot].set(0)
    return hidden, replace(state, length=length, pending=pending)


def decode(
    params: Params,
    cfg: Config,
    x: jax.Array,
    state: State,
    rows: Rows,
    active: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, State]:
    """Run `T` rows of some sequences: a token each, or a token and the drafts to verify after it.

    Args:
        params: the model's parameters.
        cfg: its configuration.
        x: embeddings `[b, T, D]`, `T` at most the state's pending rows.
        state: of all sequences.
        rows: which sequences.
        active: `[b]` bool; what others compute is not kept.
        mode: `decode_mode()`.

    Returns:
        Hidden states after the final norm `[b, T, D]`, and the state with these rows pending: call
        `accept` with the number of them that hold before the next step.
    """
    T = x.shape[1]
    start = state.length[rows.slot]
    positions = text_positions(start + state.rope_delta[rows.slot], T)
    place = Place(rows.table, start, jnp.where(active, T, 0))
    return _layers(params, cfg, x, state, rows, place, positions, mode)


def accept(state: State, rows: Rows, count: jax.Array) -> State:
    """Keep the first `count [b]` rows of the last decode or verify step; the others never were."""
    return replace(
        state,
        length=state.length.at[rows.slot].add(count),
        pending=state.pending.at[rows.slot].set(count),
    )


def draft(
    params: Params,
    cfg: Config,
    x: jax.Array,
    hidden: jax.Array,
    state: State,
    place: Place,
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
        state: only the MTP head's pages are read and written.
        place: where the rows `i` stand.
        positions: rotary positions of the rows `i`, `[B, T, 3]`.
        mode: see `Mode`.

    Returns:
        The head's output `[B, T, D]` after its norm, input of `logits`; and the state.
    """
    y = _joined(params, cfg, x, hidden, mode)
    p = params.mtp
    assert p is not None
    turn = rotary(cfg, positions, mode)
    cache = Cache(state.k, state.v, len(cfg.attention_layers))
    y, cache = attention(p.attention, 0, cfg, y, turn, cache, place, mode)
    y = moe(p.moe, 0, cfg, y, mode)
    y = norm(y, p.norm, cfg.rms_norm_eps, mode)
    return y, replace(state, k=cache.k, v=cache.v)


def whole(params: Params, cfg: Config, x: jax.Array) -> jax.Array:
    """Hidden states after the final norm of whole sequences, differentiable, without a state.

    Args:
        params: the model's parameters.
        cfg: its configuration.
        x: embeddings `[B, T, D]`, `T` a multiple of 64.
    """
    turn = rotary(cfg, text_positions(jnp.zeros(x.shape[0], jnp.int32), x.shape[1]), TRAIN)
    for number in range(cfg.num_layers):
        if number in cfg.gdn_layers:
            x = gated_delta_alone(params.gdn, cfg.gdn_layers.index(number), cfg, x)
        else:
            index = cfg.attention_layers.index(number)
            x = attention_alone(params.attention, index, cfg, x, turn)
        x = moe(params.moe, number, cfg, x, TRAIN)
    return rms_norm(x, params.norm, cfg.rms_norm_eps)


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
    x = embed(params, cfg, tokens)
    hidden = whole(params, cfg, x)
    y = _joined(params, cfg, x[:, 1:], hidden[:, :-1], TRAIN)
    p = params.mtp
    assert p is not None
    turn = rotary(cfg, text_positions(jnp.zeros(x.shape[0], jnp.int32), y.shape[1]), TRAIN)
    y = moe(p.moe, 0, cfg, attention_alone(p.attention, 0, cfg, y, turn), TRAIN)
    ahead = rms_norm(y, p.norm, cfg.rms_norm_eps)
    return logits(params, hidden, TRAIN), logits(params, ahead, TRAIN)


def _joined(params: Params, cfg: Config, x: jax.Array, hidden: jax.Array, mode: Mode) -> jax.Array:
    """What the MTP head's layer is fed: embeddings and hidden states, normed and projected."""
    p = params.mtp
    if p is None:
        raise ValueError("this checkpoint has no MTP head; draft with n-grams instead")

    def join(x: jax.Array, hidden: jax.Array) -> jax.Array:
        e = rms_norm(x, p.pre_fc_norm_embedding, cfg.rms_norm_eps)
        h = rms_norm(hidden, p.pre_fc_norm_hidden, cfg.rms_norm_eps)
        return linear(jnp.concatenate([e, h], axis=-1), p.fc)

    return rowwise(join, mode.tile, x, hidden)


def _layers(
    params: Params,
    cfg: Config,
    x: jax.Array,
    state: State,
    which: Pieces | Rows,
    place: Place,
    positions: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, State]:
    turn = rotary(cfg, positions, mode)
    for number in range(cfg.num_layers):
        with jax.named_scope(f"layer_{number}"):
            if number in cfg.gdn_layers:
                index = cfg.gdn_layers.index(number)
                x, state = gated_delta(params.gdn, index, cfg, x, state, which, mode)
            else:
                index = cfg.attention_layers.index(number)
                cache = Cache(state.k, state.v, index)
                x, cache = attention(params.attention, index, cfg, x, turn, cache, place, mode)
                state = replace(state, k=cache.k, v=cache.v)
            x = moe(params.moe, number, cfg, x, mode)
    return norm(x, params.norm, cfg.rms_norm_eps, mode), state
