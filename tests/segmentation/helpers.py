"""A small model of random weights, and the plainest way to ask it."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jaxinfer.sam import clicks, model
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import Config, TextConfig, TrunkConfig
from jaxinfer.sam.leaves import Leaf
from jaxinfer.sam.params import Params
from jaxinfer.sam.preprocess import read_picture
from jaxinfer.sam.structure import structure
from jaxinfer.sam.tokenizer import Tokenizer, from_merges
from jaxinfer.segmenter import SamModel

CONFIG = Config(
    trunk=TrunkConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        image_size=112,
        patch_size=14,
        window=4,
        global_layers=(),
        table=4,
    ),
    text=TextConfig(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        context=16,
    ),
    width=32,
    num_heads=4,
    intermediate_size=64,
    geometry_layers=1,
    encoder_layers=1,
    decoder_layers=1,
    num_queries=6,
)


TOKENIZER = from_merges(["c a", "ca t</w>"])


@cache
def random_model() -> SamModel:
    """With the click head."""
    leaves = replace(structure(CONFIG), clicks=clicks.structure(CONFIG, "3.1"))
    rng = np.random.default_rng(0)

    def draw(leaf: Leaf) -> jax.Array:
        # In numpy: to compile a drawing of so many arrays takes longer than all else.
        scale = 0.2 if leaf.init != "matrix" else math.prod(leaf.arranged[1:]) ** -0.5
        return jnp.asarray(
            (leaf.init == "ones") + scale * rng.normal(size=leaf.arranged), "float32"
        )

    params = jax.tree.map(draw, leaves)
    return SamModel(CONFIG, params, Tokenizer(TOKENIZER, CONFIG.text.context))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with structure of all sizes."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def ask(picture: Image.Image, words: str, boxes: Any = (), labels: Any = ()) -> tuple:
    """Scores `[Q]`, boxes `[Q, 4]` in pixels and masks `[Q, H, W]`, without batches or caches.

    At most two boxes, with labels of 1 (alike) or 0.
    """
    loaded = random_model()
    pixels = read_picture(picture, CONFIG.trunk.image_size).pixels[None]
    ids, mask = loaded.tokenizer.encode([words])
    size = np.array([picture.width, picture.height] * 2)
    room = 2 - len(boxes)
    x0, y0, x1, y1 = (np.pad(np.reshape(boxes, (-1, 4)), ((0, room), (0, 0))) / size).T
    relative = np.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], -1)[None]
    found = _detect(
        loaded.params,
        pixels,
        ids,
        mask,
        relative.astype(np.float32),
        np.pad(np.array(labels, np.int32), (0, room))[None],
        np.arange(2)[None] < len(boxes),
    )
    cx, cy, w, h = np.asarray(found.boxes[0]).T
    corners = np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)
    shape = (CONFIG.num_queries, picture.height, picture.width)
    masks = jax.image.resize(found.masks[0], shape, "linear", antialias=False)
    return np.asarray(found.scores[0]), np.clip(corners, 0, 1) * size, np.asarray(masks > 0)


@jit
def _detect(
    params: Params,
    pixels: jax.Array,
    ids: jax.Array,
    mask: jax.Array,
    boxes: jax.Array,
    labels: jax.Array,
    seen: jax.Array,
) -> model.Detections:
    features = model.embed_image(params, CONFIG, pixels)
    text = model.embed_text(params, CONFIG, ids)
    prompts = model.Prompts(jnp.zeros(1, jnp.int32), text, mask, boxes, labels, seen)
    return model.detect(params, CONFIG, features, prompts)
