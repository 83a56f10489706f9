"""Pictures to patches, on the host: size, normalisation, patch order.

Follows transformers' PIL image processor for Qwen2-VL bit for bit wherever that defines a result;
where it would lose a picture (16-bit greyscale) or fail obscurely, `jaxinfer.pictures` says what
happens instead.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxinfer.pictures import PictureError, to_rgb
from jaxinfer.qwen.config import ConfigError, VisionConfig
from jaxinfer.qwen.positions import Grid, grid_tokens

MAX_ASPECT_RATIO = 200
"""Longer side over shorter side; the limit that transformers sets."""


@dataclass(frozen=True)
class ImageConfig:
    """How pictures are prepared. Defaults are those published with Qwen3.6-35B-A3B.

    Attributes:
        patch_size: side of a patch in pixels.
        temporal_patch_size: frames in a patch; a still picture is repeated to fill them.
        merge_size: a token stands for `merge_size` x `merge_size` patches.
        min_pixels: smallest area after resizing, in pixels.
        max_pixels: largest area after resizing, in pixels.
        mean: of each channel, on the scale 0 to 1.
        std: of each channel, on the scale 0 to 1.
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def factor(self) -> int:
        """Pixels along one side of a token; both sides of a resized picture are multiples."""
        return self.patch_size * self.merge_size

    @classmethod
    def read(cls, directory: str | Path, vision: VisionConfig) -> "ImageConfig":
        """From `directory/preprocessor_config.json`, or the published defaults without that file.

        Patch and merge sizes are the vision tower's. Raises ConfigError for a file that is not
        valid or that asks for something else than this module does.
        """
        path = Path(directory) / "preprocessor_config.json"
        if not path.is_file():
            return cls.from_dict({}, vision)
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")), vision)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], vision: VisionConfig) -> "ImageConfig":
        """From the contents of a `preprocessor_config.json`; see `read`."""
        required = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": int(Image.Resampling.BICUBIC),
            "rescale_factor": 1 / 255,
        }
        for name, value in required.items():
            given = raw.get(name)
            if given is not None and given != value:
                raise ConfigError(f"{name} is {given!r}; this engine needs {value!r}")
        size = raw.get("size") or {}
        made = cls(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            min_pixels=raw.get("min_pixels") or size.get("shortest_edge", cls.min_pixels),
            max_pixels=raw.get("max_pixels") or size.get("longest_edge", cls.max_pixels),
            mean=_channels("image_mean", raw.get("image_mean"), cls.mean),
            std=_channels("image_std", raw.get("image_std"), cls.std),
        )
        if vision.in_channels != 3:
            raise ConfigError(f"in_channels is {vision.in_channels}; pictures have 3")
        return made

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels or self.max_pixels < self.factor**2:
            raise ConfigError(
                f"area limits {self.min_pixels} to {self.max_pixels} pixels are impossible: they "
                f"must be positive, in order, and leave room for one token of {self.factor**2}"
            )
        if min(self.std) <= 0:
            raise ConfigError(f"image_std {self.std} must be positive")


def _channels(
    name: str, given: Any, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    if given is None:
        return default
    if len(given) != 3:
        raise ConfigError(f"{name} has {len(given)} entries; pictures have 3 channels")
    red, green, blue = (float(value) for value in given)
    return red, green, blue


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The height and width in pixels to which a picture is resized.

    Both are multiples of `factor`; the aspect ratio is kept as nearly as that allows; the area is
    within the limits, except that no side is shorter than `factor`. (As `smart_resize` of
    transformers' Qwen2-VL image processor.)

    Raises PictureError for an empty picture and for sides that differ by more than 200 times.
    """
    if height < 1 or width < 1:
        raise PictureError(f"the picture is empty: {width} x {height} pixels")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise PictureError(
            f"the picture's sides, {width} x {height} pixels, differ by more than "
            f"{MAX_ASPECT_RATIO} times; crop or pad it"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def image_grid(height: int, width: int, cfg: ImageConfig) -> Grid:
    """The grid of a picture of `height` x `width` pixels; raises as `smart_resize` does."""
    rows, columns = smart_resize(height, width, cfg.factor, cfg.min_pixels, cfg.max_pixels)
    return 1, rows // cfg.patch_size, columns // cfg.patch_size


def image_tokens(height: int, width: int, cfg: ImageConfig) -> int:
    """Tokens that a picture of `height` x `width` pixels takes in a prompt."""
    return grid_tokens(image_grid(height, width, cfg), cfg.merge_size)


def preprocess(image: Image.Image | np.ndarray, cfg: ImageConfig) -> tuple[np.ndarray, Grid]:
    """Prepare a picture for the vision tower.

    Args:
        image: of any mode, or uint8 `[height, width, 3]`.
        cfg: sizes, limits and normalisation.

    Returns:
        patches: float32 `[h·w, 3 · temporal_patch_size · patch_size²]`, in merge-block order, each
            in the order channel, frame, row, column.
        grid: `(1, h, w)`.

    Raises PictureError for an empty picture or an impossible aspect ratio.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise PictureError(
                f"a picture given as an array must be uint8 [height, width, 3]; this is "
                f"{image.dtype} {list(image.shape)}"
            )
        if 0 in image.shape:
            raise PictureError(f"the picture is empty: {image.shape[1]} x {image.shape[0]} pixels")
        image = Image.fromarray(image)
    image = to_rgb(image)
    grid = image_grid(image.height, image.width, cfg)
    size = (grid[2] * cfg.patch_size, grid[1] * cfg.patch_size)
    frame = normalise(np.asarray(image.resize(size, Image.Resampling.BICUBIC)), cfg)
    frames = np.broadcast_to(frame, (cfg.temporal_patch_size, *frame.shape))
    return patchify(frames, cfg), grid


def normalise(pixels: np.ndarray, cfg: ImageConfig) -> np.ndarray:
    """`(x / 255 - mean) / std` of uint8 `[..., 3]`, float32."""
    # The roundings of transformers' processor: the product with 1/255 in double precision, the
    # rest in single.
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)
    planes = np.empty((3, *pixels.shape[:-1]), np.float32)
    for channel, (mean, std) in enumerate(zip(cfg.mean, cfg.std, strict=True)):
        table = (levels - np.float32(mean)) / np.float32(std)
        # "clip" spares a check of every index; a uint8 cannot leave the table.
        np.take(table, pixels[..., channel], out=planes[channel], mode="clip")
    return np.moveaxis(planes, 0, -1)


def patchify(frames: np.ndarray, cfg: ImageConfig) -> np.ndarray:
    """Cut frames into patches.

    Args:
        frames: `[F, height, width, channels]`; `F` a multiple of `temporal_patch_size`, height and
            width multiples of `cfg.factor`.
        cfg: sizes.

    Returns:
        `[t·h·w, channels · temporal_patch_size · patch_size²]`: temporal patches outermost, each in
        merge-block order; a patch in the order channel, frame, row, column.
    """
    count, height, width, channels = frames.shape
    p, f, m = cfg.patch_size, cfg.temporal_patch_size, cfg.merge_size
    cut = frames.reshape(
        count // f, f, height // cfg.factor, m, p, width // cfg.factor, m, p, channels
    )
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(-1, channels * f * p * p)
