"""The image model of SAM 3 and 3.1 end to end: pictures and prompts in, detections out."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.sam import decoder, encoder, geometry, masks, neck, text, trunk
from jaxinfer.sam.config import Config
from jaxinfer.sam.params import Params
from jaxinfer.sam.positions import grid_sine
from jaxinfer.tree import tree


@tree
class Features:
    """What prompts need to know of B pictures; g is the grid, D the width.

    `x4`: `[B, 4g, 4g, D]`, `x2`: `[B, 2g, 2g, D]`, `x1`: `[B, g, g, D]`; `cls`: `[B, D]`, the class
    token behind the geometry encoder, which is all the geometry that a prompt without boxes has.
    """

    x4: Any
    x2: Any
    x1: Any
    cls: Any


@tree
class Prompts:
    """P prompts of T tokens and N boxes, each about one picture.

    `image`: `[P]` int32, rows of `Features`; `text`: `[P, T, D]` from `embed_text`; `text_mask`:
    `[P, T]` bool, True at tokens; `boxes`: `[P, N, 4]` float32, cx, cy, w, h as parts of the
    picture's sides (N may be 0); `box_labels`: `[P, N]` int32, 1 alike, 0 unlike; `box_mask`:
    `[P, N]` bool, True at boxes, which come before the padding.
    """

    image: Any
    text: Any
    text_mask: Any
    boxes: Any
    box_labels: Any
    box_mask: Any


@tree
class Detections:
    """Q candidates for each of P prompts.

    `logits`: `[P, Q]` float32; `presence`: `[P]` float32, the logit of the thing being there at
    all; `boxes`: `[P, Q, 4]` float32, cx, cy, w, h as parts of the picture's sides; `masks`:
    `[P, Q, 4g, 4g]`, logits.
    """

    logits: Any
    presence: Any
    boxes: Any
    masks: Any

    @property
    def scores(self) -> jax.Array:
        """Probability that a candidate is what was asked for, `[P, Q]`."""
        return jax.nn.sigmoid(self.logits) * jax.nn.sigmoid(self.presence)[:, None]


def embed_image(params: Params, cfg: Config, pixels: jax.Array) -> Features:
    """Features of RGB pictures `[B, S, S, 3]` uint8, S the model's `image_size`."""
    return from_trunk(params, cfg, trunk.encode(params.trunk, cfg.trunk, pixels))


def from_trunk(params: Params, cfg: Config, seen: jax.Array) -> Features:
    """Features from what the trunk saw, `[B, g, g, C]` of `trunk.encode`."""
    x4, x2, x1 = neck.pyramid(params.neck, seen)
    boxes, labels = jnp.zeros((len(x1), 0, 4)), jnp.zeros((len(x1), 0), jnp.int32)
    cls = geometry.tokens(params.geometry, cfg, x1, boxes, labels, labels.astype(bool))
    return Features(x4, x2, x1, cls[:, 0])


def embed_text(params: Params, cfg: Config, ids: jax.Array) -> jax.Array:
    """Text tokens `[P, T, D]` of ids `[P, T]` int32, T at most the context."""
    return text.encode(params.text, cfg.text, ids)


def detect(params: Params, cfg: Config, features: Features, prompts: Prompts) -> Detections:
    """Find what the prompts ask for."""
    prompt, mask = prompt_tokens(params, cfg, features, prompts)
    picture = features.x1.reshape(len(features.x1), -1, cfg.width)
    positions = grid_sine(cfg.trunk.grid, cfg.width)
    image = prompts.image
    memory = encoder.encode(params.encoder, cfg, picture, positions, image, prompt, mask)
    found = decoder.decode(params.decoder, cfg, memory, positions, prompt, mask)
    return Detections(
        logits=decoder.score(params.scoring, found.hidden, prompt, mask),
        presence=found.presence,
        boxes=found.boxes,
        masks=masks.draw(
            params.masks,
            cfg,
            features.x4[image],
            features.x2[image],
            memory,
            prompt,
            mask,
            found.hidden,
        ),
    )


def prompt_tokens(
    params: Params, cfg: Config, features: Features, prompts: Prompts
) -> tuple[jax.Array, jax.Array]:
    """Text, class token and boxes, `[P, T + 1 + N, D]`, and which of them count, `[P, T + 1 + N]`.

    Without boxes the class token depends on the picture alone and is not computed again.
    """
    image = prompts.image
    if prompts.boxes.shape[1]:
        shapes = geometry.tokens(
            params.geometry,
            cfg,
            features.x1[image],
            prompts.boxes,
            prompts.box_labels,
            prompts.box_mask,
        )
    else:
        shapes = features.cls[image][:, None]
    mask = [prompts.text_mask, jnp.ones((len(image), 1), bool), prompts.box_mask]
    tokens = jnp.concatenate([prompts.text, shapes.astype(prompts.text.dtype)], 1)
    return tokens, jnp.concatenate(mask, 1)
