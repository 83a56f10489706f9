"""The names of tensors: any published prefix -> the one prefix that `jaxinfer.qwen.params` uses."""

from collections.abc import Iterable, Mapping

from checkpoints.files import CheckpointError, Entry
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import TEXT, VISUAL, Matrix, Vector

_ROOTS: Mapping[str, str] = {
    "visual": VISUAL,
    "mtp": "mtp.",
    "lm_head": "lm_head.",
    "layers": TEXT + "layers.",
    "embed_tokens": TEXT + "embed_tokens.",
    "norm": TEXT + "norm.",
}
"""The first component of a name that says which part of the model it belongs to."""


def canonical(name: str) -> str:
    """The published name of a tensor that some exporter wrote under another prefix.

    `model.layers.0.x`, `language_model.model.layers.0.x` and `layers.0.x` all give
    `model.language_model.layers.0.x`; likewise `visual`, `mtp` and `lm_head` under any prefix. A
    name with none of these components comes back as it is.
    """
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part in _ROOTS:
            return _ROOTS[part] + ".".join(parts[position + 1 :])
    return name


def by_canonical_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Tensors by their published names. Raises CheckpointError if two claim one name."""
    found: dict[str, Entry] = {}
    for entry in entries:
        other = found.setdefault(canonical(entry.name), entry)
        if other is not entry:
            raise CheckpointError(
                f"{entry} and {other} are both {canonical(entry.name)}; remove one of them from "
                "the checkpoint"
            )
    return found


def stored_shape(cfg: Config, leaf: Matrix | Vector) -> tuple[int, ...]:
    """The shape in the published files of one tensor of a parameter, in its dense form."""
    if isinstance(leaf, Vector):
        if leaf.name.endswith("conv1d.weight"):
            return (leaf.shape[0], 1, leaf.shape[1])
        return leaf.shape
    rows = leaf.rows // len(leaf.names)
    if leaf.names[0] == VISUAL + "patch_embed.proj" and cfg.vision is not None:
        v = cfg.vision
        return (rows, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    return (rows, leaf.cols)
