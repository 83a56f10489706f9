"""Mask logits on the host: to the size of the picture, and of several alike the best."""

from collections.abc import Sequence

import numpy as np


def to_picture(logits: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mask of a picture, bool `[height, width]`, from logits `[h, w]` of it.

    The logits are interpolated bilinearly between the centres of their pixels (as
    `torch.nn.functional.interpolate`, neither aligned nor antialiased) and cut at 0.
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
    place = np.clip((np.arange(wanted) + 0.5) * (size / wanted) - 0.5, 0, size - 1)
    first = place.astype(np.int64)
    second = np.minimum(first + 1, size - 1)
    span = np.flatnonzero((second >= on[0]) & (first <= on[-1]))
    return span, first[span], second[span], (place - first)[span].astype(np.float32)


def suppress(masks: np.ndarray, scores: Sequence[float], iou: float) -> list[int]:
    """Which of several masks remain when each that overlaps a better one is dropped.

    Args:
        masks: bool `[n, h, w]`.
        scores: of each.
        iou: the intersection over union up to which two may overlap.

    Returns their indices in rising order.
    """
    flat = masks.reshape(len(masks), -1).astype(np.float32)
    common = flat @ flat.T
    area = np.diagonal(common)
    union = area[:, None] + area - common
    overlap = common > iou * union
    kept: list[int] = []
    for candidate in np.argsort(-np.asarray(scores), kind="stable"):
        if not overlap[candidate, kept].any():
            kept.append(int(candidate))
    return sorted(kept)


def around(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Left, top, right and bottom edges of a mask in pixels; all 0 for an empty one."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not rows.size:
        return (0.0, 0.0, 0.0, 0.0)
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
