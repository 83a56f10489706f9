"""The click head: points, a box or an earlier mask in, candidate masks of one object out.

It looks at the picture through a branch of the neck of its own (`embed`), so that further clicks on
a picture cost `click` only. SAM 3 and 3.1 have one architecture here, under different names, except
that SAM 3 ends the estimate of IoU with a sigmoid and 3.1 does not.
"""

import math
from dataclasses import field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxinfer.sam import click_decoder
from jaxinfer.sam.click_decoder import MAP_NORM_EPS, MaskDecoder
from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import gelu, layer_norm, linear
from jaxinfer.sam.leaves import Leaf, conv, norm, table
from jaxinfer.sam.neck import pyramid
from jaxinfer.sam.params import Linear, Neck, Norm
from jaxinfer.sam.structure import neck
from jaxinfer.tree import tree

Version = Literal["3", "3.1"]

NEGATIVE, POSITIVE, TOP_LEFT, BOTTOM_RIGHT = range(4)
NOT_A_POINT = -1
PADDING = -10

MASK_CHANNELS = 16
STABILITY_MARGIN = 0.05
STABLE = 0.98


@tree
class PromptEncoder:
    """Points and masks to tokens and maps.

    `frequencies`: `[2, D/2]`; `points`: `[1, D]` for each of the labels from `NEGATIVE` on;
    `not_a_point`, `no_mask`: `[1, D]`.
    """

    frequencies: Any
    points: tuple[Any, ...]
    not_a_point: Any
    mask1: Linear
    mask_norm1: Norm
    mask2: Linear
    mask_norm2: Norm
    mask3: Linear
    no_mask: Any


@tree
class Clicks:
    """Parameters of the click head. `no_memory`: `[1, 1, D]`, added to the coarsest features."""

    neck: Neck
    no_memory: Any
    prompt: PromptEncoder
    decoder: MaskDecoder
    version: Version = field(metadata={"static": True})


@tree
class ClickFeatures:
    """What clicks need to know of B pictures; g is the grid, D the width.

    `s0`: `[B, 4g, 4g, D/8]`, `s1`: `[B, 2g, 2g, D/4]`, `x1`: `[B, g, g, D]`.
    """

    s0: Any
    s1: Any
    x1: Any


@tree
class ClickPrompts:
    """P prompts, each for one object of one picture.

    `image`: `[P]` int32, rows of `ClickFeatures`. `points`: `[P, N, 2]` float32, x and y as parts
    of the picture's sides; N may be 0. `labels`: `[P, N]` int32: `POSITIVE` or `NEGATIVE` for a
    click, `TOP_LEFT` and `BOTTOM_RIGHT` for the corners of a box, `PADDING` for what is not to be
    seen at all, `NOT_A_POINT` for what Meta pads with, which the model sees.

    `masks`: `[P, 4g, 4g]`, logits of an earlier candidate to be refined, or None; `has_mask`: `[P]`
    bool, False where a prompt has none of them, or None if all have.
    """

    image: Any
    points: Any
    labels: Any
    masks: Any = None
    has_mask: Any = None


@tree
class Candidates:
    """Four masks for each of P prompts: the first for a prompt that is clear, the others for the
    readings of one that is ambiguous.

    `masks`: `[P, 4, 4g, 4g]` float32, logits; `iou`: `[P, 4]` float32, the estimated
    intersection over union with the object; `present`: `[P]` float32, the logit of there being an
    object.
    """

    masks: Any
    iou: Any
    present: Any


def structure(cfg: Config, version: Version) -> Clicks:
    """The tree of `Leaf` of the click head, in the names of that version's file.

    Raises:
        ValueError: there is no such version.
    """
    match version:
        case "3":
            branch, root, no_memory = "sam2_convs", "tracker.sam", "tracker.no_mem_embed"
        case "3.1":
            branch, root = "interactive_convs", "tracker.model.interactive_sam"
            no_memory = "tracker.model.interactivity_no_mem_embed"
        case _:
            known = " and ".join(get_args(Version))
            raise ValueError(f"no click head of SAM version {version!r}; there are {known}")
    return Clicks(
        neck=neck(cfg, f"backbone.vision_backbone.{branch}"),
        no_memory=table(no_memory, 1, 1, cfg.width),
        prompt=_prompt_encoder(f"{root}_prompt_encoder", cfg.width),
        decoder=click_decoder.structure(cfg, f"{root}_mask_decoder"),
        version=version,
    )


def _prompt_encoder(root: str, d: int) -> PromptEncoder:
    down = f"{root}.mask_downscaling"
    return PromptEncoder(
        frequencies=Leaf(f"{root}.pe_layer.positional_encoding_gaussian_matrix", (2, d // 2)),
        points=tuple(table(f"{root}.point_embeddings.{i}.weight", 1, d) for i in range(4)),
        not_a_point=table(f"{root}.not_a_point_embed.weight", 1, d),
        mask1=conv(f"{down}.0", MASK_CHANNELS // 4, 1, 2, "patch"),
        mask_norm1=norm(f"{down}.1", MASK_CHANNELS // 4),
        mask2=conv(f"{down}.3", MASK_CHANNELS, MASK_CHANNELS // 4, 2, "patch"),
        mask_norm2=norm(f"{down}.4", MASK_CHANNELS),
        mask3=conv(f"{down}.6", d, MASK_CHANNELS, 1),
        no_mask=table(f"{root}.no_mask_embed.weight", 1, d),
    )


def embed(params: Clicks, cfg: Config, trunk_output: jax.Array) -> ClickFeatures:
    """Features for clicks from the trunk's output `[B, g, g, trunk width]`."""
    x4, x2, x1 = pyramid(params.neck, trunk_output)
    return ClickFeatures(
        s0=linear(x4, params.decoder.conv_s0),
        s1=linear(x2, params.decoder.conv_s1),
        x1=x1 + params.no_memory.astype(x1.dtype),
    )


def click(
    params: Clicks, cfg: Config, features: ClickFeatures, prompts: ClickPrompts
) -> Candidates:
    """Candidate masks for prompts.

    Raises:
        ValueError: an earlier mask is not of the size of the candidates.
    """
    grid, size, dtype = cfg.trunk.grid, cfg.mask_size, features.x1.dtype
    if prompts.masks is not None and prompts.masks.shape[1:] != (size, size):
        got = " x ".join(map(str, prompts.masks.shape[1:]))
        raise ValueError(
            f"a mask to be refined must be {size} x {size}, as the candidates are; got {got}"
        )
    tokens, seen = _tokens(params.prompt, cfg, prompts)
    centres = (jnp.arange(grid) + 0.5) / grid
    cells = jnp.stack(jnp.meshgrid(centres, centres), axis=-1)
    masks, iou, present = click_decoder.decode(
        params.decoder,
        cfg,
        image=features.x1[prompts.image] + _mask_map(params.prompt, prompts, dtype),
        positions=encode_positions(params.prompt.frequencies, cells).astype(dtype),
        s1=features.s1[prompts.image],
        s0=features.s0[prompts.image],
        prompt=tokens.astype(dtype),
        seen=seen,
    )
    return Candidates(masks, jax.nn.sigmoid(iou) if params.version == "3" else iou, present)


def best(
    candidates: Candidates, ambiguous: jax.Array | bool = False
) -> tuple[jax.Array, jax.Array]:
    """One mask `[P, 4g, 4g]` for each prompt, logits, and its estimated IoU `[P]`.

    It is the first candidate, unless the prompt is `ambiguous` (bool, `[P]` or one for all: Meta
    holds a single click for such) or that candidate is unstable; then it is the best of the others.
    """
    unclear = ambiguous | (stability(candidates.masks[:, 0]) < STABLE)
    index = jnp.where(unclear, 1 + jnp.argmax(candidates.iou[:, 1:], axis=-1), 0)
    row = jnp.arange(len(index))
    return candidates.masks[row, index], candidates.iou[row, index]


def stability(masks: jax.Array) -> jax.Array:
    """How little masks `[..., H, W]` of logits depend on the threshold, from 0 to 1, `[...]`: the
    area over a slightly raised threshold by that over a slightly lowered one."""
    inner = (masks > STABILITY_MARGIN).sum((-2, -1))
    outer = (masks > -STABILITY_MARGIN).sum((-2, -1))
    return jnp.where(outer > 0, inner / jnp.maximum(outer, 1), 1.0)


def encode_positions(frequencies: jax.Array, points: jax.Array) -> jax.Array:
    """Random Fourier features `[..., D]` of points `[..., 2]` in 0 to 1, float32."""
    x, y = jnp.moveaxis(2 * points.astype(jnp.float32) - 1, -1, 0)
    # Not a matrix product: its operands would be rounded on a GPU.
    along_x, along_y = frequencies.astype(jnp.float32)
    angle = 2 * math.pi * (x[..., None] * along_x + y[..., None] * along_y)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _tokens(p: PromptEncoder, cfg: Config, prompts: ClickPrompts) -> tuple[jax.Array, jax.Array]:
    """Tokens `[P, N + 1, D]` float32 of points and the end, and which are seen, `[P, N + 1]`."""
    given = prompts.labels != PADDING
    seen = jnp.concatenate([given, given.any(-1, keepdims=True)], axis=-1)
    labels = jnp.pad(prompts.labels, ((0, 0), (0, 1)), constant_values=NOT_A_POINT)
    centres = prompts.points + 0.5 / cfg.trunk.image_size
    positions = encode_positions(p.frequencies, jnp.pad(centres, ((0, 0), (0, 1), (0, 0))))
    kinds = jnp.concatenate([p.not_a_point, *p.points])
    kind = kinds[jnp.maximum(labels, NOT_A_POINT) + 1]
    return jnp.where((labels > NOT_A_POINT)[..., None], positions, 0) + kind, seen


def _mask_map(p: PromptEncoder, prompts: ClickPrompts, dtype: jnp.dtype) -> jax.Array:
    """What earlier masks add to the picture's features, broadcastable to `[P, g, g, D]`."""
    without = p.no_mask.astype(dtype)
    if prompts.masks is None:
        return without
    x = prompts.masks.astype(dtype)[..., None]
    for layer, scale in ((p.mask1, p.mask_norm1), (p.mask2, p.mask_norm2)):
        x = gelu(layer_norm(_halve(x, layer), scale, MAP_NORM_EPS))
    x = linear(x, p.mask3)
    if prompts.has_mask is None:
        return x
    return jnp.where(prompts.has_mask[:, None, None, None], x, without)


def _halve(x: jax.Array, p: Linear) -> jax.Array:
    """A convolution of side and stride 2, `[B, 2H, 2W, in]` to `[B, H, W, out]`."""
    b, h, w, d = x.shape
    patches = x.reshape(b, h // 2, 2, w // 2, 2, d).swapaxes(2, 3)
    return linear(patches.reshape(b, h // 2, w // 2, 4 * d), p)
