"""What FP8 in the trunk changes: features, scores and masks, against float32."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jaxinfer.bench.photos import photo
from jaxinfer.bench.sam_subjects import SamSubject
from jaxinfer.sam import fp8, model, trunk
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import Config
from jaxinfer.sam.model import Detections, Prompts
from jaxinfer.sam.params import Params

Record = dict[str, Any]


def measure_fp8(
    subject: SamSubject, words: Sequence[str], picture: bytes | None = None, objects: int = 10
) -> Record:
    """Look at a picture in float32, and in float32 with the trunk's products in FP8.

    Args:
        subject: a model that is not in FP8.
        words: what is looked for; each is a prompt.
        picture: a file's bytes; None draws one.
        objects: of each prompt the best in float32 are compared.
    """
    cfg = subject.model.config
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), subject.model.params)
    side = cfg.trunk.image_size
    file = Image.open(io.BytesIO(picture or photo(side, side, 0))).convert("RGB")
    pixels = np.asarray(file.resize((side, side), Image.Resampling.BILINEAR))[None]
    ids, mask = subject.model.tokenizer.encode(list(words))
    see = jit(lambda p, pixels: trunk.encode(p.trunk, cfg.trunk, pixels))
    find = jit(lambda p, seen: _detect(p, cfg, seen, jnp.asarray(ids), jnp.asarray(mask)))
    seen, rounded = (see(p, pixels) for p in (wide, fp8.quantise(wide)))
    # Behind the trunk both models are the same.
    exact, changed = (find(replace(wide, trunk=None), each) for each in (seen, rounded))
    best = np.argsort(-np.asarray(exact.scores), axis=1)[:, :objects]
    scores, others = (np.take_along_axis(np.asarray(f.scores), best, 1) for f in (exact, changed))
    masks, theirs = (
        np.take_along_axis(np.asarray(f.masks), best[..., None, None], 1) > 0
        for f in (exact, changed)
    )
    common, either = ((masks & theirs).sum((2, 3)), (masks | theirs).sum((2, 3)))
    iou = common[either > 0] / either[either > 0]
    return {
        "model": subject.name,
        "weights": subject.weights,
        "prompts": len(words),
        "objects": int(best.size),
        "trunk_relative_error": _relative(rounded, seen),
        "largest_score_change": round(float(np.abs(others - scores).max()), 5),
        "mean_score_change": round(float(np.abs(others - scores).mean()), 5),
        "masks_compared": int(iou.size),
        "mean_mask_iou": round(float(iou.mean()), 5) if iou.size else None,
        "least_mask_iou": round(float(iou.min()), 5) if iou.size else None,
    }


def _detect(
    params: Params, cfg: Config, seen: jax.Array, ids: jax.Array, mask: jax.Array
) -> Detections:
    count = len(ids)
    prompts = Prompts(
        image=jnp.zeros(count, jnp.int32),
        text=model.embed_text(params, cfg, ids),
        text_mask=mask,
        boxes=jnp.zeros((count, 0, 4)),
        box_labels=jnp.zeros((count, 0), jnp.int32),
        box_mask=jnp.zeros((count, 0), bool),
    )
    return model.detect(params, cfg, model.from_trunk(params, cfg, seen), prompts)


def _relative(a: jax.Array, b: jax.Array) -> float:
    """The norm of the difference over that of `b`."""
    ours, theirs = (np.asarray(x, np.float64) for x in (a, b))
    return round(float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)), 5)
