"""Loading SAM: a file or directory -> configuration and parameters on the device.

Headers decide everything before a tensor is read. Then each parameter is read once, converted,
checked and sent to the device; the host holds no more than a few of them at a time.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from checkpoints.files import (
    INDEX,
    REFETCH,
    SINGLE,
    CheckpointError,
    Entry,
    TensorFiles,
    read_header,
)
from checkpoints.progress import OnProgress
from checkpoints.sam.inventory import Stored, Version, meta, published_name, transformers
from checkpoints.sam.names import (
    META_PREFIXES,
    TRACKER,
    TRANSFORMERS_PREFIXES,
    TRANSFORMERS_TRACKER,
    in_transformers,
)
from checkpoints.sam.torch_file import read_entries, read_tensor
from checkpoints.values import check
from jaxinfer.sam import clicks as click_head
from jaxinfer.sam.config import SAM3, Config, ConfigError, from_dict
from jaxinfer.sam.leaves import Leaf
from jaxinfer.sam.params import Params
from jaxinfer.sam.structure import structure

READERS = 4
"""Threads that read and convert; each holds one parameter."""

LISTED = 10
"""Problems spelt out in one error."""

FLOATS = ("F32", "BF16", "F16")
"""Types that parameters may be stored in."""

Layout = Literal["meta", "transformers"]


@dataclass(frozen=True)
class Source:
    """An open checkpoint: its tensors by their names in the inventory.

    Attributes:
        files: to read from.
        layout: whose names the files have.
        tensors: by names of `inventory.meta` or `inventory.transformers`.
        where: for messages.
    """

    files: TensorFiles
    layout: Layout
    tensors: Mapping[str, Entry]
    where: str

    @property
    def version(self) -> Version:
        """Of the model that Meta's files hold, by the names of its tracker."""
        newer = ("tracker.model.", "backbone.vision_backbone.interactive_convs.")
        return "3.1" if any(name.startswith(newer) for name in self.tensors) else "3"


@dataclass(frozen=True)
class Plan:
    """A parameter: `parts` are the tensors that, one after another, are Meta's."""

    leaf: Leaf
    parts: tuple[Entry, ...]


def load(
    path: str | Path,
    *,
    clicks: bool = False,
    dtype: DTypeLike = jnp.float32,
    cfg: Config | None = None,
    progress: OnProgress | None = None,
) -> tuple[Config, Params]:
    """Load SAM 3 or 3.1 onto JAX's default device.

    Reads Meta's `.pt` files without running what is pickled in them, and safetensors (one file or
    shards) with Meta's names or those of transformers' `Sam3Model` and `Sam3VideoModel`.

    Args:
        path: a `.pt` or `.safetensors` file, or a directory with safetensors or one `.pt` file.
        clicks: also load the click head, which Meta's files have.
        dtype: of the parameters, whatever they are stored in: float32, bfloat16 or float16.
        cfg: the model's shape. Default: `config.json` beside safetensors of transformers, else
            `SAM3`, the shape of both published models.
        progress: called as bytes have been read.

    Returns the shape and the parameters.

    Raises CheckpointError naming tensor, file and remedy if the checkpoint is not sound,
    ConfigError if its configuration is not, FileNotFoundError if there is none.
    """
    path = Path(path).expanduser()
    source = find(path)
    if cfg is None:
        cfg = _shape(path, source)
    plans = make_plans(source, cfg, clicks)
    found, treedef = jax.tree.flatten(plans, is_leaf=lambda node: isinstance(node, Plan))
    total = sum(part.nbytes for plan in found for part in plan.parts)
    done = 0
    arrays = []
    with source.files as files, ThreadPoolExecutor(READERS) as pool:
        futures = [pool.submit(_read, files, plan, np.dtype(dtype)) for plan in found]
        try:
            for plan, future in zip(found, futures, strict=True):
                arrays.append(future.result())
                done += sum(part.nbytes for part in plan.parts)
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return cfg, treedef.unflatten(arrays)


def find(path: Path) -> Source:
    """The tensors of a file or a directory. Raises CheckpointError, FileNotFoundError."""
    if path.is_dir() and not any((path / name).is_file() for name in (SINGLE, INDEX)):
        found = sorted(path.glob("*.pt"))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise CheckpointError(f"{path} has several .pt files: {names}. Give one of them")
        path = found[0] if found else path
    if path.is_dir():
        files = TensorFiles(path)
    elif path.is_file():
        is_safe = path.suffix == ".safetensors"
        files = TensorFiles(path.parent, read_header(path) if is_safe else read_entries(path))
    else:
        raise FileNotFoundError(f"{path} does not exist; give a .pt file or a directory")
    layout = _layout(files)
    prefixes = META_PREFIXES if layout == "meta" else TRANSFORMERS_PREFIXES
    tensors: dict[str, Entry] = {}
    for entry in files.entries.values():
        if layout == "transformers" and entry.name.startswith(TRANSFORMERS_TRACKER):
            continue
        name = _canonical(entry.name, prefixes)
        other = tensors.setdefault(name, entry)
        if other is not entry:
            raise CheckpointError(
                f"{entry} and {other} are both {name}; remove one of them from the checkpoint"
            )
    return Source(files, layout, tensors, str(path))


def read_config(path: str | Path) -> Config:
    """The shape of a checkpoint, for which its tensors' names are read; raises as `load` does."""
    path = Path(path).expanduser()
    return _shape(path, find(path))


def _shape(path: Path, source: Source) -> Config:
    """What `config.json` describes; with Meta's names, the shape of the published models."""
    if source.layout == "meta":
        return SAM3
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; fetch it, it belongs to the checkpoint")
    try:
        return from_dict(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def make_plans(source: Source, cfg: Config, clicks: bool) -> Params:
    """The parameter tree with a `Plan` for each array. Raises CheckpointError listing problems."""
    inventory = meta(cfg, source.version) if source.layout == "meta" else transformers(cfg)
    wanted = structure(cfg)
    if clicks:
        wanted = replace(wanted, clicks=_click_head(source, cfg))
    problems = _Problems(source)
    used: set[str] = set()

    def plan(leaf: Leaf) -> Plan:
        parts = []
        for name, shape in _stored(source.layout, leaf):
            used.add(name)
            entry = source.tensors.get(name)
            if entry is None:
                file_name = published_name(name) if source.layout == "meta" else name
                problems.add("missing", f"{file_name} (wanted {list(shape)})")
                continue
            if entry.shape != shape:
                problems.add("misshapen", f"{entry} should be {list(shape)}")
            if entry.dtype not in FLOATS:
                problems.add("mistyped", f"{entry} should be one of {', '.join(FLOATS)}")
            parts.append(entry)
        return Plan(leaf, tuple(parts))

    plans = jax.tree.map(plan, wanted)
    for name in source.tensors.keys() - used - _ignored(inventory):
        problems.add("extra", str(source.tensors[name]))
    problems.report()
    return plans


class _Problems:
    """What is wrong with the tensors, gathered so that one error tells all."""

    REMEDIES: Mapping[str, str] = {
        "missing": "fetch the whole checkpoint again; no part of the model is optional",
        "misshapen": "give the configuration that belongs to these files, or fetch both again",
        "mistyped": "use the checkpoint in float32, bfloat16 or float16; quantised ones are not "
        "read",
        "extra": "remove tensors that SAM 3 does not have; an adapter must be merged first",
    }

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[tuple[str, str]] = []

    def add(self, kind: str, what: str) -> None:
        """Note a problem; `kind` is a key of `REMEDIES`."""
        self.found.append((kind, what))

    def report(self) -> None:
        """Raise CheckpointError if there are any."""
        if not self.found:
            return
        order = list(self.REMEDIES)
        found = sorted(self.found, key=lambda problem: (order.index(problem[0]), problem[1]))
        lines = [f"  {kind}: {what}" for kind, what in found[:LISTED]]
        if len(found) > LISTED:
            lines.append(f"  and {len(found) - LISTED} more")
        kinds = dict.fromkeys(kind for kind, _ in found)
        raise CheckpointError(
            f"{len(found)} problem(s) with the tensors of {self.source.where}:\n"
            + "\n".join(lines)
            + "\nRemedy: "
            + "; ".join(self.REMEDIES[kind] for kind in kinds)
        )


def _layout(files: TensorFiles) -> Layout:
    names = files.entries.keys()
    if any(name.startswith(("detector.", "sam3_model.")) for name in names):
        return "meta"
    if any(name.startswith(("detector_model.", "vision_encoder.")) for name in names):
        return "transformers"
    first = f" (its first tensor is {next(iter(names))})" if names else ""
    raise CheckpointError(
        f"{files.directory} holds no SAM 3 model{first}: no tensor is named as in Meta's "
        "sam3.pt or in transformers' Sam3Model; give one of those"
    )


def _canonical(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, new in prefixes.items():
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return name


def _stored(layout: Layout, leaf: Leaf) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a parameter is made of."""
    if layout == "meta":
        yield leaf.name, leaf.shape
    else:
        yield from in_transformers(leaf)


def _ignored(inventory: Mapping[str, Stored]) -> set[str]:
    return {name for name, tensor in inventory.items() if tensor.ignored}


def _click_head(source: Source, cfg: Config) -> Any:
    """The structure of the click head that the files have, which differs between 3 and 3.1."""
    if source.layout == "meta" and any(name.startswith(TRACKER) for name in source.tensors):
        return click_head.structure(cfg, source.version)
    raise CheckpointError(
        f"{source.where} has no click head that could be read; give Meta's sam3.pt or "
        "sam3.1_multiplex.pt, or load it without clicks"
    )


def _read(files: TensorFiles, plan: Plan, dtype: np.dtype) -> jax.Array:
    """One parameter, checked, on the device."""
    leaf = plan.leaf
    parts = []
    for entry in plan.parts:
        part = read_tensor(files, entry).astype(dtype, copy=False)
        problem = check(np.ravel(part), "finite")
        if problem:
            raise CheckpointError(f"{entry} {problem}; the file is damaged: {REFETCH}")
        parts.append(part)
    stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if stored.shape != leaf.shape:
        # transformers' position table, which has no slot for the class token.
        stored = np.pad(stored, ((0, 0), (1, 0), (0, 0)))
    return jax.device_put(np.ascontiguousarray(leaf.arrange(stored)))
