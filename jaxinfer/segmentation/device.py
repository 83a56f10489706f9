"""What runs on the device, in a few static shapes: embedding, detection, clicks, picking masks.

Everything is padded to the next power of two, so that few programs are compiled. Features are kept
picture by picture and text by text; a program takes as many of them as it needs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sam import clicks, model, trunk
from jaxinfer.sam.clicks import ClickFeatures, ClickPrompts
from jaxinfer.sam.config import Config
from jaxinfer.sam.model import Features
from jaxinfer.sam.params import Params
from jaxinfer.tree import tree


def bucket(count: int) -> int:
    """The size that `count` things are padded to: the next power of two."""
    return 1 << max(0, count - 1).bit_length()


def pad[T](things: list[T]) -> tuple[T, ...]:
    """As many things as the bucket holds, the last one repeated."""
    return (*things, *[things[-1]] * (bucket(len(things)) - len(things)))


@tree
class Embedded:
    """Of one picture: `Features` and `ClickFeatures` without the axis of pictures, or None."""

    features: Any
    clicks: Any


@tree
class Boxes:
    """Exemplars of P prompts; see `model.Prompts`."""

    boxes: Any
    labels: Any
    mask: Any


@tree
class Found:
    """Candidates for P prompts: `scores` `[P, Q]` and `presence` `[P]`, float32 from 0 to 1;
    `boxes` `[P, Q, 4]` float32, left, top, right, bottom as parts of the picture's sides; `masks`
    `[P, Q, 4g, 4g]`, logits."""

    scores: Any
    presence: Any
    boxes: Any
    masks: Any


@partial(jax.jit, static_argnames=("cfg", "concepts", "points"))
def embed_pictures(
    params: Params, cfg: Config, pixels: jax.Array, *, concepts: bool, points: bool
) -> tuple[Embedded, ...]:
    """Features of pictures `[B, S, S, 3]` uint8, for concepts (words and boxes), points or both."""
    seen = trunk.encode(params.trunk, cfg.trunk, pixels)
    features = model.from_trunk(params, cfg, seen) if concepts else None
    clickable = clicks.embed(params.clicks, cfg, seen) if points else None
    return _split(Embedded(features, clickable), len(pixels))


@partial(jax.jit, static_argnames="cfg")
def embed_texts(params: Params, cfg: Config, ids: jax.Array) -> tuple[jax.Array, ...]:
    """Text tokens `[T, D]` of each prompt of `[P, T]`."""
    return tuple(model.embed_text(params, cfg, ids))


@partial(jax.jit, static_argnames="cfg")
def detect(
    params: Params,
    cfg: Config,
    pictures: tuple[Features, ...],
    image: jax.Array,
    texts: tuple[jax.Array, ...],
    text_mask: jax.Array,
    boxes: Boxes,
) -> Found:
    """Candidates for P prompts about some pictures; arguments as in `model.Prompts`."""
    prompts = model.Prompts(
        image, jnp.stack(texts), text_mask, boxes.boxes, boxes.labels, boxes.mask
    )
    found = model.detect(params, cfg, _stack(pictures), prompts)
    x, y, width, height = jnp.moveaxis(found.boxes, -1, 0)
    corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return Found(found.scores, jax.nn.sigmoid(found.presence), jnp.stack(corners, -1), found.masks)


@partial(jax.jit, static_argnames="cfg")
def click(
    params: Params,
    cfg: Config,
    pictures: tuple[ClickFeatures, ...],
    prompts: ClickPrompts,
    ambiguous: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Mask logits `[P, 4g, 4g]` and estimated IoU `[P]` float32 of the objects at some points."""
    found = clicks.click(params.clicks, cfg, _stack(pictures), prompts)
    return clicks.best(found, ambiguous)


@jax.jit
def _pick(masks: jax.Array, prompt: jax.Array, query: jax.Array) -> jax.Array:
    return masks[prompt, query]


def pick(masks: jax.Array, prompt: np.ndarray, query: np.ndarray) -> np.ndarray:
    """The masks `[n, 4g, 4g]` of some candidates of `[P, Q, 4g, 4g]`, on the host."""
    count = len(prompt)
    if not count:
        return np.empty((0, *masks.shape[2:]), np.float32)
    extra = (0, bucket(count) - count)
    picked = _pick(masks, np.pad(prompt, extra), np.pad(query, extra))
    return np.asarray(picked)[:count]


def _split(pictures: Any, count: int) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(pictures)
    return tuple(treedef.unflatten([leaf[i] for leaf in leaves]) for i in range(count))


def _stack(pictures: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pictures)
