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


RunLengths = dict[str, Any]
"""A mask as COCO's compressed run lengths, ready for JSON: `size` (height, width) and `counts`."""


def to_rle(mask: np.ndarray) -> RunLengths:
    """Run lengths of a mask, bool `[H, W]`."""
    return _for_json(coco.encode(np.asfortranarray(mask, np.uint8)))


def changes_to_rle(changes: np.ndarray, height: int, width: int) -> RunLengths:
    """Run lengths of the mask that changes at these pixels; see `jaxinfer.sam.outlines`."""
    counts = np.diff(changes, prepend=0, append=height * width).astype(np.uint32)
    plain = {"size": [height, width], "counts": counts}
    return _for_json(coco.frPyObjects(cast(Any, plain), height, width))


def words_to_changes(words: np.ndarray, height: int) -> np.ndarray:
    """Where a mask changes, int64, from bits `[W, n]` uint32; see `jaxinfer.sam.outlines`."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), 1, bitorder="little")
    return np.flatnonzero(bits.view(bool)[:, :height])


def from_rle(rle: RunLengths) -> np.ndarray:
    """The mask, bool `[H, W]`, of run lengths."""
    return np.ascontiguousarray(coco.decode(cast(Any, rle))).view(bool)


def area(rle: RunLengths) -> int:
    """Pixels in a mask."""
    return int(coco.area(cast(Any, rle)))


def around(rle: RunLengths) -> tuple[float, float, float, float]:
    """Left, top, right and bottom edges of a mask in pixels; all 0 for an empty one."""
    left, top, width, height = (float(x) for x in coco.toBbox(cast(Any, rle)))
    return left, top, left + width, top + height


def _for_json(rle: Any) -> RunLengths:
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode()}


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
