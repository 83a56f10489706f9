"""Pictures of any kind to what the model sees."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxinfer.sam.preprocess import PictureError, open_picture, read_picture, to_rgb

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "sam_pictures.npz")
RNG = np.random.default_rng(0)
GREY = np.tile(np.arange(0, 256, 5, np.uint8), (20, 1))
RGB = RNG.integers(0, 256, (20, 30, 3), np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def rgb(source: Any) -> np.ndarray:
    return np.asarray(to_rgb(open_picture(source)))


@pytest.mark.parametrize("number", range(4))
def test_resizing_is_torchvisions_within_a_grey_level(number: int) -> None:
    read = read_picture(GOLDEN[f"picture_{number}"], 28)
    expected = GOLDEN[f"resized_{number}"].astype(int)
    assert np.abs(read.pixels.astype(int) - expected).max() <= 1
    assert (read.height, read.width) == GOLDEN[f"picture_{number}"].shape[:2]


def test_all_ways_to_give_a_picture_are_one(tmp_path: Path) -> None:
    image = Image.fromarray(RGB)
    path = tmp_path / "picture.png"
    image.save(path)
    ways = [image, RGB, path, str(path), path.read_bytes(), bytearray(path.read_bytes())]
    read = [read_picture(way, 16) for way in ways]
    assert len({picture.pixels.tobytes() for picture in read}) == 1
    # Bytes are known again as they are, all else by its pixels.
    assert [picture.digest == read[0].digest for picture in read] == [True] * 4 + [False] * 2
    assert read[4].digest == read[5].digest
    assert all((picture.width, picture.height) == (30, 20) for picture in read)
    assert [picture.name for picture in read] == [None, None, *["picture.png"] * 2, None, None]
    assert read_picture(read[0], 16) is read[0]


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
    assert read_picture(data, 8).width == upright.shape[1]


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
        ({"image": 1}, "dict is no picture"),
    ],
)
def test_what_cannot_be_used_is_told(source: Any, match: str) -> None:
    with pytest.raises(PictureError, match=match):
        read_picture(source, 16)


def test_a_file_at_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"no")
    with pytest.raises(PictureError, match=r"broken\.png"):
        read_picture(path, 16)
    with pytest.raises(FileNotFoundError, match=r"absent\.png"):
        read_picture(tmp_path / "absent.png", 16)


def test_a_picture_for_another_model_is_refused() -> None:
    with pytest.raises(PictureError, match="read it for this model"):
        read_picture(read_picture(RGB, 16), 32)


def test_a_file_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(PictureError, match="too large"):
        read_picture(encoded(Image.fromarray(RGB)), 16)
