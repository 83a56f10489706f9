"""Pictures of any mode and size to the square of RGB that the model sees, on the host.

As Meta's code does it: upright, 8-bit RGB, resized straight to the model's square (the aspect is
not kept) with bilinear antialiasing. Normalisation is the model's.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from jaxinfer.pictures import PictureError, PictureLike, open_picture, to_rgb


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as the model sees it.

    Attributes:
        pixels: uint8 `[S, S, 3]` RGB, S the model's `image_size`.
        width: of the upright picture, before resizing, in pixels.
        height: likewise.
        digest: of the encoded picture or of `pixels`; pictures with the same one look alike to the
            model.
        name: of the file, or None.
    """

    pixels: np.ndarray
    width: int
    height: int
    digest: bytes
    name: str | None = None


def read_picture(source: PictureLike, size: int) -> Picture:
    """Decode a picture and resize it to `size` x `size`.

    Args:
        source: see `PictureLike`.
        size: the model's `image_size`.

    Raises PictureError for what cannot be used, OSError for a file that cannot be opened.
    """
    if isinstance(source, Picture):
        if source.pixels.shape != (size, size, 3):
            raise PictureError(
                f"this Picture was read at {source.pixels.shape[0]} x {source.pixels.shape[1]} "
                f"pixels and the model sees {size} x {size}: read it for this model"
            )
        return source
    rgb = to_rgb(open_picture(source))
    resized = rgb.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized)
    # The bytes of a file are fewer than those of its pixels.
    hashed = source if isinstance(source, bytes | bytearray | memoryview) else pixels
    digest = hashlib.blake2b(hashed, digest_size=16).digest()
    name = Path(source).name if isinstance(source, str | Path) else None
    return Picture(pixels, rgb.width, rgb.height, digest, name)
