"""The model without an engine: one forward pass over a whole text."""

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import load, resolve
from jaxinfer.qwen import model
from jaxinfer.qwen.mode import TRAIN
from tests.engine.numpy_sampler import log_softmax

ROOM = 192
"""The most tokens of a text."""
CLOSE = 0.1
"""How far the scores of likely tokens may be from an engine's: bfloat16 rounds in other places."""


@cache
def forward():
    """The compiled pass, from tokens `[1, ROOM]` to scores `[1, ROOM, V]`."""
    config, params = load(resolve("tiny_qwen"), vision=False)

    @jax.jit
    def scores(tokens: jax.Array) -> jax.Array:
        x = model.embed(params, config, tokens)
        return model.logits(params, model.whole(params, config, x), TRAIN)

    return scores


def plain_scores(tokens: Sequence[int]) -> np.ndarray:
    """Scores `[n, V]` float64 of what follows each of `n` tokens."""
    padded = jnp.zeros((1, ROOM), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
    return np.asarray(forward()(padded)[0, : len(tokens)], np.float64)


def plain_logprobs(tokens: Sequence[int]) -> np.ndarray:
    """Natural log probabilities `[n, V]` of what follows each of `n` tokens."""
    return log_softmax(plain_scores(tokens))
