"""Picture preparation against transformers' PIL image processor, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from jaxinfer.pictures import PictureError
from jaxinfer.qwen.config import ConfigError, VisionConfig
from jaxinfer.qwen.images import (
    ImageConfig,
    image_grid,
    image_tokens,
    patchify,
    preprocess,
    smart_resize,
)

GOLDENS = Path(__file__).parents[1] / "goldens" / "qwen"
PUBLISHED = ImageConfig()
VISION = VisionConfig(
    depth=27,
    hidden_size=1152,
    num_heads=16,
    intermediate_size=4304,
    in_channels=3,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    num_position_embeddings=2304,
    out_hidden_size=2048,
)


@pytest.fixture(scope="module")
def cases() -> dict[str, np.ndarray]:
    return load_file(GOLDENS / "cases.safetensors")


def limits(cfg: ImageConfig, low: int, high: int) -> ImageConfig:
    return replace(cfg, min_pixels=low, max_pixels=high)


@pytest.mark.parametrize("number", range(4))
def test_patches_match_transformers(number: int, cases: dict[str, np.ndarray]) -> None:
    low, high = (int(x) for x in cases["image.size"])
    pixels = cases[f"image.{number}.pixels"]
    patches, grid = preprocess(pixels, limits(PUBLISHED, low, high))
    assert grid == tuple(cases[f"image.{number}.grid_thw"][0])
    assert patches.dtype == np.float32
    # Pillow resizes in whole 8-bit levels (2/255 apart after normalising), so a difference is
    # either no level at all, and then only float rounding could show, or a fault.
    np.testing.assert_allclose(patches, cases[f"image.{number}.pixel_values"], rtol=0, atol=1e-6)


def test_sizes_match_transformers(cases: dict[str, np.ndarray]) -> None:
    ours = [
        smart_resize(int(h), int(w), 32, PUBLISHED.min_pixels, PUBLISHED.max_pixels)
        for h, w in cases["resize.from"]
    ]
    np.testing.assert_array_equal(ours, cases["resize.to"])


@st.composite
def picture_sizes(draw: st.DrawFn) -> tuple[int, int]:
    short = draw(st.integers(1, 6000))
    long = draw(st.integers(short, min(200 * short, 60_000)))
    return (short, long) if draw(st.booleans()) else (long, short)


@given(picture_sizes())
def test_resizing_keeps_limits_and_aspect(size: tuple[int, int]) -> None:
    height, width = smart_resize(*size, 32, PUBLISHED.min_pixels, PUBLISHED.max_pixels)
    assert height % 32 == width % 32 == 0
    assert PUBLISHED.min_pixels <= height * width <= PUBLISHED.max_pixels
    # One scale for both sides, but for less than one step of 32 pixels on each.
    scales = [
        (side + step) / old
        for side, old in zip((height, width), size, strict=True)
        for step in (-32, 32)
    ]
    assert max(scales[0], scales[2]) < min(scales[1], scales[3])


@given(picture_sizes())
def test_resizing_twice_changes_nothing_more(size: tuple[int, int]) -> None:
    once = smart_resize(*size, 32, PUBLISHED.min_pixels, PUBLISHED.max_pixels)
    assume(max(once) <= 200 * min(once))  # rounding may step over the limit of the aspect ratio
    assert smart_resize(*once, 32, PUBLISHED.min_pixels, PUBLISHED.max_pixels) == once


def test_tokens_of_a_picture() -> None:
    assert image_grid(1080, 1920, PUBLISHED) == (1, 68, 120)
    assert image_tokens(1080, 1920, PUBLISHED) == 34 * 60
    assert image_tokens(1, 1, PUBLISHED) == 64
    assert image_tokens(5000, 5000, PUBLISHED) == 128 * 128


def test_patch_order() -> None:
    cfg = replace(PUBLISHED, patch_size=2, min_pixels=16, max_pixels=4096)
    frames = np.random.default_rng(0).random((4, 4, 8, 3))
    patches = patchify(frames, cfg)
    assert patches.shape == (2 * 2 * 4, 3 * 2 * 2 * 2)
    rows = iter(patches)
    for t in range(2):
        for block in range(2):
            for i in range(2):
                for j in range(2):
                    y, x = 2 * i, 4 * block + 2 * j
                    patch = frames[2 * t : 2 * t + 2, y : y + 2, x : x + 2]
                    np.testing.assert_array_equal(next(rows), np.moveaxis(patch, 3, 0).ravel())


def test_a_flat_picture_becomes_its_value() -> None:
    patches, grid = preprocess(Image.new("RGB", (300, 300), (0, 255, 51)), PUBLISHED)
    assert grid == (1, 18, 18)
    assert patches.shape == (324, 1536)
    expected = np.repeat(np.array([-1, 1, -0.6], np.float32), 512)
    np.testing.assert_allclose(patches, np.tile(expected, (324, 1)), atol=1e-6)


def test_unusable_pictures_are_refused() -> None:
    with pytest.raises(PictureError, match="differ by more than 200 times"):
        preprocess(Image.new("RGB", (1, 201)), PUBLISHED)
    with pytest.raises(PictureError, match="empty"):
        preprocess(Image.new("RGB", (0, 10)), PUBLISHED)
    with pytest.raises(PictureError, match="empty"):
        preprocess(np.zeros((0, 10, 3), np.uint8), PUBLISHED)
    with pytest.raises(PictureError, match=r"must be uint8 \[height, width, 3\]; this is float32"):
        preprocess(np.zeros((10, 10, 3), np.float32), PUBLISHED)


def test_config_file(tmp_path: Path) -> None:
    assert ImageConfig.read(tmp_path, VISION) == PUBLISHED
    file = tmp_path / "preprocessor_config.json"
    published = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    file.write_text(json.dumps(published))
    assert ImageConfig.read(tmp_path, VISION) == PUBLISHED
    file.write_text(json.dumps({"min_pixels": 4096, "max_pixels": 8192, "image_mean": [0, 0, 0]}))
    read = ImageConfig.read(tmp_path, VISION)
    assert (read.min_pixels, read.max_pixels, read.mean) == (4096, 8192, (0, 0, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"patch_size": 14}', "patch_size is 14; this engine needs 16"),
        ('{"do_resize": false}', "do_resize is False"),
        ('{"resample": 2}', "resample is 2; this engine needs 3"),
        ('{"image_std": [1.0]}', "image_std has 1 entries"),
        ('{"image_std": [1, 0, 1]}', "must be positive"),
        ('{"min_pixels": 9000, "max_pixels": 8192}', "area limits"),
    ],
)
def test_config_file_that_asks_for_something_else(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        ImageConfig.read(tmp_path, VISION)
