"""Measuring how large the inputs of FP8 modules get, for scales that are fixed in advance."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from checkpoints.files import CheckpointError
from checkpoints.load import load
from checkpoints.locate import find
from checkpoints.progress import OnProgress
from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.params import Matrix, Params, leaves, nvidia_mix, structure
from pallas_kernels import Dense, Observed
from pallas_kernels.weights import FP8_MAX

WINDOW = 8 * CHUNK
"""Tokens of text that are run together."""


def input_scales(
    directory: str | Path, text: str, *, progress: OnProgress | None = None
) -> dict[str, float]:
    """Run a dense checkpoint over some text and return `largest input / 448` of each FP8 module.

    The modules are those that the nvidia-mix recipe stores in FP8, by published name.

    Args:
        directory: a dense checkpoint with its tokeniser.
        text: at least `WINDOW` tokens of what the model will be used for; cut into windows, the
            rest dropped.
        progress: called with the windows that are done and all of them.

    Raises CheckpointError if there is too little text or no tokeniser.
    """
    path = find(directory, "tokenizer.json")
    if path is None:
        raise CheckpointError(f"{directory} has no tokenizer.json, which calibration needs")
    ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    windows = np.asarray(ids[: len(ids) // WINDOW * WINDOW], np.int32).reshape(-1, WINDOW)
    if not len(windows):
        raise CheckpointError(
            f"the calibration text has {len(ids)} tokens; at least {WINDOW} are needed"
        )
    cfg, params = load(directory, vision=False)
    largest: dict[str, float] = {}
    observed = _observe(cfg, params, largest)
    for number, window in enumerate(windows, 1):
        jax.block_until_ready(_forward(observed, cfg, jnp.asarray(window)))
        if progress is not None:
            progress(number, len(windows))
    jax.effects_barrier()
    if empty := [name for name, value in largest.items() if not value > 0]:
        raise CheckpointError(f"{empty[0]} was given nothing but zeros; calibrate on other text")
    return {name: value / FP8_MAX for name, value in largest.items()}


@partial(jax.jit, static_argnums=1)
def _forward(params: Params, cfg: Config, tokens: jax.Array) -> jax.Array:
    return model.whole(params, cfg, model.embed(params, cfg, tokens[None]))


def _observe(cfg: Config, params: Params, largest: dict[str, float]) -> Params:
    """The parameters with every matrix that becomes FP8 made to report into `largest`."""
    kinds = iter(leaf for _, leaf in leaves(structure(cfg)))

    def watch(stored: Any) -> Any:
        leaf = next(kinds)
        if not isinstance(leaf, Matrix) or nvidia_mix(leaf, None) != "fp8_static":
            return stored

        def report(position: int, value: jax.Array) -> None:
            name = leaf.names[0].format(layer=leaf.layers[position])
            largest[name] = max(largest.get(name, 0.0), float(value))

        return Observed(stored, report)

    return jax.tree.map(watch, params, is_leaf=lambda node: isinstance(node, Dense))
