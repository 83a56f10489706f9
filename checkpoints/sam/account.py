"""What a checkpoint of SAM holds, part by part, from the names and shapes of its tensors."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import jax

from checkpoints.files import DTYPES, Entry
from checkpoints.sam.inventory import meta, transformers
from checkpoints.sam.load import Plan, find, make_plans, read_config
from checkpoints.sam.names import TRACKER
from jaxinfer.sam.config import Config

BEYOND = "of the tracker, for video"
"""Why tensors are not read that the inventory does not list: those of `Sam3VideoModel`."""


@dataclass(frozen=True)
class Group:
    """Tensors of a checkpoint that have one use.

    Attributes:
        name: the part of `jaxinfer.sam.params.Params` that they make, or why they are not read.
        read: whether they are.
        dtypes: their element types, by falling number of tensors.
        tensors: how many.
        parameters: their elements.
        nbytes: their bytes.
    """

    name: str
    read: bool
    dtypes: tuple[str, ...]
    tensors: int
    parameters: int
    nbytes: int


def is_sam(path: Path) -> bool:
    """Whether what `checkpoints.resolve` found is SAM, by its configuration; a `.pt` file is."""
    file = path / "config.json"
    if not file.is_file():
        return any(path.glob("*.pt")) or path.suffix == ".pt"
    try:
        raw = json.loads(file.read_text())
    except ValueError:
        return False
    return isinstance(raw, dict) and str(raw.get("model_type")).startswith("sam3")


def account(path: str | Path, cfg: Config | None = None) -> tuple[Config, list[Group]]:
    """The shape of a checkpoint, and its tensors: the parts of the model, then what is not read.

    The click head is a part where the files have one that can be loaded. Arguments are those of
    `load`, which see also for what is raised.
    """
    path = Path(path).expanduser()
    cfg, source = cfg or read_config(path), find(path)
    clicks = source.layout == "meta" and any(name.startswith(TRACKER) for name in source.tensors)
    plans = make_plans(source, cfg, clicks)
    groups, used = [], set()
    for part in fields(plans):
        found = jax.tree.leaves(getattr(plans, part.name), is_leaf=lambda x: isinstance(x, Plan))
        entries = [entry for plan in found for entry in plan.parts]
        used.update(entries)
        if entries:
            groups.append(_group(part.name, entries, read=True))
    inventory = meta(cfg, source.version) if source.layout == "meta" else transformers(cfg)
    why = {
        entry: inventory[name].ignored
        for name, entry in source.tensors.items()
        if name in inventory
    }
    unread: dict[str, list[Entry]] = {}
    for entry in source.files.entries.values():
        if entry not in used:
            unread.setdefault(why.get(entry, BEYOND), []).append(entry)
    groups += [_group(reason, entries, read=False) for reason, entries in unread.items()]
    return cfg, groups


def _group(name: str, entries: Iterable[Entry], *, read: bool) -> Group:
    entries = list(entries)
    dtypes = [DTYPES[entry.dtype].name for entry in entries]
    return Group(
        name,
        read,
        tuple(sorted(set(dtypes), key=lambda dtype: -dtypes.count(dtype))),
        len(entries),
        sum(entry.size for entry in entries),
        sum(entry.nbytes for entry in entries),
    )
