"""Masks in the forms that others read: COCO's run lengths, polygons, PNG."""

import io
from typing import Any, cast

import contourpy
import numpy as np
from PIL import Image
from pycocotools import mask as coco

Polygon = list[np.ndarray]
"""Rings of one connected piece, each float32 `[n, 2]` of x and y in pixels, the first point not
repeated: its outline, then its holes."""


def to_rle(mask: np.ndarray) -> dict[str, Any]:
    """COCO's compressed run lengths of a mask, bool `[H, W]`, ready for JSON."""
    encoded: Any = coco.encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(side) for side in encoded["size"]], "counts": encoded["counts"].decode()}


def from_rle(rle: dict[str, Any]) -> np.ndarray:
    """The mask, bool `[H, W]`, of COCO's run lengths."""
    return coco.decode(cast(Any, rle)).astype(bool)


def to_polygons(mask: np.ndarray) -> list[Polygon]:
    """Outlines of the pieces of a mask, bool `[H, W]`.

    They run through the middles of the edges between pixels that are in and pixels that are out, so
    that corners are cut by half a pixel; a point stands only where the direction changes.
    Coordinates count from the picture's corner: the first pixel's middle is at 0.5.
    """
    padded = np.pad(mask, 1).astype(np.float32)
    lines = contourpy.contour_generator(
        z=padded, name="serial", fill_type=contourpy.FillType.OuterOffset
    )
    pieces, offsets = cast(tuple[list[np.ndarray], list[np.ndarray]], lines.filled(0.5, 2))
    # The padding moves everything by 1, and a pixel's middle is half a pixel from its corner.
    return [
        [_simplify(ring[:-1] - 0.5) for ring in np.split(points, ends[1:-1])]
        for points, ends in zip(pieces, offsets, strict=True)
    ]


def _simplify(ring: np.ndarray) -> np.ndarray:
    """A ring without the points in the middle of straight lines."""
    before, after = ring - np.roll(ring, 1, 0), np.roll(ring, -1, 0) - ring
    turns = before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]
    return ring[turns].astype(np.float32)


def to_png(pixels: np.ndarray) -> bytes:
    """A PNG file of a mask (bool: one bit a pixel, white where it is on) or of uint8 or uint16."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
