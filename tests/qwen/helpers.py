"""What several tests of the model need: golden cases, an error measure, a prompt runner."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import State, init_state

GOLDENS = Path(__file__).parents[1] / "goldens" / "qwen"

jit_prefill = jax.jit(model.prefill, static_argnums=(1, 6))
jit_decode = jax.jit(model.decode, static_argnums=(1, 4))
jit_draft = jax.jit(model.draft, static_argnums=(1, 7))


def relative_error(out: jax.Array, reference: np.ndarray) -> float:
    """`‖out − reference‖ / ‖reference‖` in float64."""
    difference = np.asarray(out, np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def run_prompt(
    params: Params,
    cfg: Config,
    x: jax.Array,
    positions: jax.Array | None = None,
    sizes: tuple[int, ...] = (),
    room: int = 256,
    rows: int = 4,
) -> tuple[jax.Array, State]:
    """Prefill one prompt of embeddings `[T, D]` in pieces of `sizes` chunks (default: one each).

    Returns hidden states `[T, D]` and the state.
    """
    T = x.shape[0]
    chunks = -(-T // CHUNK)
    padded = jnp.pad(x, ((0, chunks * CHUNK - T), (0, 0)))[None]
    if positions is None:
        positions = model.text_positions(jnp.array([0]), T)[0]
    places = jnp.pad(positions, ((0, chunks * CHUNK - T), (0, 0)))[None]
    state, hidden, begin = init_state(cfg, 1, room, rows), [], 0
    for size in sizes or (1,) * chunks:
        end = begin + size * CHUNK
        valid = jnp.array([min(size * CHUNK, T - begin)])
        h, state = jit_prefill(
            params, cfg, padded[:, begin:end], state, valid, places[:, begin:end]
        )
        hidden.append(h)
        begin = end
    return jnp.concatenate(hidden, axis=1)[0, :T], state


scores = jax.jit(model.logits, static_argnums=2)
