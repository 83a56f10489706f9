"""Write a parameter tree in the published Hugging Face layout: fused experts, one floating type."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Matrix, Params, Vector, leaves, structure
from pallas_kernels import Dense, take


def save_published(
    directory: Path,
    raw_config: Mapping[str, Any],
    params: Params,
    dtype: str = "bfloat16",
    shard_bytes: int = 5 << 30,
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
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in tensors.items():
        held = sum(a.nbytes for a in shards[-1].values())
        if held and held + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = array
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(a.nbytes for a in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")


def published(cfg: Config, params: Params) -> Iterator[tuple[str, jax.Array]]:
    """(tensor name, array in the file's shape) of every parameter of a dense tree."""
    arrays = jax.tree.leaves(params, is_leaf=lambda n: isinstance(n, Dense))
    for (path, leaf), stored in zip(leaves(structure(cfg)), arrays, strict=True):
        for position, layer in enumerate(leaf.layers or (None,)):
            one = take(stored, position if leaf.layers else None)
            if isinstance(leaf, Vector):
                name = leaf.name.format(layer=layer)
                yield name, one[:, None, :] if path.endswith("conv1d") else one
            else:
                yield from _matrix(leaf, layer, one.w)


def _matrix(leaf: Matrix, layer: int | None, w: jax.Array) -> Iterator[tuple[str, jax.Array]]:
    if leaf.fused:
        yield leaf.fused.format(layer=layer), w
        return
    for name, part in zip(leaf.names, jnp.split(w, len(leaf.names)), strict=True):
        yield name.format(layer=layer) + ".weight", part
