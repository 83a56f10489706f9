"""Pictures of any kind, to upright 8-bit RGB."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxinfer.pictures import PictureError, open_picture, to_rgb

RNG = np.random.default_rng(0)
GREY = np.tile(np.arange(0, 256, 5, np.uint8), (20, 1))
RGB = RNG.integers(0, 256, (20, 30, 3), np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def rgb(source: Any) -> np.ndarray:
    return np.asarray(to_rgb(open_picture(source)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
        6: np.rot90(RGB, -1), 7: np.rot90(RGB, 2).transpose(1, 0, 2), 8: np.rot90(RGB),
    }[orientation]  # fmt: skip
    data = encoded(Image.fromarray(RGB), exif=exif)
    assert np.array_equal(rgb(data), upright)


def _rgba() -> np.ndarray:
    return np.dstack([RGB, RNG.integers(0, 256, RGB.shape[:2], np.uint8)])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (GREY, GREY),
        (GREY[..., None], GREY),
        (np.dstack([GREY, GREY]), GREY),
        (_rgba(), RGB),
        (GREY.astype(np.uint16) << 8 | 0xAB, GREY),
        (GREY / 255, GREY),
        ((RGB / 255).astype(np.float16), RGB),
        (GREY > 100, np.where(GREY > 100, 255, 0)),
        (encoded(Image.fromarray(GREY.astype(np.uint16) << 8 | 0xAB)), GREY),
        (encoded(Image.fromarray(GREY.astype(np.uint16) << 8), "TIFF"), GREY),
        (encoded(Image.fromarray((GREY / 255).astype(np.float32)), "TIFF"), GREY),
        (encoded(Image.fromarray(np.dstack([GREY, GREY]))), GREY),
        (encoded(Image.fromarray(GREY > 100)), np.where(GREY > 100, 255, 0)),
        (encoded(Image.fromarray(_rgba())), RGB),
        (encoded(Image.fromarray(GREY).convert("P")), GREY),
        (encoded(Image.fromarray(_rgba()), "WEBP", lossless=True, exact=True), RGB),
    ],
)
def test_modes_and_sample_types(source: Any, expected: np.ndarray) -> None:
    if expected.ndim == 2:
        expected = np.repeat(expected[..., None], 3, 2)
    assert np.array_equal(rgb(source), expected)


def test_cmyk_and_palettes_keep_their_colours() -> None:
    flat = Image.new("RGB", (16, 16), (200, 40, 90))
    jpeg = encoded(flat.convert("CMYK"), "JPEG", quality=95)
    assert Image.open(io.BytesIO(jpeg)).mode == "CMYK"
    assert np.abs(rgb(jpeg).astype(int) - (200, 40, 90)).max() <= 4
    palette = flat.convert("P", palette=Image.Palette.ADAPTIVE)
    palette.info["transparency"] = 0
    assert np.abs(rgb(encoded(palette, "GIF")).astype(int) - (200, 40, 90)).max() <= 4


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (b"not a picture", "no picture in a known format"),
        (b"", "no picture in a known format"),
        (encoded(Image.fromarray(RGB))[:200], "damaged"),
        (encoded(Image.fromarray(RGB), "JPEG")[:300], "damaged|known format"),
        (np.zeros((3, 20, 30), np.uint8), "channels to the end"),
        (np.zeros((2, 20, 30, 3), np.uint8), "one picture an array"),
        (np.zeros((0, 20, 3), np.uint8), "empty"),
        (np.zeros(20, np.uint8), "height, width"),
        (RGB.astype(np.float32), "from 0 to 1"),
        (np.full((4, 4), np.nan), "from 0 to 1"),
        (RGB.astype(np.int64), "no defined white"),
        (Image.fromarray(np.zeros((4, 4), np.int32)), "32 bits"),
        (None, "NoneType is no picture"),
        ("https://example.org/cat.png", "is a URL"),
        ("cat\0.png", "null byte"),
        ({"image": 1}, "dict is no picture"),
    ],
)
def test_what_cannot_be_used_is_told(source: Any, match: str) -> None:
    with pytest.raises(PictureError, match=match):
        rgb(source)


def test_a_file_at_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"no")
    with pytest.raises(PictureError, match=r"broken\.png"):
        open_picture(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.png"):
        open_picture(tmp_path / "absent.png")


def test_a_file_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(PictureError, match="too large"):
        open_picture(encoded(Image.fromarray(RGB)))
