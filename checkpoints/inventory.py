"""What a checkpoint holds and what a decode step reads, from shapes alone."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from checkpoints.files import DTYPES
from checkpoints.names import stored_shape
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import (
    Format,
    FormatOf,
    Matrix,
    Params,
    Vector,
    all_dense,
    leaves,
    structure,
)
from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer
from pallas_kernels.weights import NVFP4_BLOCK

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Type (a key of `files.DTYPES`) and shape of each tensor by name."""

FUSED: Mapping[str, tuple[bool, bool]] = {
    "fused": (True, True),
    "fused-text": (True, False),
    "per-expert": (False, False),
}
"""Layouts: whether dense experts are one tensor a layer in the text model, and in the MTP layer.

Qwen3.6 is "fused" and so are the dense experts of what ModelOpt makes of it; Qwen3.5 is
"fused-text". Quantised experts are stored one by one in all of them.
"""

_DENSE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def inventory(cfg: Config, format_of: FormatOf = all_dense, layout: str = "fused") -> Tensors:
    """The tensors of a checkpoint of this model, as published (ModelOpt's where quantised).

    Args:
        cfg: the model.
        format_of: the format of each matrix.
        layout: a key of `FUSED`.

    Quantised modules have the `input_scale` that ModelOpt writes beside them: NVFP4 always, FP8
    where it is static.
    """
    tensors: Tensors = {}
    dense = _DENSE[cfg.dtype]
    for _, leaf in leaves(structure(cfg)):
        shape = stored_shape(cfg, leaf)
        for layer in leaf.layers or (None,):
            if isinstance(leaf, Vector):
                tensors[leaf.name.format(layer=layer)] = (dense, shape)
                continue
            kind = format_of(leaf, layer)
            in_mtp = leaf.module.startswith("mtp.")
            if leaf.fused and kind == "dense" and FUSED[layout][in_mtp]:
                fused = leaf.fused.format(layer=layer)
                tensors[fused] = (dense, (leaf.experts, leaf.rows, leaf.cols))
                continue
            for module in _modules(leaf, layer):
                for suffix, stored in _stored(kind, shape, dense):
                    tensors[f"{module}.{suffix}"] = stored
    return tensors


def nbytes(tensors: Tensors) -> int:
    """Bytes of all tensors, headers not counted."""
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors.values())


def _modules(leaf: Matrix, layer: int | None) -> Iterator[str]:
    for expert in range(leaf.experts or 1):
        for name in leaf.names:
            yield name.format(layer=layer, expert=expert)


def _stored(
    kind: Format, shape: tuple[int, ...], dense: str
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    rows, cols = shape[0], shape[-1]
    match kind:
        case "dense":
            yield "weight", (dense, shape)
        case "nvfp4":
            yield "weight", ("U8", (rows, cols // 2))
            yield "weight_scale", ("F8_E4M3", (rows, cols // NVFP4_BLOCK))
            yield "weight_scale_2", ("F32", ())
            yield "input_scale", ("F32", ())
        case "fp8" | "fp8_static" | "fp8_channel" | "fp8_channel_static":
            yield "weight", ("F8_E4M3", shape)
            yield "weight_scale", ("F32", (rows, 1) if "channel" in kind else ())
            if "static" in kind:
                yield "input_scale", ("F32", ())
        case _:
            raise ValueError(f"unknown weight format {kind!r}")


# --- accounting ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One parameter of the tree.

    Attributes:
        module: its path in the tree.
        format: "dense bfloat16", "FP8", "FP8 static", "NVFP4"; several joined by " + ".
        parameters: number of weights (scales not counted).
        nbytes: of the arrays, scales counted.
        per_token: bytes that decoding one token alone reads of it, in expectation: the chosen
            experts, one row of the embedding, nothing of vision and MTP.
    """

    module: str
    format: str
    parameters: int
    nbytes: int
    per_token: float


def account(cfg: Config, params: Params) -> list[Row]:
    """Sizes of all parameters, in tree order.

    Args:
        cfg: of the parameters.
        params: arrays, or the shapes that `jaxinfer.qwen.params.shapes` gives.
    """
    rows = []
    for path, leaf in leaves(structure(cfg)):
        value = params
        for name in path.split("."):
            value = getattr(value, name)
        size = sum(_bytes(array) for array in jax.tree.leaves(value))
        touched = size * _touched(cfg, path, leaf, 1)
        rows.append(Row(path, format_name(value), _parameters(leaf), size, touched))
    return rows


def step_bytes(cfg: Config, params: Params, batch: int) -> float:
    """Weight bytes that a decode step of `batch` tokens reads, if each chooses its experts evenly
    and independently: `E (1 - (1 - k/E)^batch)` experts a layer."""
    total = 0.0
    for row, (path, leaf) in zip(account(cfg, params), leaves(structure(cfg)), strict=True):
        total += row.nbytes * _touched(cfg, path, leaf, batch)
    return total


def format_name(value: Any) -> str:
    """How a parameter (arrays or shapes) is stored, for people."""
    match value:
        case PerLayer(groups):
            return " + ".join(format_name(group) for group in groups)
        case Nvfp4():
            return "NVFP4"
        case Fp8(input_scale=None):
            return "FP8"
        case Fp8():
            return "FP8 static"
        case Dense(w):
            return f"dense {np.dtype(w.dtype).name}"
    return f"dense {np.dtype(value.dtype).name}"


def _touched(cfg: Config, path: str, leaf: Matrix | Vector, batch: int) -> float:
    """The share of a parameter's bytes that a decode step reads."""
    if path.startswith(("vision.", "mtp.")):
        return 0.0
    if path == "embed_tokens":
        return batch / cfg.vocab_size
    if isinstance(leaf, Matrix) and leaf.experts:
        return 1 - (1 - cfg.num_experts_per_tok / cfg.num_experts) ** batch
    return 1.0


def _parameters(leaf: Matrix | Vector) -> int:
    if isinstance(leaf, Vector):
        return math.prod((*leaf.stack, *leaf.shape))
    return math.prod((*leaf.stack, leaf.rows, leaf.cols))


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize
