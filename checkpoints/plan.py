"""From headers to a plan: which tensors fill which array, and whether that comes out even.

The plan is the parameter tree with an `ArrayPlan` for each array. Because stacks are row-major and
a stacked array's axes are (layer, expert, part, row, column), every array is the concatenation of
whole tensors in order: a plan is a list.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints.files import CheckpointError, Entry
from checkpoints.formats import (
    FLOATS,
    KV_SCALES,
    SUFFIXES,
    FormatError,
    Quantization,
    Stored,
    expect,
    stored,
)
from checkpoints.names import by_canonical_name, stored_shape
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import (
    VISUAL,
    Format,
    Matrix,
    Params,
    Vector,
    leaf_shapes,
    structure,
)
from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer

LISTED = 10
"""Problems spelt out in one error."""

_IGNORED = ("rotary_emb.inv_freq",)
"""Endings of tensors that some exporters write and that the configuration already determines."""


class Piece(NamedTuple):
    """One tensor on its way into an array; `divides`: its reciprocal is what is wanted."""

    entry: Entry
    divides: bool = False


@dataclass(frozen=True)
class ArrayPlan:
    """An array made of whole tensors, one after another in row-major order.

    Attributes:
        shape: of the array.
        dtype: of the array.
        holds: what its values must be: "finite" values, "e4m3" values, "codes", "scales"
            (positive) or "block scales" (positive E4M3).
        pieces: the tensors, in order.
        parts: if more than 1, the tensors make `[*shape, parts]` and the largest part is kept.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    holds: str
    pieces: tuple[Piece, ...]
    parts: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """What a load will do.

    Attributes:
        config: of the model as it will be loaded (without MTP or vision where these are left out).
        arrays: the parameter tree with an `ArrayPlan` for each array.
        kv_scales: scales for a quantised KV cache, which are not used.
        warnings: what a user should know.
    """

    config: Config
    arrays: Params
    kv_scales: tuple[Entry, ...]
    warnings: tuple[str, ...]


def make_plan(
    cfg: Config,
    entries: Mapping[str, Entry],
    quantization: Quantization | None = None,
    vision: bool = True,
) -> Plan:
    """Match the tensors of a checkpoint with the parameters of a model.

    Args:
        cfg: the model.
        entries: the checkpoint's tensors.
        quantization: what the configuration says about formats.
        vision: False to leave the vision tower out.

    Raises CheckpointError listing all that is missing, extra, misshapen, mistyped or in a format
    that cannot be read. Reads no tensor.
    """
    if quantization is not None and quantization.problem:
        raise CheckpointError(_unreadable(quantization, entries))
    by_name = by_canonical_name(entries.values())
    cfg, unused, warnings = _without_absent_parts(cfg, by_name, vision)
    matching = _Matching(cfg, by_name)
    arrays = jax.tree.map(
        matching.leaf, structure(cfg), is_leaf=lambda node: isinstance(node, Matrix | Vector)
    )
    kv_scales = []
    for name, entry in by_name.items():
        if name.rpartition(".")[2] in KV_SCALES and ".self_attn." in name:
            kv_scales.append(entry)
        elif entry.name not in matching.used and not (
            name.startswith(unused) or name.endswith(_IGNORED)
        ):
            matching.problem("extra", str(entry))
    matching.raise_problems()
    return Plan(cfg, arrays, tuple(kv_scales), warnings)


def _unreadable(quantization: Quantization, entries: Mapping[str, Entry]) -> str:
    quantised = [e for name, e in entries.items() if "weight_scale" in name or "qweight" in name]
    tensor = str(next(iter(quantised or entries.values()), "no tensor at all"))
    return (
        f"quant_method {quantization.method!r} of config.json: {quantization.problem} is not "
        f"supported (first such tensor: {tensor}). Use the bf16 checkpoint, or one in ModelOpt or "
        "compressed-tensors NVFP4 or FP8"
    )


def _without_absent_parts(
    cfg: Config, by_name: Mapping[str, Entry], vision: bool
) -> tuple[Config, tuple[str, ...], tuple[str, ...]]:
    """The model that this checkpoint holds; prefixes of tensors not wanted; warnings."""
    unused, warnings = [], []
    has_mtp = any(name.startswith("mtp.") for name in by_name)
    has_vision = any(name.startswith(VISUAL) for name in by_name)
    if cfg.mtp_layers and not has_mtp:
        cfg = replace(cfg, mtp_layers=0)
        warnings.append(
            "config.json has an MTP layer, the files have no mtp.* tensor: loaded without MTP, so "
            "without its speculative decoding"
        )
    elif has_mtp and not cfg.mtp_layers:
        unused.append("mtp.")
        warnings.append("the files have mtp.* tensors, config.json no MTP layer: not loaded")
    if not vision:
        cfg = replace(cfg, vision=None)
        unused.append(VISUAL)
    elif cfg.vision is not None and not has_vision:
        cfg = replace(cfg, vision=None)
        warnings.append(
            "config.json has a vision_config, the files have no visual tensor: loaded without "
            "vision, so for text only"
        )
    elif has_vision and cfg.vision is None:
        unused.append(VISUAL)
        warnings.append("the files have visual tensors, config.json no vision_config: not loaded")
    return cfg, tuple(unused), tuple(warnings)


class _Matching:
    """The tensors found so far for the parameters, and what was wrong with them."""

    def __init__(self, cfg: Config, by_name: Mapping[str, Entry]) -> None:
        self.cfg = cfg
        self.by_name = by_name
        self.used: set[str] = set()
        self.problems: list[tuple[str, str]] = []

    def problem(self, kind: str, message: str) -> None:
        self.problems.append((kind, message))

    def raise_problems(self) -> None:
        """Raise CheckpointError if anything was wrong."""
        if not self.problems:
            return
        lines = [f"  {kind}: {message}" for kind, message in self.problems[:LISTED]]
        if len(self.problems) > LISTED:
            lines.append(f"  and {len(self.problems) - LISTED} more")
        kinds = {kind for kind, _ in self.problems}
        remedies = []
        if "missing" in kinds:
            remedies.append("fetch the checkpoint again: files are missing or of another version")
        if "extra" in kinds:
            remedies.append(
                "check that config.json belongs to these files: they hold tensors that this "
                "architecture does not have"
            )
        if "unreadable" in kinds:
            remedies.append("check that the checkpoint is whole and in a supported format")
        files = sorted({entry.file for entry in self.by_name.values()})
        where = f"{files[0].parent} ({len(files)} files)" if files else "a checkpoint without any"
        raise CheckpointError(
            f"{len(self.problems)} problem(s) with the tensors of {where}:\n"
            + "\n".join(lines)
            + "\nRemedy: "
            + "; ".join(remedies)
        )

    def leaf(self, leaf: Matrix | Vector) -> Any:
        """The arrays of one parameter, as plans; None (with a problem noted) if that fails."""
        if isinstance(leaf, Vector):
            return self._vector(leaf)
        layers = {layer: self._layer(leaf, layer) for layer in leaf.layers or (None,)}
        if not all(layers.values()):
            return None
        formats: dict[int | None, Format] = {k: found[0].format for k, found in layers.items()}
        target = leaf_shapes(leaf, self.cfg.dtype, lambda _, layer: formats[layer])
        if not isinstance(target, PerLayer):
            return _arrays(target, [s for found in layers.values() for s in found], leaf)
        groups = []
        for number, group in enumerate(target.groups):
            mine = [
                found
                for found, (where, _) in zip(layers.values(), target.where, strict=True)
                if where == number
            ]
            groups.append(_arrays(group, [s for found in mine for s in found], leaf))
        return PerLayer(tuple(groups), target.where)

    def _vector(self, leaf: Vector) -> ArrayPlan | None:
        pieces = []
        shape = stored_shape(self.cfg, leaf)
        for layer in leaf.layers or (None,):
            name = leaf.name.format(layer=layer)
            entry = self.by_name.get(name)
            if entry is None:
                self.problem("missing", f"{name} (wanted {list(shape)})")
                continue
            self.used.add(entry.name)
            try:
                expect(entry, FLOATS, *dict.fromkeys((shape, leaf.shape)))
            except FormatError as error:
                self.problem("unreadable", str(error))
            pieces.append(Piece(entry))
        target = leaf_shapes(leaf, self.cfg.dtype, lambda *_: "dense")
        return ArrayPlan(target.shape, np.dtype(target.dtype), "finite", tuple(pieces))

    def _layer(self, leaf: Matrix, layer: int | None) -> list[Stored]:
        """A layer's modules in the order of the stack; empty (with a problem noted) on failure."""
        if leaf.fused:
            fused = self._fused(leaf, leaf.fused.format(layer=layer))
            if fused is not None:
                return fused
        shape = stored_shape(self.cfg, leaf)
        modules = []
        for expert in range(leaf.experts or 1):
            for name in leaf.names:
                module = self._module(name.format(layer=layer, expert=expert), shape)
                if module is not None:
                    modules.append(module)
        if len(modules) < (leaf.experts or 1) * len(leaf.names):
            return []
        kinds = {module.format: module for module in modules}
        if len(kinds) > 1:
            (_, one), (_, other) = list(kinds.items())[:2]
            self.problem(
                "unreadable",
                f"{one.weight} is {one.format}, {other.weight} is {other.format}: experts of a "
                "layer, and its gate and up projections, must be in one format",
            )
            return []
        return modules

    def _fused(self, leaf: Matrix, name: str) -> list[Stored] | None:
        """The tensor that holds all experts of a layer; None if the checkpoint has no such."""
        entry = self.by_name.get(name) or self.by_name.get(name + ".weight")
        if entry is None:
            return None
        self.used.add(entry.name)
        try:
            expect(entry, FLOATS, (leaf.experts, leaf.rows, leaf.cols))
        except FormatError as error:
            self.problem("unreadable", str(error))
            return []
        return [Stored("dense", entry)]

    def _module(self, module: str, shape: tuple[int, ...]) -> Stored | None:
        found = {
            suffix: entry
            for suffix in SUFFIXES
            if (entry := self.by_name.get(f"{module}.{suffix}")) is not None
        }
        if not found:
            self.problem("missing", f"{module}.weight (wanted {list(shape)})")
            return None
        self.used.update(entry.name for entry in found.values())
        try:
            return stored(found, shape)
        except FormatError as error:
            self.problem("unreadable", str(error))
            return None


def _arrays(target: Any, modules: list[Stored], leaf: Matrix) -> Any:
    """A weight whose arrays are plans, from its shapes and its modules in order."""
    match target:
        case Dense(w):
            return Dense(_array(w, "finite", (Piece(m.weight) for m in modules)))
        case Nvfp4(q, block_scale, scale):
            return Nvfp4(
                _array(q, "codes", (Piece(m.weight) for m in modules)),
                _array(block_scale, "block scales", _pieces(modules, "block_scale")),
                _array(scale, "scales", _pieces(modules, "scale")),
            )
        case Fp8(q, scale, input_scale):
            inputs = None
            if input_scale is not None:
                inputs = _array(input_scale, "scales", _pieces(modules, "input_scale"))
                inputs = replace(inputs, parts=len(leaf.names))
            return Fp8(
                _array(q, "e4m3", (Piece(m.weight) for m in modules)),
                _array(scale, "scales", _pieces(modules, "scale")),
                inputs,
            )
    raise TypeError(f"no plan for {type(target).__name__}")


def _array(target: Any, holds: str, pieces: Iterator[Piece]) -> Any:
    return ArrayPlan(target.shape, np.dtype(target.dtype), holds, tuple(pieces))


def _pieces(modules: list[Stored], what: str) -> Iterator[Piece]:
    return (Piece(getattr(m, what), m.divides and what == "scale") for m in modules)
