"""Pictures to what the model sees."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxinfer.pictures import PictureError
from jaxinfer.sam.preprocess import read_picture

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "sam_pictures.npz")
RGB = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


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


def test_a_turned_picture_has_its_upright_size() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(RGB).save(file, "PNG", exif=exif)
    read = read_picture(file.getvalue(), 8)
    assert (read.width, read.height) == (20, 30)


def test_a_picture_for_another_model_is_refused() -> None:
    with pytest.raises(PictureError, match="read it for this model"):
        read_picture(read_picture(RGB, 16), 32)
