"""Masks on the host: logits to the size of the picture, and of several masks alike the best."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from pycocotools import mask as coco

from jaxinfer.sam.outlines import along
from jaxinfer.segmentation.export import RunLengths


def to_picture(logits: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mask of a picture, bool `[height, width]`, from logits `[h, w]` of it.

    The same as `jaxinfer.sam.outlines`, which see, on one processor.
    """
    logits = logits.astype(np.float32)
    mask = np.zeros((height, width), bool)
    on = logits > 0
    if not on.any():
        return mask
    # A pixel can only be on if one of those it is made of is: the rest need not be looked at.
    rows, top, bottom, down = _neighbours(np.flatnonzero(on.any(1)), logits.shape[0], height)
    columns, left, right, across = _neighbours(np.flatnonzero(on.any(0)), logits.shape[1], width)
    if not rows.size or not columns.size:  # between the pixels of a small picture
        return mask
    between = logits[top] + (logits[bottom] - logits[top]) * down[:, None]
    between = between[:, left] + (between[:, right] - between[:, left]) * across
    mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = between > 0
    return mask


def _neighbours(
    on: np.ndarray, size: int, wanted: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For the span of pixels that those in `on` may reach, along one axis resized to `wanted`.

    Returns the pixels, the two that each lies between, and how far it is from the first.
    """
    first, fraction = along(wanted, size)
    second = np.minimum(first + 1, size - 1)
    span = np.flatnonzero((second >= on[0]) & (first <= on[-1]))
    return span, first[span], second[span], fraction[span]


def suppress(outlines: Sequence[RunLengths], scores: Sequence[float], iou: float) -> list[int]:
    """Which of several masks remain when each that overlaps a better one is dropped.

    Args:
        outlines: their run lengths, of one picture.
        scores: of each.
        iou: the intersection over union up to which two may overlap.

    Returns their indices in rising order.
    """
    masks = list(outlines)
    overlap = np.asarray(coco.iou(cast(Any, masks), cast(Any, masks), [0] * len(masks))) > iou
    kept: list[int] = []
    for candidate in np.argsort(-np.asarray(scores), kind="stable"):
        if not overlap[candidate, kept].any():
            kept.append(int(candidate))
    return sorted(kept)
