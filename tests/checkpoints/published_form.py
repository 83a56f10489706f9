"""Random parameters, and their published form: what an exporter would have written.

The inverse of the loader, written for clarity and not for size.
"""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints.names import stored_shape
from checkpoints.write import write_checkpoint
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import FormatOf, Params, Vector, all_dense, leaves, shapes, structure
from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer, take
from tests.checkpoints.tiny_models import TINY_DICT

Tensors = dict[str, np.ndarray]


def random_params(cfg: Config, format_of: FormatOf = all_dense, seed: int = 0) -> Params:
    """Every array drawn at random; scales are powers of two, so that reciprocals are exact."""
    rng = np.random.default_rng(seed)

    def values(target: Any) -> np.ndarray:
        match np.dtype(target.dtype).name:
            case "uint8":
                return rng.integers(0, 256, target.shape, np.uint8)
            case "float8_e4m3fn":
                signs = rng.integers(0, 2, target.shape, np.uint8) << 7
                return (rng.integers(0, 0x7F, target.shape, np.uint8) | signs).view(
                    ml_dtypes.float8_e4m3fn
                )
        return rng.standard_normal(target.shape).astype(target.dtype)

    def scales(target: Any) -> np.ndarray:
        return np.exp2(rng.integers(-12, 0, target.shape)).astype(np.float32)

    def weight(target: Any) -> Any:
        match target:
            case PerLayer(groups, where):
                return PerLayer(tuple(map(weight, groups)), where)
            case Dense(w):
                return Dense(values(w))
            case Nvfp4(q, block_scale, scale):
                positive = rng.integers(1, 0x7F, block_scale.shape, np.uint8)
                return Nvfp4(values(q), positive.view(ml_dtypes.float8_e4m3fn), scales(scale))
            case Fp8(q, scale, input_scale):
                inputs = None if input_scale is None else scales(input_scale)
                return Fp8(values(q), scales(scale), inputs)
        return values(target)

    return jax.tree.map(
        weight,
        shapes(cfg, format_of),
        is_leaf=lambda node: isinstance(node, PerLayer | Dense | Nvfp4 | Fp8),
    )


def published(
    cfg: Config, params: Params, tool: str = "modelopt", fused: bool = True, mtp_fused: bool = True
) -> Tensors:
    """The tensors of a checkpoint; `tool` is "modelopt" or "compressed-tensors"."""
    tensors: Tensors = {}
    for path, leaf in leaves(structure(cfg)):
        value: Any = params
        for name in path.split("."):
            value = getattr(value, name)
        for position, layer in enumerate(leaf.layers or (None,)):
            here = take(value, position if leaf.layers else None)
            shape = stored_shape(cfg, leaf)
            if isinstance(leaf, Vector):
                tensors[leaf.name.format(layer=layer)] = np.asarray(here).reshape(shape)
                continue
            keep = mtp_fused if leaf.module.startswith("mtp.") else fused
            if leaf.fused and isinstance(here, Dense) and keep:
                tensors[leaf.fused.format(layer=layer)] = np.asarray(here.w)
                continue
            for expert in range(leaf.experts or 1):
                one = take(here, expert if leaf.experts else None)
                for part, name in enumerate(leaf.names):
                    module = name.format(layer=layer, expert=expert)
                    for suffix, array in module_tensors(one, part, len(leaf.names), tool).items():
                        if suffix == "weight" and isinstance(here, Dense):
                            array = array.reshape(shape)
                        tensors[f"{module}.{suffix}"] = np.asarray(array)
    return tensors


def module_tensors(weight: Any, part: int, parts: int, tool: str) -> Tensors:
    """The tensors of one part of one matrix."""
    compressed = tool == "compressed-tensors"

    def rows(array: Any) -> np.ndarray:
        return np.split(np.asarray(array), parts)[part]

    match weight:
        case Dense(w):
            return {"weight": rows(w)}
        case Nvfp4(q, block_scale, scale):
            scale = np.asarray(scale)[part]
            if compressed:
                return {
                    "weight_packed": rows(q),
                    "weight_scale": rows(block_scale),
                    "weight_global_scale": np.array([1 / scale], np.float32),
                    "input_global_scale": np.array([3.0], np.float32),
                }
            return {
                "weight": rows(q),
                "weight_scale": rows(block_scale),
                "weight_scale_2": np.array(scale, np.float32),
                "input_scale": np.array(0.5, np.float32),
            }
        case Fp8(q, scale, input_scale):
            scale = rows(scale)
            if scale.size > 1:
                scale = scale[:, None]
            if compressed:
                scale = scale.astype(ml_dtypes.bfloat16)
            elif scale.size == 1:
                scale = scale.reshape(())
            found = {"weight": rows(q), "weight_scale": scale}
            if input_scale is not None:
                found["input_scale"] = np.asarray(input_scale)
            return found
    raise TypeError(type(weight))


def write(
    directory: Path,
    tensors: Tensors,
    config: dict[str, Any] = TINY_DICT,
    shard_bytes: int = 10**9,
) -> Path:
    """A checkpoint directory of these tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory, tensors, shard_bytes)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def assert_same(one: Any, other: Any) -> None:
    """Equal trees, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    paths = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(paths, jax.tree.leaves(other), strict=True):
        a, b, where = np.asarray(a), np.asarray(b), jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), where
