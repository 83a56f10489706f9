"""The engine's own format: parameters as they lie on the device, stored with Orbax.

A directory holds `config.json` and the tokeniser's files like any checkpoint, the arrays under
`params/`, and `jaxinfer.json`, which says how the arrays make weights. Restoring is a straight copy
to the device: no repacking, no names.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from checkpoints.files import CheckpointError
from checkpoints.locate import COMPANIONS, MANIFEST, find
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Matrix, Params, Vector, leaves, structure
from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer

VERSION = 1
"""Raised whenever the layout of a weight in memory changes."""

REMEDY = "make it again from the safetensors checkpoint"

_ARRAYS = "params"
_TYPES: Mapping[str, type] = {"Dense": Dense, "Fp8": Fp8, "Nvfp4": Nvfp4}


def save(directory: str | Path, cfg: Config, params: Params, source: str | Path) -> None:
    """Store parameters for a fast restart.

    Args:
        directory: does not exist, or is empty.
        cfg: of the parameters, as `load` returned it.
        params: on any device.
        source: the checkpoint they came from; its `config.json` and tokeniser are copied.

    Raises CheckpointError if the directory holds something.
    """
    directory, source = Path(directory).absolute(), Path(source)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty; give a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, jax.Array] = {}
    described = {
        path: _describe(path, _at(params, path), arrays) for path, _ in leaves(structure(cfg))
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / _ARRAYS, arrays)
    shutil.copyfile(source / "config.json", directory / "config.json")
    for name in COMPANIONS:
        path = find(source, name)
        if path is not None:
            shutil.copyfile(path, directory / name)
    manifest = {
        "version": VERSION,
        "config": _fingerprint(cfg),
        "mtp": cfg.mtp_layers > 0,
        "vision": cfg.vision is not None,
        "parameters": described,
        "arrays": {
            name: {"shape": list(array.shape), "dtype": array.dtype.name}
            for name, array in arrays.items()
        },
    }
    # Written last: a directory without it is not a checkpoint.
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def load(directory: str | Path, *, vision: bool = True) -> tuple[Config, Params]:
    """Restore what `save` stored, straight to JAX's default device.

    Args:
        directory: written by `save`.
        vision: False to leave the vision tower out.

    Raises CheckpointError if it is of another version, or damaged.
    """
    directory = Path(directory).absolute()
    cfg, tree, manifest = _open(directory, vision)
    described: dict[str, Any] = manifest["parameters"]
    wanted = [name for path, _ in leaves(tree) for name in _names(path, described[path])]
    arrays = _restore(directory / _ARRAYS, wanted, manifest["arrays"])
    return cfg, _assemble(tree, described, arrays)


def shapes(directory: str | Path) -> tuple[Config, Params]:
    """What `load` would return, with `jax.ShapeDtypeStruct` for arrays; reads the manifest only."""
    cfg, tree, manifest = _open(Path(directory), vision=True)
    arrays = {
        name: jax.ShapeDtypeStruct(tuple(array["shape"]), jnp.dtype(array["dtype"]))
        for name, array in manifest["arrays"].items()
    }
    return cfg, _assemble(tree, manifest["parameters"], arrays)


def _open(directory: Path, vision: bool) -> tuple[Config, Params, dict[str, Any]]:
    """Configuration and structure of what is to be loaded, and the manifest."""
    manifest = _manifest(directory / MANIFEST)
    cfg = Config.read(directory)
    if not manifest["mtp"]:
        cfg = dataclasses.replace(cfg, mtp_layers=0)
    if not manifest["vision"]:
        cfg = dataclasses.replace(cfg, vision=None)
    if _fingerprint(cfg) != manifest["config"]:
        raise CheckpointError(
            f"{directory / 'config.json'} is not the one these arrays were laid out for; {REMEDY}"
        )
    if not vision:
        cfg = dataclasses.replace(cfg, vision=None)
    return cfg, structure(cfg), manifest


def _assemble(tree: Params, described: Mapping[str, Any], arrays: Mapping[str, Any]) -> Params:
    values = iter([_build(path, described[path], arrays) for path, _ in leaves(tree)])
    return jax.tree.map(
        lambda _: next(values), tree, is_leaf=lambda node: isinstance(node, Matrix | Vector)
    )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
        version = manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); {REMEDY}") from error
    if version != VERSION:
        raise CheckpointError(
            f"{path} is of version {version}, this engine reads version {VERSION}; {REMEDY}"
        )
    absent = {"config", "mtp", "vision", "parameters", "arrays"} - manifest.keys()
    if absent:
        raise CheckpointError(f"{path} is damaged (no {min(absent)!r}); {REMEDY}")
    return manifest


def _fingerprint(cfg: Config) -> str:
    return hashlib.sha256(repr(cfg).encode()).hexdigest()


def _restore(
    directory: Path, names: Iterable[str], described: Mapping[str, Any]
) -> dict[str, jax.Array]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        wanted = {
            name: jax.ShapeDtypeStruct(
                tuple(described[name]["shape"]),
                jnp.dtype(described[name]["dtype"]),
                sharding=sharding,
            )
            for name in names
        }
        with ocp.PyTreeCheckpointer() as checkpointer:
            arguments = ocp.args.PyTreeRestore(
                item=wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                partial_restore=True,
            )
            return checkpointer.restore(directory, args=arguments)
    except Exception as error:
        # Orbax and TensorStore raise what they like on damaged files.
        raise CheckpointError(f"{directory} cannot be restored ({error}); {REMEDY}") from error


def _describe(path: str, value: Any, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """How a parameter is made of arrays, which are added to `arrays`."""
    if isinstance(value, PerLayer):
        groups = [_describe(f"{path}.{i}", g, arrays) for i, g in enumerate(value.groups)]
        return {"type": "PerLayer", "groups": groups, "where": [list(w) for w in value.where]}
    if isinstance(value, Dense | Fp8 | Nvfp4):
        found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        present = [name for name, array in found.items() if array is not None]
        arrays |= {f"{path}.{name}": found[name] for name in present}
        return {"type": type(value).__name__, "arrays": present}
    arrays[path] = value
    return {"type": "array"}


def _names(path: str, described: Mapping[str, Any]) -> list[str]:
    """The arrays that a parameter is made of."""
    names: list[str] = []
    _walk(path, described, lambda name: names.append(name))
    return names


def _build(path: str, described: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    return _walk(path, described, lambda name: arrays[name])


def _walk(path: str, described: Mapping[str, Any], array: Callable[[str], Any]) -> Any:
    """A parameter put together again, with `array` called for each of its arrays by name."""
    match described["type"]:
        case "array":
            return array(path)
        case "PerLayer":
            groups = tuple(
                _walk(f"{path}.{i}", group, array) for i, group in enumerate(described["groups"])
            )
            return PerLayer(groups, tuple((g, i) for g, i in described["where"]))
        case name if name in _TYPES:
            cls = _TYPES[name]
            fields = {
                f.name: array(f"{path}.{f.name}") if f.name in described["arrays"] else None
                for f in dataclasses.fields(cls)
            }
            return cls(**fields)
        case name:
            raise CheckpointError(f"{path} is of unknown type {name!r}; {REMEDY}")


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree
