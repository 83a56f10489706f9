"""What several tests of SAM need: the golden model and cases, an error measure."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.sam import decoder, encoder, model, trunk
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import Config, from_dict
from jaxinfer.sam.leaves import Leaf
from jaxinfer.sam.model import Detections, Features, Prompts
from jaxinfer.sam.params import Params
from jaxinfer.sam.positions import grid_sine
from jaxinfer.sam.structure import structure

GOLDENS = Path(__file__).parents[1] / "goldens" / "sam"
EVERY, LONG = 13, 8192  # as in make_sam.py


def golden_config(gelu: Literal["erf", "tanh"] = "erf") -> Config:
    """The shape of the golden model."""
    cfg = from_dict(json.loads((GOLDENS / "config.json").read_text()))
    return replace(cfg, trunk=replace(cfg.trunk, gelu=gelu))


@cache
def golden_params() -> Params:
    """Its float32 parameters, read from the original's names."""
    stored = np.load(GOLDENS / "weights.npz")

    def read(leaf: Leaf) -> jax.Array:
        tensor = stored[leaf.name].view(ml_dtypes.bfloat16).astype(np.float32)
        assert tensor.shape == leaf.shape, leaf
        return jnp.asarray(leaf.arrange(tensor))

    return jax.tree.map(read, structure(golden_config()))


@cache
def golden_cases() -> dict[str, np.ndarray]:
    """Inputs and what transformers computes from them; see tests/goldens/README.md."""
    return dict(np.load(GOLDENS / "cases.npz"))


def golden_prompts(text: jax.Array, boxes: bool = True) -> Prompts:
    """The four prompts, with their boxes or none; `text` from `embed_text`."""
    cases = golden_cases()
    number = cases["boxes"].shape[1] if boxes else 0
    labels = cases["labels"][:, :number]
    return Prompts(
        image=jnp.asarray(cases["image"]),
        text=text,
        text_mask=jnp.asarray(cases["ids"] != 0),
        boxes=jnp.asarray(cases["boxes"][:, :number]),
        box_labels=jnp.asarray(np.maximum(labels, 0)),
        box_mask=jnp.asarray(labels >= 0),
    )


# A GPU would multiply float32 in TF32.
exactly = partial(jax.default_matmul_precision, "highest")
compiled = partial(jit, static_argnums=1)


@compiled
def look(params: Params, cfg: Config, pixels: jax.Array) -> tuple[jax.Array, Features]:
    """What the trunk sees, and the features."""
    with exactly():
        return trunk.encode(params.trunk, cfg.trunk, pixels), model.embed_image(params, cfg, pixels)


@compiled
def read(params: Params, cfg: Config, ids: jax.Array) -> jax.Array:
    """Text tokens."""
    with exactly():
        return model.embed_text(params, cfg, ids)


@compiled
def find(
    params: Params, cfg: Config, features: Features, prompts: Prompts
) -> tuple[Detections, dict[str, jax.Array]]:
    """Detections, and what the parts give on the way to them."""
    with exactly():
        tokens, mask = model.prompt_tokens(params, cfg, features, prompts)
        picture = features.x1.reshape(len(features.x1), -1, cfg.width)
        places = grid_sine(cfg.trunk.grid, cfg.width)
        image = prompts.image
        memory = encoder.encode(params.encoder, cfg, picture, places, image, tokens, mask)
        hidden = decoder.decode(params.decoder, cfg, memory, places, tokens, mask).hidden
        length = prompts.text.shape[1]
        geometry = tokens[:, length:] * mask[:, length:, None]
        parts = {"geometry": geometry, "memory": memory, "hidden": hidden}
        return model.detect(params, cfg, features, prompts), parts


def rows[T](batch: T, chosen: Sequence[int]) -> T:
    """Some of the pictures, prompts or detections."""
    return jax.tree.map(lambda a: a[jnp.asarray(chosen)], batch)


def relative_error(out: jax.Array, reference: np.ndarray) -> float:
    """`‖out − reference‖ / ‖reference‖` in float64, over what the reference keeps of `out`."""
    values = np.asarray(out, np.float64)
    if values.size > LONG:
        values = values.reshape(-1)[::EVERY]
    assert values.size == reference.size
    values = values.reshape(reference.shape)
    return float(np.linalg.norm(values - reference) / np.linalg.norm(reference))
