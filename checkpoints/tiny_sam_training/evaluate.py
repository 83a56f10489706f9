"""Measure a checkpoint on scenes that training has not seen.

    python -m checkpoints.tiny_sam_training.evaluate DIR

prints a JSON line for each kind of prompt and one for all of them, and writes the same to
`DIR/heldout/metrics.jsonl`, with pictures in `DIR/heldout/pictures.jpg` (`heldout-fp8` with
`--fp8`). Prompts of the kind
"absent" have nouns that training never had.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from checkpoints.sam import load
from checkpoints.tiny_sam_training.dataset import ABSENT, KINDS, Examples, Phrases, phrases, sample
from checkpoints.tiny_sam_training.matching import assign
from checkpoints.tiny_sam_training.train import prompts_of
from jaxinfer.sam import fp8
from jaxinfer.sam.config import Config
from jaxinfer.sam.model import detect, embed_image
from jaxinfer.sam.params import Params
from jaxinfer.tree import tree

THRESHOLD = 0.5
"""Score that a candidate must exceed, and IoU from which one counts as found."""

PROMPTS = 4
"""Prompts a picture."""

COLUMNS, ROWS = 6, 4
"""Of the sheet of pictures, one row after another of one kind after another."""

OVERLAYS = ((255, 0, 255), (0, 255, 255), (255, 255, 0), (255, 255, 255), (0, 255, 0))


@tree
class Outcome:
    """What was found for P prompts.

    `kept`: `[P, Q]` bool, candidates over the threshold; `iou`: `[P, N]`, of each wanted thing and
    the kept candidate matched with it, 0 for none; `masks`: `[P, Q, S, S]` bool.
    """

    kept: jax.Array
    iou: jax.Array
    masks: jax.Array


@partial(jax.jit, static_argnames=("cfg", "book", "pictures"))
def examine(
    params: Params, key: jax.Array, kind: jax.Array, *, cfg: Config, book: Phrases, pictures: int
) -> tuple[Examples, Outcome]:
    """Draw examples of a kind and find what they ask for; masks at the picture's size."""
    side = cfg.trunk.image_size
    examples = sample(key, cfg, book, pictures, PROMPTS, kind=kind, owner_side=side)
    features = embed_image(params, cfg, examples.pixels)
    prompts = prompts_of(params, cfg, examples, jnp.asarray(book.ids))
    found = detect(params, cfg, features, prompts)
    count, queries = found.logits.shape
    masks = jax.image.resize(
        found.masks.astype(jnp.float32), (count, queries, side, side), "bilinear"
    )
    masks = masks > 0
    kept = found.scores > THRESHOLD
    wanted = examples.wanted.reshape(count, -1)
    things = jnp.arange(wanted.shape[1])[:, None, None]
    # Prompt by prompt, since all pairs of maps at once would be large.
    iou = jax.lax.map(
        lambda pair: overlap(pair[0], pair[1] == things),
        (masks, examples.owner[prompts.image]),
    )
    iou = iou * kept[..., None]
    best = jax.vmap(assign)(-iou, wanted)
    matched = jnp.take_along_axis(iou, best[:, None], 1)[:, 0]
    return examples, Outcome(kept, matched * wanted, masks)


def overlap(a: jax.Array, b: jax.Array) -> jax.Array:
    """Intersection over union of every pair of masks, `[Q, S, S]` and `[N, S, S]` to `[Q, N]`."""
    a, b = (x.reshape(len(x), -1).astype(jnp.float32) for x in (a, b))
    common = a @ b.T
    return common / jnp.maximum(a.sum(1)[:, None] + b.sum(1) - common, 1)


def summary(kept: np.ndarray, iou: np.ndarray, wanted: np.ndarray) -> dict[str, float | None]:
    """The figures of some prompts.

    Args:
        kept: `[P, Q]` bool.
        iou: `[P, N]`.
        wanted: `[P, N]` bool.

    Returns:
        `mean_iou` of the matched masks, those of IoU over 0.5; `mean_iou_all` of all wanted
        things, 0 for one not found; `recall` and `precision` at an IoU of 0.5; `absent_rejected`,
        how often nothing is found where there is nothing. None where there was no case; and counts.
    """
    hit = iou >= THRESHOLD
    absent = ~wanted.any(1)

    def share(part: Any, whole: Any) -> float | None:
        return round(float(part / whole), 4) if whole else None

    return {
        "prompts": len(wanted),
        "things": int(wanted.sum()),
        "mean_iou": share(iou[hit].sum(), hit.sum()),
        "mean_iou_all": share(iou.sum(), wanted.sum()),
        "recall": share(hit.sum(), wanted.sum()),
        "precision": share(hit.sum(), kept.sum()),
        "absent": int(absent.sum()),
        "absent_rejected": share((absent & ~kept.any(1)).sum(), absent.sum()),
    }


def sheet(shown: list[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]) -> Image.Image:
    """A sheet of pictures with what was found in them, and the prompt below.

    Args:
        shown: prompt, pixels `[S, S, 3]` uint8, masks `[n, S, S]` bool and the example's box, if
            it has one, in pixels x0, y0, x1, y1.
    """
    side = shown[0][1].shape[0]
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    page = Image.new("RGB", (columns * (side + 8), rows * (side + 28)), "white")
    draw = ImageDraw.Draw(page)
    for place, (text, pixels, masks, box) in enumerate(shown):
        left, top = place % columns * (side + 8), place // columns * (side + 28)
        picture = pixels.astype(np.float32)
        for i, mask in enumerate(masks):
            colour = np.array(OVERLAYS[i % len(OVERLAYS)], np.float32)
            inner = mask & np.roll(mask, 2, 0) & np.roll(mask, -2, 0)
            border = mask & ~(inner & np.roll(mask, 2, 1) & np.roll(mask, -2, 1))
            picture = np.where(mask[..., None], 0.6 * picture + 0.4 * colour, picture)
            picture = np.where(border[..., None], colour, picture)
        page.paste(Image.fromarray(picture.astype(np.uint8)), (left, top))
        if box is not None:
            x0, y0, x1, y1 = box.tolist()
            draw.rectangle((left + x0, top + y0, left + x1, top + y1), outline="black", width=2)
        draw.text((left + 4, top + side + 4), f"{text}: {len(masks)}", "black", font_size=16)
    return page


def evaluate(
    directory: Path, pictures: int, batch: int, seed: int, dtype: Any, in_fp8: bool
) -> None:
    """Print and write the figures, and draw the sheet."""
    cfg, params = load(directory, dtype=dtype)
    params = fp8.quantise(params) if in_fp8 else params
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    known, heldout = phrases(tokenizer, cfg), phrases(tokenizer, cfg, heldout=True)
    out = directory / ("heldout-fp8" if in_fp8 else "heldout")
    out.mkdir(exist_ok=True)
    everything: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    shown = []
    with (out / "metrics.jsonl").open("w") as lines:
        for kind, name in enumerate(KINDS):
            book = heldout if kind == ABSENT else known
            found = []
            for turn in range(max(1, pictures // batch)):
                key = jax.random.fold_in(jax.random.key(seed), turn * len(KINDS) + kind)
                examples, outcome = examine(
                    params, key, jnp.int32(kind), cfg=cfg, book=book, pictures=batch
                )
                wanted = np.asarray(examples.wanted).reshape(len(outcome.kept), -1)
                found.append((np.asarray(outcome.kept), np.asarray(outcome.iou), wanted))
                if turn == 0:
                    shown += exhibits(examples, outcome, book, COLUMNS * ROWS // len(KINDS))
            _report(lines, name, summary(*map(np.concatenate, zip(*found, strict=True))))
            everything += found
        _report(lines, "all", summary(*map(np.concatenate, zip(*everything, strict=True))))
    sheet(shown).save(out / "pictures.jpg", quality=85)


def exhibits(
    examples: Examples, outcome: Outcome, book: Phrases, count: int
) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]:
    """The first prompt of the first `count` pictures, as `sheet` takes them."""
    shown = []
    for picture in range(min(count, len(examples.pixels))):
        prompt = picture * PROMPTS
        masks = np.asarray(outcome.masks[prompt])[np.asarray(outcome.kept[prompt])]
        pixels = np.asarray(examples.pixels[picture])
        cx, cy, w, h = np.asarray(examples.box[picture, 0, 0]) * len(pixels)
        corners = np.array([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2])
        text = book.texts[int(examples.row[picture, 0])]
        if not examples.box_mask[picture, 0, 0]:
            shown.append((text, pixels, masks, None))
        else:
            sign = "+" if examples.box_label[picture, 0, 0] else "-"
            shown.append((f"{text} {sign} box", pixels, masks, corners))
    return shown


def _report(lines: Any, kind: str, figures: dict[str, float | None]) -> None:
    line = json.dumps({"kind": kind, **figures})
    print(line, flush=True)
    lines.write(line + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkpoint")
    parser.add_argument("--pictures", type=int, default=128, help=f"a kind; {PROMPTS} prompts each")
    parser.add_argument("--batch", type=int, default=16, help="pictures at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--fp8", action="store_true", help="the trunk's products in 8 bits")
    a = parser.parse_args()
    evaluate(a.directory, a.pictures, a.batch, a.seed, getattr(jnp, a.dtype), a.fp8)


if __name__ == "__main__":
    main()
