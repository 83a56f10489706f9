"""Quantising a dense checkpoint to NVFP4 and FP8, in the layout that ModelOpt writes.

Max calibration needs nothing but the weights. Static FP8 activations (W8A8) need the inputs' range
as well: the caller may give it, measured on some text (`calibrate`). Without it the FP8 modules are
written without `input_scale`, and such modules are read as FP8 weights with unquantised inputs
(W8A16).
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import arithmetic
from checkpoints.files import DTYPES, INDEX, CheckpointError, Entry, TensorFiles
from checkpoints.load import quantization
from checkpoints.locate import COMPANIONS, find
from checkpoints.names import by_canonical_name
from checkpoints.plan import make_plan
from checkpoints.progress import OnProgress
from checkpoints.write import Output, ShardWriter
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import VISUAL, Format, FormatOf, Matrix, leaves, nvidia_mix, structure
from pallas_kernels.weights import NVFP4_BLOCK

WORKERS = 8
SHARD_BYTES = 5 * 10**9


def experts_only(matrix: Matrix, layer: int | None) -> Format:
    """Routed experts in NVFP4, all else dense."""
    routed = matrix.experts and not matrix.module.startswith("mtp.")
    return "nvfp4" if routed else "dense"


def everything(matrix: Matrix, layer: int | None) -> Format:
    """All that `nvidia_mix` quantises, all of it in NVFP4."""
    return "dense" if nvidia_mix(matrix, layer) == "dense" else "nvfp4"


RECIPES: Mapping[str, FormatOf] = {
    "nvidia-mix": nvidia_mix,
    "experts-only": experts_only,
    "all": everything,
}
"""Router, gates, small projections, norms, embeddings, MTP and vision stay dense in all of them."""


def quantize(
    src: str | Path,
    dst: str | Path,
    recipe: str,
    *,
    input_scales: Mapping[str, float] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: OnProgress | None = None,
) -> None:
    """Write a quantised copy of a dense checkpoint.

    Experts are written one by one whether or not the source fuses them; tensors that stay dense
    are copied byte for byte. Host memory stays near the largest tensor.

    Args:
        src: a dense safetensors checkpoint.
        dst: a directory that does not exist or is empty.
        recipe: a key of `RECIPES`.
        input_scales: the static scale (largest input / 448) of modules, by published name.
        shard_bytes: largest size of a file.
        progress: called with bytes of the source that are done and bytes in all.

    Raises CheckpointError if the source is not sound or not dense, has a weight that is not finite,
    or `dst` holds something.
    """
    src, dst = Path(src), Path(dst)
    if recipe not in RECIPES:
        raise CheckpointError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise CheckpointError(f"{dst} is not empty; give a new directory")
    files = TensorFiles(src)
    plan = make_plan(Config.read(src), files.entries, quantization(src))
    _must_be_dense(plan.arrays)
    work = _Work(plan.config, files, RECIPES[recipe], dict(input_scales or {}))
    jobs = work.jobs()
    total = sum(job.nbytes for job in jobs)
    dst.mkdir(parents=True, exist_ok=True)
    with (
        files,
        ShardWriter(dst, (job.outputs for job in jobs), shard_bytes) as writer,
        ThreadPoolExecutor(WORKERS) as pool,
    ):

        def run(job: "_Job") -> int:
            for name, values in job.run():
                writer.write(name, values)
            return job.nbytes

        done = 0
        try:
            for nbytes in pool.map(run, jobs):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _write_rest(src, dst, work.description())


def _must_be_dense(arrays: Any) -> None:
    for array in jax.tree.leaves(arrays):
        if array.holds != "finite":
            raise CheckpointError(
                f"{array.pieces[0].entry} is quantised already; quantise from the bf16 checkpoint"
            )


@dataclass(frozen=True)
class _Job:
    """Tensors that are made together; `nbytes` of the source are read for them."""

    outputs: tuple[Output, ...]
    nbytes: int
    run: Callable[[], Iterator[tuple[str, np.ndarray]]]
    order: tuple[str, int]


@dataclass(frozen=True)
class _Part:
    """A matrix `[rows, cols]` of the source: a whole tensor, or a run of rows of a fused one."""

    module: str
    entry: Entry
    start: int
    shape: tuple[int, int]


@dataclass
class _Work:
    """What becomes of each tensor of the source."""

    cfg: Config
    files: TensorFiles
    recipe: FormatOf
    input_scales: dict[str, float]
    quantised: dict[str, Format] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)

    def jobs(self) -> list[_Job]:
        """All jobs, in the order in which the source stores what they read."""
        by_name = by_canonical_name(self.files.entries.values())
        taken: set[str] = set()
        jobs: list[_Job] = []
        for _, leaf in leaves(structure(self.cfg)):
            if not isinstance(leaf, Matrix):
                continue
            for layer in leaf.layers or (None,):
                kind = self.recipe(leaf, layer)
                self._describe(leaf, layer, kind)
                if kind == "dense":
                    continue
                _check_blocks(leaf, kind)
                for parts in _parts(leaf, layer, by_name):
                    taken.update(part.entry.name for part in parts)
                    jobs.append(self._quantising(parts, kind))
        unknown = self.input_scales.keys() - {
            output.name.removesuffix(".weight") for job in jobs for output in job.outputs
        }
        if unknown:
            raise CheckpointError(
                f"input_scales names {min(unknown)}, which recipe does not quantise"
            )
        for name, entry in by_name.items():
            if entry.name not in taken:
                jobs.append(self._copying(name, entry))
        return sorted(jobs, key=lambda job: job.order)

    def _quantising(self, parts: list[_Part], kind: Format) -> _Job:
        outputs = []
        for part in parts:
            rows, cols = part.shape
            if kind == "nvfp4":
                outputs += [
                    Output(part.module + ".weight", "U8", (rows, cols // 2)),
                    Output(part.module + ".weight_scale", "F8_E4M3", (rows, cols // NVFP4_BLOCK)),
                    Output(part.module + ".weight_scale_2", "F32", ()),
                ]
            else:
                outputs += [
                    Output(part.module + ".weight", "F8_E4M3", part.shape),
                    Output(part.module + ".weight_scale", "F32", ()),
                ]
            if part.module in self.input_scales:
                outputs.append(Output(part.module + ".input_scale", "F32", ()))
        nbytes = sum(math.prod(p.shape) * DTYPES[p.entry.dtype].itemsize for p in parts)
        first = parts[0]
        return _Job(
            tuple(outputs),
            nbytes,
            partial(self._quantise, parts, kind),
            (first.entry.file.name, first.entry.offset + first.start),
        )

    def _quantise(self, parts: list[_Part], kind: Format) -> Iterator[tuple[str, np.ndarray]]:
        weights = [self._read(part) for part in parts]
        largest = [arithmetic.amax(weight) for weight in weights]
        for part, amax in zip(parts, largest, strict=True):
            if not np.isfinite(amax):
                raise CheckpointError(
                    f"{part.entry} is not finite in {part.module}; fetch it again"
                )
        for part, weight in zip(parts, weights, strict=True):
            if kind == "nvfp4":
                # Gate and up are one product, so that they are given one global scale.
                q, block_scale, scale = arithmetic.nvfp4(weight, max(largest))
                yield part.module + ".weight_scale", block_scale
                yield part.module + ".weight_scale_2", np.array(scale, np.float32)
            else:
                q, scale = arithmetic.fp8(weight)
                yield part.module + ".weight_scale", np.array(scale, np.float32)
            yield part.module + ".weight", q
            if part.module in self.input_scales:
                value = np.array(self.input_scales[part.module], np.float32)
                yield part.module + ".input_scale", value

    def _read(self, part: _Part) -> np.ndarray:
        stop = part.start + math.prod(part.shape)
        return self.files.read(part.entry, part.start, stop).reshape(part.shape)

    def _copying(self, name: str, entry: Entry) -> _Job:
        def run() -> Iterator[tuple[str, np.ndarray]]:
            yield name, self.files.read(entry).reshape(entry.shape)

        output = Output(name, entry.dtype, entry.shape)
        return _Job((output,), entry.nbytes, run, (entry.file.name, entry.offset))

    def _describe(self, leaf: Matrix, layer: int | None, kind: Format) -> None:
        if leaf.experts:
            modules = [leaf.names[0].partition(".{expert}")[0].format(layer=layer)]
        else:
            modules = [name.format(layer=layer) for name in leaf.names]
        if kind != "dense":
            self.quantised |= dict.fromkeys(modules, kind)
        elif leaf.names[0].startswith("mtp."):
            self.dense.append("mtp*")
        elif leaf.names[0].startswith(VISUAL):
            self.dense.append(VISUAL.rstrip(".") + "*")
        else:
            self.dense += modules

    def description(self) -> dict[str, Any]:
        """The contents of `hf_quant_config.json`."""
        algorithms = {name: _ALGORITHM[kind] for name, kind in sorted(self.quantised.items())}
        quantization: dict[str, Any]
        if len(set(self.quantised.values())) == 1:
            quantization = dict(next(iter(algorithms.values())))
        else:
            quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
        quantization["kv_cache_quant_algo"] = None
        quantization["exclude_modules"] = sorted(set(self.dense))
        return {"producer": {"name": "jaxinfer"}, "quantization": quantization}


_NVFP4 = {"quant_algo": "W4A16_NVFP4", "group_size": NVFP4_BLOCK}
_FP8 = {"quant_algo": "FP8"}
_ALGORITHM: Mapping[Format, dict[str, Any]] = {"nvfp4": _NVFP4, "fp8": _FP8, "fp8_static": _FP8}
_GROUPS: Mapping[str, dict[str, Any]] = {
    "W4A16_NVFP4": {
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    },
    "FP8": {
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
    },
}


def _parts(leaf: Matrix, layer: int | None, by_name: Mapping[str, Entry]) -> Iterator[list[_Part]]:
    """For each expert (or the one module) of a layer, the matrices that lie on one another."""
    rows = leaf.rows // len(leaf.names)
    fused = leaf.fused.format(layer=layer)
    whole = by_name.get(fused) or by_name.get(fused + ".weight") if fused else None
    for expert in range(leaf.experts or 1):
        parts = []
        for number, name in enumerate(leaf.names):
            module = name.format(layer=layer, expert=expert)
            entry = whole or by_name[module + ".weight"]
            start = (expert * leaf.rows + number * rows) * leaf.cols if whole else 0
            parts.append(_Part(module, entry, start, (rows, leaf.cols)))
        yield parts


def _check_blocks(leaf: Matrix, kind: Format) -> None:
    if kind == "nvfp4" and leaf.cols % NVFP4_BLOCK:
        raise CheckpointError(
            f"{leaf.module} has {leaf.cols} inputs, not a multiple of NVFP4's block of "
            f"{NVFP4_BLOCK}; use a recipe that leaves it dense"
        )


def _write_rest(src: Path, dst: Path, description: dict[str, Any]) -> None:
    """All files that are not weights; `config.json` last, since it makes a checkpoint of `dst`."""
    for path in sorted(src.iterdir()):
        mine = path.name in (INDEX, "config.json", "hf_quant_config.json")
        if path.is_file() and path.suffix != ".safetensors" and not mine:
            shutil.copyfile(path, dst / path.name)
    for name in COMPANIONS:
        path = find(src, name)
        if path is not None and find(dst, name) is None:
            shutil.copyfile(path, dst / name)
    text = json.dumps(description, indent=4) + "\n"
    (dst / "hf_quant_config.json").write_text(text)
    config = json.loads((src / "config.json").read_text())
    config["quantization_config"] = _for_config(description)
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _for_config(description: dict[str, Any]) -> dict[str, Any]:
    """The same facts as `config.json` holds them."""
    quantization = description["quantization"]
    layers: dict[str, dict[str, Any]] = quantization.get("quantized_layers", {})
    targets: dict[str, list[str]] = {}
    for name, algorithm in layers.items():
        targets.setdefault(algorithm["quant_algo"], []).append(name)
    if not layers:
        targets[quantization["quant_algo"]] = ["Linear"]
    groups = {
        f"group_{number}": _GROUPS[algorithm] | {"targets": names}
        for number, (algorithm, names) in enumerate(targets.items())
    }
    config = {"config_groups": groups, "ignore": quantization["exclude_modules"]}
    if layers:
        config["quantized_layers"] = layers
    config["quant_algo"] = quantization["quant_algo"]
    config["producer"] = description["producer"]
    config["quant_method"] = "modelopt"
    return config
