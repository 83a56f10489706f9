"""Masks at the size of a picture, and where they begin and end, computed on the device.

Logits are interpolated bilinearly between the centres of their pixels, as
`torch.nn.functional.interpolate` does without aligned corners and antialiasing, and cut at 0. What
comes back is where the mask changes when it is read column by column, which is what COCO's run
lengths are made of: some kB instead of a MB. The size of a picture is data; only the side of the
square that it must fit in, its room, is compiled in.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxinfer.tree import tree
from pallas_kernels.mask_changes import mask_changes

ROOMS = (256, 512, 1024, 1536, 2048, 3072, 4096)
"""Sides of the squares that pictures are padded to, in pixels."""


@tree
class Places:
    """Where the pixels of P pictures lie among the logits, first by rows and then by columns.

    `size`: `[P, 2]` int32, height and width; `first`: `[P, 2, R]` int32, the logit before a pixel,
    R the room; `fraction`: `[P, 2, R]` float32, the way from there to the next one.
    """

    size: Any
    first: Any
    fraction: Any


@tree
class Outlines:
    """Where K masks of each of P pictures change, read column by column from the upper left corner.

    `count`: `[P, K]` int32, the number of changes; `changes`: `[P, K, 2R]` int32, the pixels
    (x · height + y) that differ from the one before, rising, complete if `count` is at most 2R;
    `words`: `[P, K, R, R / 32]` uint32, those pixels as bits, lowest first, for what is not. What
    lies past `count`, and bits of masks without changes, may be anything.
    """

    count: Any
    changes: Any
    words: Any


def room(height: int, width: int) -> int | None:
    """The smallest room for a picture, or None if there is none that large."""
    return next((side for side in ROOMS if side >= max(height, width)), None)


def places(sizes: Sequence[tuple[int, int]], logits: int, room: int) -> Places:
    """The places of pictures of some heights and widths, for logits of that side; numpy."""
    found = [_place(size, logits, room) for size in sizes]
    first, fraction = (np.stack(part) for part in zip(*found, strict=True))
    return Places(np.array(sizes, np.int32), first, fraction)


def along(wanted: int, logits: int) -> tuple[np.ndarray, np.ndarray]:
    """For one axis of so many pixels: `first` int32 and `fraction` float32, as in `Places`.

    In whole numbers, so that a pixel that lies on a logit has a fraction of exactly 0.
    """
    place = (2 * np.arange(wanted, dtype=np.int64) + 1) * logits - wanted
    place = place.clip(0, 2 * wanted * (logits - 1))
    first, rest = np.divmod(place, 2 * wanted)
    return first.astype(np.int32), (rest / (2 * wanted)).astype(np.float32)


@lru_cache(256)
def _place(size: tuple[int, int], logits: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    axes = [along(wanted, logits) for wanted in size]
    padded = [[np.pad(part, (0, room - len(part))) for part in axis] for axis in axes]
    first, fraction = (np.stack(part) for part in zip(*padded, strict=True))
    return first, fraction


def trace(logits: jax.Array, kept: jax.Array, places: Places) -> Outlines:
    """Outlines of masks.

    Args:
        logits: `[P, K, m, m]`.
        kept: `[P]` int32; of each picture's masks the first so many count, the others are empty.
        places: of the pictures.
    """
    impl = "kernel" if jax.default_backend() == "gpu" else "plain"
    where = places.size, places.first, places.fraction
    return Outlines(*mask_changes(logits, kept, *where, impl=impl))
