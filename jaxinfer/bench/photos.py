"""Made-up photographs: smooth light, things with edges, grain, and a JPEG file of a usual size."""

import io

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

THINGS = 12
QUALITY = 90
GRAIN = 4.0
"""Standard deviation of the noise, in levels of 255."""


def photo(width: int, height: int, seed: int) -> bytes:
    """A JPEG file of so many pixels; another one for every seed."""
    rng = np.random.default_rng(seed)
    light = Image.fromarray(rng.integers(40, 216, (4, 6, 3), np.uint8))
    scene = light.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(scene)
    for _ in range(THINGS):
        x, y = rng.uniform(0, (width, height))
        half = rng.uniform(0.04, 0.2, 2) * min(width, height)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        box = (x - half[0], y - half[1], x + half[0], y + half[1])
        shape(box, tuple(rng.integers(0, 256, 3).tolist()))
    soft = np.asarray(scene.filter(ImageFilter.GaussianBlur(1)), np.int16)
    # One patch of grain, laid next to itself: to draw all of it would take longer than the rest.
    patch = rng.normal(0, GRAIN, (256, 256, 3)).astype(np.int16)
    grain = np.tile(patch, (-(-height // 256), -(-width // 256), 1))[:height, :width]
    file = io.BytesIO()
    Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(
        file, "JPEG", quality=QUALITY
    )
    return file.getvalue()
