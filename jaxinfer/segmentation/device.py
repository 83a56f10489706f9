"""What runs on the device, in a few static shapes: embedding, detection, clicks, outlines.

Everything is padded to the next power of two, so that few programs are compiled. Features are kept
picture by picture and text by text; a program takes as many of them as it needs, and of the
parameters only those that it reads: each costs time at every call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sam import clicks, model, outlines, text, trunk
from jaxinfer.sam.clicks import ClickFeatures, ClickPrompts
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import Config
from jaxinfer.sam.model import Features
from jaxinfer.sam.outlines import Outlines, Places
from jaxinfer.sam.params import Params
from jaxinfer.sam.prepared import prepared
from jaxinfer.tree import tree


def bucket(count: int) -> int:
    """The size that `count` things are padded to: the next power of two."""
    return 1 << max(0, count - 1).bit_length()


def pad[T](things: list[T]) -> tuple[T, ...]:
    """As many things as the bucket holds, the last one repeated."""
    return (*things, *[things[-1]] * (bucket(len(things)) - len(things)))


class Parts:
    """What each program reads of the parameters."""

    def __init__(self, params: Params) -> None:
        nothing: dict[str, Any] = dict.fromkeys(params.__dataclass_fields__)
        self.trunk, self.text, self.clicks = params.trunk, params.text, params.clicks
        self.features: Params = replace(
            params, **nothing | {"neck": params.neck, "geometry": params.geometry}
        )
        reads = ("geometry", "encoder", "decoder", "masks", "scoring")
        ready = prepared(params)
        self.detector: Params = replace(
            params, **nothing | {name: getattr(ready, name) for name in reads}
        )


@tree
class Boxes:
    """Exemplars of P prompts; see `model.Prompts`."""

    boxes: Any
    labels: Any
    mask: Any


@tree
class Found:
    """Q candidates for each of P prompts, by falling score.

    `scores`: `[P, Q]` float32 from 0 to 1; `presence`: `[P]` float32 likewise, or None; `boxes`:
    `[P, Q, 4]` float32, left, top, right, bottom as parts of the picture's sides, or None; `masks`:
    `[P, Q, 4g, 4g]`, logits, in another order; `order`: `[P, Q]` int32, where those of the
    candidates are.
    """

    scores: Any
    presence: Any
    boxes: Any
    masks: Any
    order: Any


@tree
class Limits:
    """Of P prompts: a score must exceed `threshold`, `[P]` float32, and only the first `most`,
    `[P]` int32, count."""

    threshold: Any
    most: Any


@partial(jit, static_argnames="cfg")
def see(params: Any, cfg: Config, pictures: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """What the trunk sees, `[g, g, C]`, of each of some pictures `[S, S, 3]` uint8."""
    return tuple(trunk.encode(params, cfg.trunk, jnp.stack(pictures)))


@partial(jit, static_argnames="cfg")
def features(params: Params, cfg: Config, seen: tuple[jax.Array, ...]) -> tuple[Features, ...]:
    """For words and boxes, of each picture, without the axis of pictures."""
    return _split(model.from_trunk(params, cfg, jnp.stack(seen)), len(seen))


@partial(jit, static_argnames="cfg")
def click_features(
    params: Any, cfg: Config, seen: tuple[jax.Array, ...]
) -> tuple[ClickFeatures, ...]:
    """For points, of each picture, without the axis of pictures."""
    return _split(clicks.embed(params, cfg, jnp.stack(seen)), len(seen))


@partial(jit, static_argnames="cfg")
def embed_texts(params: Any, cfg: Config, ids: jax.Array) -> tuple[jax.Array, ...]:
    """Text tokens `[T, D]` of each prompt of `[P, T]`."""
    return tuple(text.encode(params, cfg.text, ids))


@partial(jit, static_argnames="cfg")
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
    order = jnp.argsort(-found.scores, axis=-1, stable=True)
    x, y, width, height = jnp.moveaxis(found.boxes, -1, 0)
    corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return Found(
        scores=jnp.take_along_axis(found.scores, order, 1),
        presence=jax.nn.sigmoid(found.presence),
        boxes=jnp.take_along_axis(jnp.stack(corners, -1), order[..., None], 1),
        masks=found.masks,
        order=order,
    )


@partial(jit, static_argnames="cfg")
def click(
    params: Any,
    cfg: Config,
    pictures: tuple[ClickFeatures, ...],
    prompts: ClickPrompts,
    ambiguous: jax.Array,
) -> Found:
    """One candidate for each of P prompts by points; its score is the estimated IoU."""
    found = clicks.click(params, cfg, _stack(pictures), prompts)
    masks, iou = clicks.best(found, ambiguous)
    order = jnp.zeros((len(iou), 1), jnp.int32)
    return Found(jnp.clip(iou, 0, 1)[:, None], None, None, masks[:, None], order)


@partial(jit, static_argnames="count")
def outline(found: Found, limits: Limits, places: Places, *, count: int) -> Outlines:
    """Outlines of the first `count` candidates for each prompt, of those within its limits."""
    logits = jax.vmap(lambda masks, order: masks[order])(found.masks, found.order[:, :count])
    kept = jnp.minimum((found.scores > limits.threshold[:, None]).sum(-1), limits.most)
    return outlines.trace(logits, kept, places)


@jit
def one(found: Found, row: jax.Array) -> Found:
    """The candidates for one prompt."""
    return jax.tree.map(lambda leaf: leaf[row][None], found)


@jit
def _pick(masks: jax.Array, row: jax.Array, candidate: jax.Array) -> jax.Array:
    return masks[row, candidate]


def pick(masks: jax.Array, row: int, candidates: np.ndarray) -> np.ndarray:
    """The logits `[n, 4g, 4g]` of some candidates for a prompt, on the host."""
    padded = np.pad(candidates, (0, bucket(len(candidates)) - len(candidates)))
    return np.asarray(_pick(masks, np.int32(row), padded))[: len(candidates)]


def _split(pictures: Any, count: int) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(pictures)
    return tuple(treedef.unflatten([leaf[i] for leaf in leaves]) for i in range(count))


def _stack(pictures: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *pictures)
