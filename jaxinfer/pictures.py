"""Pictures of any kind on the host, for both models: decoded, upright, 8-bit RGB."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

if not Image.core.get_blocks_max():
    # Pillow gives a picture's memory back at once, and to get it anew takes longer than to decode
    # into it. It may keep 16 blocks of 16 MB; the environment's PILLOW_BLOCKS_MAX says otherwise.
    Image.core.set_blocks_max(16)

PictureLike = Any
"""A PIL image; an array (`[H, W]` or `[H, W, channels]`, 1 grey, 2 with alpha, 3 RGB, 4 RGBA);
the path of a picture file; or the bytes of one. `Segmenter` takes a `Picture` too, as
`jaxinfer.sam.preprocess.read_picture` made it."""


class PictureError(ValueError):
    """A picture that cannot be read or used; the message says why and what would help."""


def open_picture(source: PictureLike) -> Image.Image:
    """A PIL image, decoded completely; of an animation the first frame.

    Raises PictureError for what is no picture, is damaged or empty, or holds more than twice
    `PIL.Image.MAX_IMAGE_PIXELS`, Pillow's guard against files that unpack to fill the memory;
    OSError for a file that cannot be opened.
    """
    match source:
        case Image.Image():
            image = source
            _load(image)
        case str() if source.startswith(("http:", "https:", "data:")):
            raise PictureError(
                f"{source[:60]} is a URL; give the path of a picture file, or the bytes of one"
            )
        case str() | Path():
            path = Path(source).expanduser()
            try:
                image = _decode(path.read_bytes())
            except ValueError as error:  # of Pillow's, or of a path with a null byte
                raise PictureError(f"{path}: {error}") from error
        case bytes() | bytearray() | memoryview():
            image = _decode(bytes(source))
        case _ if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
            image = from_array(np.asarray(source))
        case _:
            raise PictureError(
                f"{type(source).__name__} is no picture: give a PIL image, an array, a path or "
                "the bytes of a file"
            )
    if 0 in image.size:
        raise PictureError(f"the picture is empty: {image.width} x {image.height} pixels")
    return image


def from_array(array: np.ndarray) -> Image.Image:
    """A PIL image from `[H, W]` or `[H, W, 1 to 4]`: uint8, uint16, bool, or floats from 0 to 1.

    Raises PictureError for other shapes, types and ranges.
    """
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if 0 in array.shape:
        raise PictureError(f"the picture is empty: its array is {list(array.shape)}")
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] > 4):
        first = array.ndim == 3 and array.shape[0] <= 4
        remedy = "move its channels to the end" if first else "give one picture an array"
        raise PictureError(
            f"a picture given as an array is [height, width] or [height, width, 1 to 4 channels]; "
            f"this is {list(array.shape)}: {remedy}"
        )
    return Image.fromarray(_to_bytes(array))


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright in 8-bit RGB.

    The EXIF orientation is applied, palettes and CMYK are converted, grey is repeated.
    Transparency is dropped, not composed onto a background, as in the published code of both
    models: a transparent pixel shows the colour stored beneath. 16-bit grey keeps its upper byte
    (Pillow would clip it to white); floating point runs from 0 to 1.

    Raises PictureError for 32-bit integers, whose white is not known.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "F":
        return Image.fromarray(_to_bytes(np.asarray(image))).convert("RGB")
    if image.mode == "I":
        raise PictureError(
            "the picture has 32 bits a pixel and no defined white; convert it to 8 or 16 bits"
        )
    if image.mode in ("P", "PA"):
        # A palette may hold transparency, which Pillow only takes to RGB in two steps.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _decode(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise PictureError(f"the picture is too large to decode: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise PictureError(
            f"{len(data)} bytes are no picture in a known format; send PNG, JPEG or WebP"
        ) from error
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise PictureError(f"the picture is damaged: {error}") from error
    _load(image)
    return image


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except Image.DecompressionBombError as error:
        raise PictureError(f"the picture is too large to decode: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise PictureError(f"the picture is damaged: {error}") from error


def _to_bytes(array: np.ndarray) -> np.ndarray:
    """uint8 of any sample type; raises PictureError if its white is not known."""
    kind = array.dtype
    if kind == np.uint8:
        return np.ascontiguousarray(array)
    if kind.kind == "u" and kind.itemsize == 2:
        return (array >> 8).astype(np.uint8)
    if kind == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if np.issubdtype(kind, np.floating):
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 1):  # also for NaN
            raise PictureError(
                f"a picture of {kind} runs from 0 to 1, and this from {low} to {high}: scale it, "
                "or convert it to uint8"
            )
        return np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    raise PictureError(
        f"a picture of {kind} has no defined white; convert it to uint8, uint16 or floats from 0 "
        "to 1"
    )
