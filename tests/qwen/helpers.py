"""What several tests of the model need: golden cases, an error measure, a prompt runner."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import decode_mode
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Pieces, Rows, State, init_state, own_pages

GOLDENS = Path(__file__).parents[1] / "goldens" / "qwen"

ROOM = 256
"""Tokens for which a slot has pages."""

jit_prefill = jax.jit(model.prefill, static_argnums=1)
jit_decode = jax.jit(model.decode, static_argnums=(1, 6))
jit_draft = jax.jit(model.draft, static_argnums=(1, 7))


def relative_error(out: jax.Array, reference: np.ndarray) -> float:
    """`‖out − reference‖ / ‖reference‖` in float64."""
    difference = np.asarray(out, np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def empty(cfg: Config, slots: int, rows: int = 4, snapshots: int = 0) -> State:
    """A state in which every slot has pages for `ROOM` tokens; see `own_pages`."""
    return init_state(cfg, slots, 1 + slots * ROOM // CHUNK, rows, snapshots)


def pieces_of(slot: int, start: int, valid: int, count: int, slots: int = 1) -> Pieces:
    """`count` pieces of one slot, of which `valid` tokens are real."""
    before = CHUNK * np.arange(count, dtype=np.int32)
    full = np.full(count, slot, np.int32)
    pieces = Pieces(
        table=np.repeat(np.asarray(own_pages(slots, ROOM))[slot : slot + 1], count, axis=0),
        slot=full,
        start=start + before,
        valid=np.clip(valid - before, 0, CHUNK),
        source=full,
        snapshot=np.full(count, slots, np.int32),
        fresh=valid > before,
    )
    return jax.tree.map(jnp.asarray, pieces)


def run_prompt(
    params: Params,
    cfg: Config,
    x: jax.Array,
    positions: jax.Array | None = None,
    sizes: tuple[int, ...] = (),
    slots: int = 1,
    snapshots: int = 0,
) -> tuple[jax.Array, State]:
    """Prefill one prompt of embeddings `[T, D]` with `sizes` pieces a call (default: one).

    Returns hidden states `[T, D]` and the state, in which the prompt has the first slot.
    """
    T = x.shape[0]
    count = -(-T // CHUNK)
    padding = ((0, count * CHUNK - T), (0, 0))
    if positions is None:
        positions = model.text_positions(jnp.array([0]), T)[0]
    # By NumPy, which does not compile anything for each new shape.
    padded, places = (np.pad(a, padding).reshape(count, CHUNK, -1) for a in (x, positions))
    state, hidden, begin = empty(cfg, slots, snapshots=snapshots), [], 0
    for size in sizes or (1,) * count:
        end = begin + size
        pieces = pieces_of(0, begin * CHUNK, T - begin * CHUNK, size, slots)
        h, state = jit_prefill(params, cfg, padded[begin:end], state, pieces, places[begin:end])
        hidden.append(h)
        begin = end
    return jnp.asarray(np.concatenate(hidden).reshape(-1, h.shape[-1])[:T]), state


def step(
    params: Params, cfg: Config, state: State, tokens: np.ndarray, keep: int | None = None
) -> tuple[jax.Array, State]:
    """One decode or verify step over tokens `[B, T]` of all slots; the first `keep` rows hold."""
    B, T = tokens.shape
    rows = Rows(own_pages(B, ROOM), jnp.arange(B))
    x = model.embed(params, cfg, jnp.asarray(tokens))
    active = jnp.ones(B, bool)
    hidden, state = jit_decode(params, cfg, x, state, rows, active, decode_mode())
    return hidden, model.accept(state, rows, jnp.full(B, T if keep is None else keep))


def kept(pages: jax.Array, slot: int, length: int) -> np.ndarray:
    """Keys or values `[L, length, Hkv, d]` of a slot."""
    each = ROOM // CHUNK
    own = np.asarray(pages)[:, 1 + slot * each : 1 + (slot + 1) * each]
    return own.reshape(own.shape[0], ROOM, *own.shape[3:])[:, :length]


scores = jax.jit(model.logits, static_argnums=2)
