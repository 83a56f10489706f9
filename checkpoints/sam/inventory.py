"""Every tensor of the published files: which ones the engine wants, and why not the others."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from checkpoints.files import DTYPES
from checkpoints.sam.names import TRACKER, in_transformers
from checkpoints.sam.tracker import tracker
from jaxinfer.sam.config import Config
from jaxinfer.sam.leaves import Leaf, conv, linear, norm
from jaxinfer.sam.structure import neck, structure

Version = Literal["3", "3.1"]

VISION = "backbone.vision_backbone."


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
        dtype: a key of `files.DTYPES`.
        shape: as the file has it.
        ignored: why the image model has no use for it; "" if it is wanted.
    """

    dtype: str
    shape: tuple[int, ...]
    ignored: str = ""


def meta(cfg: Config, version: Version) -> dict[str, Stored]:
    """The tensors of `sam3.pt` or `sam3.1_multiplex.pt`, without the prefix `detector.`.

    The tracker's keep their prefix and have the published sizes whatever `cfg` says.
    """
    tensors = {leaf.name: Stored("F32", leaf.shape) for leaf in leaves(structure(cfg))}
    for why, group in _unused(cfg):
        tensors |= {leaf.name: Stored("F32", leaf.shape, why) for leaf in group}
    for why, group in _of_meta(cfg, version):
        tensors |= {leaf.name: Stored("F32", leaf.shape, why) for leaf in group}
    for name, shape in _rotary(cfg):
        tensors[name] = Stored("C64", shape, "a table that the engine computes")
    for name, shape in tracker(version).items():
        tensors[name] = Stored("F32", shape, "of the tracker, for video and clicks")
    if version == "3.1":
        for leaf in leaves(_half_scale(cfg)):
            del tensors[leaf.name]
    return tensors


def transformers(cfg: Config) -> dict[str, Stored]:
    """The tensors of `Sam3Model` by the names that it has for them."""
    tensors = {
        name: Stored("F32", shape)
        for leaf in leaves(structure(cfg))
        for name, shape in in_transformers(leaf)
    }
    for why, group in _unused(cfg):
        for leaf in group:
            tensors |= {name: Stored("F32", shape, why) for name, shape in in_transformers(leaf)}
    return tensors


def nbytes(tensors: Mapping[str, Stored]) -> int:
    """Bytes of all tensors, headers not counted."""
    return sum(math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in tensors.values())


def published_name(name: str) -> str:
    """The name in Meta's files of a tensor of `meta`."""
    return name if name.startswith(TRACKER) else f"detector.{name}"


def leaves(tree: Any) -> list[Leaf]:
    """The leaves of a tree of `Leaf`, in its order."""
    return jax.tree.leaves(tree)


def _unused(cfg: Config) -> Iterator[tuple[str, Iterable[Leaf]]]:
    """What every layout has, and text and box prompts do not need."""
    width, text = cfg.width, cfg.text.hidden_size
    head = "segmentation_head."
    yield "a level at half scale that is computed and dropped", leaves(_half_scale(cfg))
    yield (
        "CLIP's projection of the pooled text",
        [Leaf("backbone.language_backbone.encoder.text_projection", (text, text // 2))],
    )
    yield (
        "a third stage of the pixel decoder, which has two levels to add",
        leaves(
            [
                conv(f"{head}pixel_decoder.conv_layers.2", width, width, 3),
                norm(f"{head}pixel_decoder.norms.2", width),
            ]
        ),
    )
    yield "for semantic maps", leaves(conv(f"{head}semantic_seg_head", 1, width, 1))


def _of_meta(cfg: Config, version: Version) -> Iterator[tuple[str, Iterable[Leaf]]]:
    """What only Meta's files have."""
    width = cfg.width
    points = "geometry_encoder.points_"
    yield (
        "for points as exemplars, which were not trained",
        leaves(
            [
                linear(f"{points}direct_project", width, 2),
                linear(f"{points}pool_project", width, width),
                linear(f"{points}pos_enc_project", width, width),
            ]
        ),
    )
    if version == "3":
        branches = ["sam2_convs"]
        yield "of the tracker's neck", leaves(_half_scale(cfg, "sam2_convs"))
    else:
        branches = ["interactive_convs", "propagation_convs"]
    for branch in branches:
        yield "of the tracker's neck", leaves(neck(cfg, VISION + branch))


def _half_scale(cfg: Config, branch: str = "convs") -> Any:
    """The neck's fourth level."""
    root = f"{VISION}{branch}.3"
    return [
        conv(f"{root}.conv_1x1", cfg.width, cfg.trunk.hidden_size, 1),
        conv(f"{root}.conv_3x3", cfg.width, cfg.width, 3),
    ]


def _rotary(cfg: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    trunk = cfg.trunk
    for i in range(trunk.num_layers):
        side = trunk.grid if i in trunk.global_layers else trunk.window
        pairs = trunk.hidden_size // trunk.num_heads // 2
        yield f"{VISION}trunk.blocks.{i}.attn.freqs_cis", (side**2, pairs)
