"""The model against transformers, float32, part by part and end to end (see tests/goldens)."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sam import geometry
from tests.sam.helpers import (
    find,
    golden_cases,
    golden_config,
    golden_params,
    golden_prompts,
    look,
    read,
    relative_error,
)

pytestmark = pytest.mark.also_gpu
TOLERANCE = 1e-4
"""The two forms of GELU lie further apart than this in every output that they have part in."""


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_every_part_and_the_whole(gelu: Literal["erf", "tanh"]) -> None:
    params, cfg, cases = golden_params(), golden_config(gelu), golden_cases()
    seen, features = look(params, cfg, jnp.asarray(cases["pixels"]))
    ids = jnp.asarray(cases["ids"])
    text = read(params, cfg, ids)
    found = {"trunk": seen, "x4": features.x4, "x2": features.x2, "x1": features.x1}
    found["text"] = text * (ids != 0)[..., None]
    for case, boxes in (("words", False), ("mixed", True)):
        prompts = golden_prompts(text, boxes)
        out, parts = find(params, cfg, features, prompts)
        parts["geometry"] = as_transformers_orders(parts["geometry"], prompts.box_mask)
        for name in ("logits", "presence", "boxes", "masks"):
            parts[name] = getattr(out, name)
        found |= {f"{case}.{name}": part for name, part in parts.items()}

    errors = {name: relative_error(out, cases[f"{gelu}.{name}"]) for name, out in found.items()}
    assert errors.keys() == {k.split(".", 1)[1] for k in cases if k.startswith(gelu)}
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


def test_boxes_are_pooled_as_torchvision_does() -> None:
    """On a map of more cells: boxes of up to six samples a bin, and boxes beyond the edges."""
    features, boxes, pooled = (golden_cases()[f"pool.{k}"] for k in ("features", "boxes", "pooled"))
    out = geometry.pool(jnp.asarray(features[None]), jnp.asarray(boxes[None]))[0]
    np.testing.assert_allclose(out, pooled, atol=1e-5)


def as_transformers_orders(tokens: jax.Array, box_mask: jax.Array) -> jax.Array:
    """Boxes, class token, padding; zeros for padding that we do without."""
    ordered = np.zeros((len(tokens), 4, tokens.shape[-1]), np.float32)
    for row, (cls, *boxes), count in zip(ordered, tokens, box_mask.sum(1), strict=True):
        row[: count + 1] = [*boxes[:count], cls]
    return jnp.asarray(ordered)
