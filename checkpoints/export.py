"""Write a parameter tree in the published Hugging Face layout: fused experts, one floating type."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.names import stored_shape
from checkpoints.write import write_checkpoint
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Params, Vector, leaves, structure
from pallas_kernels import Dense, take


def save_published(
    directory: Path,
    raw_config: Mapping[str, Any],
    params: Params,
    dtype: str = "bfloat16",
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json`, `model*.safetensors` and the index.

    Args:
        directory: made if it is not there.
        raw_config: what goes into `config.json`.
        params: a tree whose matrices are all `Dense`.
        dtype: floating type of every tensor written.
        shard_bytes: a file is closed before it would grow past this.
    """
    directory.mkdir(parents=True, exist_ok=True)
    cfg = Config.from_dict(raw_config)
    tensors = {name: np.asarray(a.astype(dtype)) for name, a in published(cfg, params)}
    write_checkpoint(directory, tensors, shard_bytes)
    (directory / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")


def published(cfg: Config, params: Params) -> Iterator[tuple[str, jax.Array]]:
    """(tensor name, array in the file's shape) of every parameter of a dense tree."""
    arrays = jax.tree.leaves(params, is_leaf=lambda n: isinstance(n, Dense))
    for (_, leaf), stored in zip(leaves(structure(cfg)), arrays, strict=True):
        shape = stored_shape(cfg, leaf)
        for position, layer in enumerate(leaf.layers or (None,)):
            one = take(stored, position if leaf.layers else None)
            if isinstance(leaf, Vector):
                yield leaf.name.format(layer=layer), one.reshape(shape)
            elif leaf.fused:
                yield leaf.fused.format(layer=layer), one.w
            else:
                for name, part in zip(leaf.names, jnp.split(one.w, len(leaf.names)), strict=True):
                    yield name.format(layer=layer) + ".weight", part.reshape(shape)
