"""What was found, drawn onto the picture."""

import colorsys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jaxinfer.pictures import PictureLike, open_picture, to_rgb
from jaxinfer.segmentation.results import Instance, Segmentation

_OPACITY = 0.45
_GOLDEN = 0.618034


def draw(picture: PictureLike, result: Segmentation) -> Image.Image:
    """The picture in RGB with a coloured mask, outline and label for each object.

    Args:
        picture: the one that `result` is of: anything that can be segmented but a `Picture`,
            which no longer has its own size.
        result: what was found in it.

    Raises ValueError if the sizes differ, PictureError for what is no picture.
    """
    image = to_rgb(open_picture(picture))
    if image.size != (result.width, result.height):
        raise ValueError(
            f"the picture is {image.width} x {image.height} pixels, but the result is of one of "
            f"{result.width} x {result.height}"
        )
    pixels = np.array(image)
    for index, found in enumerate(result.objects):
        _tint(pixels, found.mask, colour(index))
    image = Image.fromarray(pixels)
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(max(10, min(image.size) / 40))
    for index, found in enumerate(result.objects):
        _label(pen, font, found, colour(index), image.size)
    return image


def colour(index: int) -> tuple[int, int, int]:
    """A strong RGB colour, far from those of the indices nearby."""
    red, green, blue = colorsys.hsv_to_rgb(index * _GOLDEN % 1, 0.85, 1)
    return round(red * 255), round(green * 255), round(blue * 255)


def _tint(pixels: np.ndarray, mask: np.ndarray, rgb: tuple[int, int, int]) -> None:
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    pixels[mask] = (pixels[mask] * (1 - _OPACITY) + np.array(rgb) * _OPACITY).astype(np.uint8)
    pixels[mask & ~inner] = rgb


def _label(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    found: Instance,
    rgb: tuple[int, int, int],
    size: tuple[int, int],
) -> None:
    """The object's name and score above its box, or wherever there is room."""
    text = f"{found.prompt} {found.score:.2f}"
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = max(0, min(found.box[0], size[0] - width))
    y = found.box[1] - height if found.box[1] >= height else found.box[1]
    y = max(0, min(y, size[1] - height))
    pen.rectangle((x, y, x + width, y + height), fill=rgb)
    pen.text((x + 2 - left, y + 2 - top), text, fill="black", font=font)
