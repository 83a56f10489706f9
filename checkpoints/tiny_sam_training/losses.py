"""What the detector is taught by: the losses of DETR and MaskFormer, after every decoder layer.

Carion et al., "End-to-end object detection with transformers", 2020; Cheng et al., "Per-pixel
classification is not all you need for semantic segmentation", 2021. Boxes are cx, cy, w, h.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from checkpoints.tiny_sam_training.matching import assign
from checkpoints.tiny_sam_training.words import ANY, ATTRIBUTES
from jaxinfer.tree import tree

WEIGHTS = {
    "score": 1.0, "presence": 2.0, "l1": 5.0, "giou": 2.0, "mask": 2.0, "dice": 3.0,
    "semantic": 1.0, "cells": 1.0, "words": 0.5,
}  # fmt: skip
"""Of the parts of the loss."""

SCORE_COST = 2.0
"""Weight of the score in matching, beside those of the boxes' losses."""

MATCHED = 4.0
"""How much more a query that should score counts than one of those, far more, that should not."""


@tree
class Candidates:
    """What L decoder layers found for P prompts.

    `hidden`: `[P, L, Q, D]`; `logits`: `[P, L, Q]`; `boxes`: `[P, L, Q, 4]`; `presence`: `[P, L]`.
    """

    hidden: jax.Array
    logits: jax.Array
    boxes: jax.Array
    presence: jax.Array


def match(found: Candidates, things: jax.Array, wanted: jax.Array) -> jax.Array:
    """The query of each wanted thing in each layer, `[P, L, N]`.

    Args:
        things: boxes, `[P, N, 4]`.
        wanted: `[P, N]` bool.
    """
    pairs = found.boxes[..., None, :], things[:, None, None]
    costs = WEIGHTS["l1"] * jnp.abs(pairs[0] - pairs[1]).sum(-1)
    costs -= WEIGHTS["giou"] * generalised_iou(*pairs)
    costs -= SCORE_COST * jax.nn.sigmoid(found.logits)[..., None]
    over_layers = jax.vmap(assign, (0, None))
    return jax.vmap(over_layers)(jax.lax.stop_gradient(costs), wanted)


def losses(
    found: Candidates,
    matched: jax.Array,
    semantic: jax.Array,
    things: jax.Array,
    owner: jax.Array,
    wanted: jax.Array,
) -> dict[str, jax.Array]:
    """The parts of the loss but for masks and names, before their weights, each a mean.

    Args:
        found: the candidates.
        matched: `[P, L, N]` of `match`.
        semantic: logits of all that is wanted together, `[P, g, g]`.
        things: boxes, `[P, N, 4]`.
        owner: `[P, g, g]`, which thing is seen at a cell's centre.
        wanted: `[P, N]` bool.
    """
    layers = found.logits.shape[1]
    hit = (jax.nn.one_hot(matched, found.logits.shape[2]) * wanted[:, None, :, None]).sum(2)
    score = optax.sigmoid_binary_cross_entropy(found.logits, hit) * (1 + (MATCHED - 1) * hit)
    there = wanted.any(1).astype(jnp.float32)[:, None]
    boxes = jnp.take_along_axis(found.boxes, matched[..., None], 2)
    union = (pixels_of(owner, things.shape[1]) * wanted[..., None, None]).sum(1)
    return {
        "score": score.sum() / (layers * len(wanted)),
        "presence": optax.sigmoid_binary_cross_entropy(
            found.presence, jnp.broadcast_to(there, found.presence.shape)
        ).mean(),
        "l1": _mean(jnp.abs(boxes - things[:, None]).sum(-1), wanted),
        "giou": _mean(1 - generalised_iou(boxes, things[:, None]), wanted),
        "semantic": mask_entropy(semantic.astype(jnp.float32), union, least=0.03).mean(),
    }


def mask_losses(masks: jax.Array, owner: jax.Array, wanted: jax.Array) -> dict[str, jax.Array]:
    """The parts of the loss for masks.

    Args:
        masks: logits of the matched queries, `[P, L, N, M, M]`.
        owner: `[P, M, M]`, which thing is seen at a pixel.
        wanted: `[P, N]` bool.
    """
    logits, target = masks.astype(jnp.float32), pixels_of(owner, wanted.shape[1])[:, None]
    return {
        "mask": _mean(mask_entropy(logits, target), wanted),
        "dice": _mean(1 - dice(jax.nn.sigmoid(logits), target), wanted),
    }


def naming(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Mean cross entropy of the attributes' classes, of those that are known.

    Args:
        logits: `[..., C]`, the classes of one attribute after those of another.
        classes: `[..., 4]` int32, `words.ANY` where not known.
    """
    logits, total, count = logits.astype(jnp.float32), jnp.float32(0), jnp.float32(1e-6)
    ends = np.cumsum([len(attribute) for attribute in ATTRIBUTES])
    for i, part in enumerate(jnp.split(logits, ends[:-1], -1)):
        known = classes[..., i] != ANY
        entropy = optax.softmax_cross_entropy_with_integer_labels(
            part, jnp.maximum(classes[..., i], 0)
        )
        total, count = total + (entropy * known).sum(), count + known.sum()
    return total / count


def pixels_of(owner: jax.Array, things: int) -> jax.Array:
    """Where each thing is seen, `[P, M, M]` to float32 `[P, N, M, M]`."""
    return (owner[:, None] == jnp.arange(things)[:, None, None]).astype(jnp.float32)


def _mean(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """Over layers and wanted things `[P, N]`, of `[P, L, N]`."""
    total = jnp.where(wanted[:, None], values, 0).sum()
    return total / (values.shape[1] * jnp.maximum(wanted.sum(), 1))


def total(parts: dict[str, jax.Array]) -> jax.Array:
    """The weighted sum."""
    return sum((WEIGHTS[name] * part for name, part in parts.items()), jnp.float32(0))


def generalised_iou(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of boxes `[..., 4]`: their IoU, less the part of their hull that neither covers, -1 to 1."""
    low = jnp.minimum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = jnp.maximum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    hull = (high - low).prod(-1)
    inner_low = jnp.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    inner_high = jnp.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    common = jnp.maximum(inner_high - inner_low, 0).prod(-1)
    either = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - common
    return common / jnp.maximum(either, 1e-9) - (hull - either) / jnp.maximum(hull, 1e-9)


def mask_entropy(logits: jax.Array, target: jax.Array, least: float = 0.004) -> jax.Array:
    """Cross entropy over a map `[..., M, M]`, in units of the thing's own size.

    So that a small thing counts like a big one; one of less than the part `least` of the
    map counts as if it had that.
    """
    entropy = optax.sigmoid_binary_cross_entropy(logits, target)
    return entropy.mean((-2, -1)) / jnp.maximum(target.mean((-2, -1)), least)


def dice(probability: jax.Array, target: jax.Array) -> jax.Array:
    """Dice's coefficient of maps `[..., M, M]`, from 0 to 1."""
    common = (probability * target).sum((-2, -1))
    return (2 * common + 1) / (probability.sum((-2, -1)) + target.sum((-2, -1)) + 1)
