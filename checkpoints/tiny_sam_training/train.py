"""Train `tiny_sam` with the engine's own functions.

    python -m checkpoints.tiny_sam_training.train --out OUT --seconds 330

writes the checkpoint in the published layout (float16) every `SAVE_EVERY` seconds, its tokenizer,
and `OUT/curve.jsonl`, one line every `LOG_EVERY` steps. Scenes are drawn on the device as they are
wanted, each seen once.
"""

import argparse
import json
import math
import sys
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from checkpoints.sam import load, write
from checkpoints.tiny_sam_training import tokenizer
from checkpoints.tiny_sam_training.architecture import CONFIG
from checkpoints.tiny_sam_training.dataset import HARD, Examples, Phrases, phrases, sample
from checkpoints.tiny_sam_training.losses import (
    Candidates,
    losses,
    mask_losses,
    match,
    naming,
    total,
)
from checkpoints.tiny_sam_training.words import ANY, ATTRIBUTES
from jaxinfer.sam import decoder, encoder, masks
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import differentiable, linear
from jaxinfer.sam.leaves import init
from jaxinfer.sam.model import Prompts, embed_image, embed_text, prompt_tokens
from jaxinfer.sam.params import Linear, Params
from jaxinfer.sam.positions import grid_sine
from jaxinfer.sam.structure import structure
from jaxinfer.tree import tree

WARMUP = 300
AVERAGING = 0.999
"""Decay of the moving average of the weights, which is what is kept."""

PROMPTS = 8
"""Prompts a picture."""

DRAWN = 2
"""For how many of them masks are drawn and judged: that costs more than all else of a prompt, and
masks are learnt long before words are."""

LOG_EVERY = 25
SAVE_EVERY = 60.0
FIRST_SEED = 1_000_000
"""Scenes of training and of evaluation come from different seeds."""

IN_FLIGHT = 3
"""Steps that may run ahead of the clock."""


@tree
class Taught:
    """What is learnt: the model, and two layers that are left behind.

    `semantic` marks the cells of the memory that are wanted, `[1, D]`. It teaches words and pixels
    to meet long before queries know where to look, and stands for the head with which the
    full-size model learnt the same.

    `names` tells the classes of all attributes, `[C, D]`, from the picture's features at a cell and
    from the prompt's at its words alike. Presence and masks alone teach some of them very late.
    """

    model: Params
    semantic: Linear
    names: Linear


@tree
class TrainState:
    """`Taught` in float32, its moving average, and what AdamW keeps of it."""

    params: Any
    average: Any
    optimiser: Any


def prompts_of(params: Params, cfg: Config, examples: Examples, ids: jax.Array) -> Prompts:
    """The examples' B x K prompts, picture by picture; `ids`: `[phrases, context]`."""
    pictures, count = examples.row.shape
    rows = ids[examples.row.reshape(-1)]
    return Prompts(
        image=jnp.repeat(jnp.arange(pictures), count),
        text=embed_text(params, cfg, rows),
        text_mask=rows != 0,
        boxes=examples.box.reshape(-1, 1, 4),
        box_labels=examples.box_label.reshape(-1, 1),
        box_mask=examples.box_mask.reshape(-1, 1),
    )


def objective(
    taught: Taught, cfg: Config, examples: Examples, ids: jax.Array, classes: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its parts; the arithmetic is in the parameters' type.

    `ids` and `classes` are those of `Phrases`.
    """
    params = taught.model
    features = embed_image(params, cfg, examples.pixels)
    prompts = prompts_of(params, cfg, examples, ids)
    prompt, mask = prompt_tokens(params, cfg, features, prompts)
    picture = features.x1.reshape(len(features.x1), -1, cfg.width)
    positions = grid_sine(cfg.trunk.grid, cfg.width)
    image = prompts.image
    memory = encoder.encode(params.encoder, cfg, picture, positions, image, prompt, mask)
    found = candidates(params, cfg, memory, positions, prompt, mask)

    things = examples.things[image]
    wanted = examples.wanted.reshape(len(image), -1)
    cells = at_cells(examples.owner, cfg.trunk.grid)
    semantic = linear(memory, taught.semantic).reshape(len(image), *cells.shape[1:])
    matched = match(found, things, wanted)
    parts = losses(found, matched, semantic, things, cells[image], wanted)

    chosen = jnp.take_along_axis(found.hidden, matched[..., None], 2)
    given = first_of_each((image, memory, prompt, mask, chosen, wanted), len(examples.row))
    image, memory, prompt, mask, chosen, wanted = given
    maps = features.x4[image], features.x2[image]
    queries = chosen.reshape(len(image), -1, cfg.width)
    drawn = masks.draw(params.masks, cfg, *maps, memory, prompt, mask, queries)
    drawn = drawn.reshape(*chosen.shape[:3], *drawn.shape[2:])
    parts |= mask_losses(drawn, examples.owner[image], wanted)

    parts |= naming_losses(taught.names, picture, cells, examples, prompts, classes)
    return total(parts), parts


def naming_losses(
    names: Linear,
    picture: jax.Array,
    cells: jax.Array,
    examples: Examples,
    prompts: Prompts,
    classes: jax.Array,
) -> dict[str, jax.Array]:
    """How well `names` reads the picture `[B, g², D]` and the prompts' words.

    `cells`: `[B, g, g]` of `at_cells`; `classes`: of `Phrases`.
    """
    owner = cells.reshape(len(cells), -1, 1)
    there = jnp.take_along_axis(examples.classes, jnp.maximum(owner, 0), 1)
    share = prompts.text_mask / prompts.text_mask.sum(1, keepdims=True)
    said = jnp.einsum("pt,ptd->pd", share.astype(prompts.text.dtype), prompts.text)
    return {
        "cells": naming(linear(picture, names), jnp.where(owner < 0, ANY, there)),
        "words": naming(linear(said, names), classes[examples.row.reshape(-1)]),
    }


def at_cells(owner: jax.Array, grid: int) -> jax.Array:
    """The owners `[B, M, M]` of the pixels at the centres of a grid's cells, `[B, g, g]`."""
    stride = owner.shape[1] // grid
    return owner[:, stride // 2 :: stride, stride // 2 :: stride]


def first_of_each(arrays: Any, pictures: int) -> Any:
    """Of arrays of P prompts, picture by picture, each picture's first `DRAWN`."""

    def first(a: jax.Array) -> jax.Array:
        return a.reshape(pictures, -1, *a.shape[1:])[:, :DRAWN].reshape(-1, *a.shape[1:])

    return jax.tree.map(first, arrays)


def candidates(
    params: Params,
    cfg: Config,
    memory: jax.Array,
    positions: jax.Array,
    prompt: jax.Array,
    mask: jax.Array,
) -> Candidates:
    """What each decoder layer would give if it were the last; arguments of `decoder.decode`."""
    layers = params.decoder.layers
    found = [
        decoder.decode(
            replace(params.decoder, layers=layers[: i + 1]), cfg, memory, positions, prompt, mask
        )
        for i in range(len(layers))
    ]
    return Candidates(
        hidden=jnp.stack([f.hidden for f in found], 1),
        logits=jnp.stack([decoder.score(params.scoring, f.hidden, prompt, mask) for f in found], 1),
        boxes=jnp.stack([f.boxes for f in found], 1),
        presence=jnp.stack([f.presence for f in found], 1),
    )


def start(cfg: Config, key: jax.Array) -> Taught:
    """Random parameters, with queries all over the picture whose boxes stay where they are.

    Masks are faint at first, or else their loss drowns all others.
    """
    inside, key = jax.random.split(key)
    params = init(structure(cfg), key)
    centres = jax.random.uniform(inside, (cfg.num_queries, 2), minval=0.1, maxval=0.9)
    places = jnp.concatenate([centres, jnp.full_like(centres, 0.2)], 1)
    decoder = replace(
        params.decoder,
        references=jax.scipy.special.logit(places),
        box_head=_faint(params.decoder.box_head, 0.01),
    )
    masks = replace(params.masks, embed=_faint(params.masks.embed, 0.05))
    params = replace(params, decoder=decoder, masks=masks)
    classes = sum(len(attribute) for attribute in ATTRIBUTES)
    # Few cells are wanted.
    semantic = Linear(jnp.zeros((1, cfg.width)), jnp.full(1, -4.0))
    return Taught(params, semantic, Linear(jnp.zeros((classes, cfg.width)), jnp.zeros(classes)))


def _faint(layers: tuple[Linear, ...], scale: float) -> tuple[Linear, ...]:
    """A perceptron whose last layer is scaled down, and has no bias."""
    *inner, last = layers
    return *inner, Linear(scale * last.weight, jnp.zeros_like(last.bias))


def adamw() -> optax.GradientTransformation:
    """AdamW's direction, before the learning rate; decay on matrices only."""

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda a: a.ndim >= 2 and a.shape[-1] > 4, params)

    return optax.apply_if_finite(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.98),
            optax.add_decayed_weights(0.02, mask=is_matrix),
        ),
        max_consecutive_errors=10,
    )


def schedule(step: int, done: float) -> float:
    """Part of the peak rate at a step, with `done` (0 to 1) of the time gone: up, then a cosine."""
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1)))
    return cosine * min(1, (step + 1) / WARMUP)


@partial(jit, static_argnames=("cfg", "book", "pictures"), donate_argnums=0)
def train_step(
    state: TrainState,
    key: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    *,
    cfg: Config,
    book: Phrases,
    pictures: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step on fresh examples; returns the state and the parts of the loss."""
    examples = sample(jax.random.fold_in(key, step), cfg, book, pictures, PROMPTS, course=HARD)
    compute = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

    def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        cast = jax.tree.map(lambda a: a.astype(compute), params)
        with differentiable():
            return objective(cast, cfg, examples, jnp.asarray(book.ids), jnp.asarray(book.classes))

    gradients, parts = jax.grad(loss, has_aux=True)(state.params)
    direction, kept = adamw().update(gradients, state.optimiser, state.params)
    params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
    decay = jnp.minimum(AVERAGING, (1 + step) / (10 + step))
    average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, params)
    parts["gradient"] = optax.global_norm(gradients)
    return TrainState(params, average, kept), parts


def train(
    out: Path,
    *,
    seconds: float,
    steps: int | None,
    pictures: int,
    peak_rate: float,
    seed: int,
    resume: Path | None,
) -> None:
    """Train until `seconds` after the call, or for `steps`, and write the checkpoint now and then.

    `resume` is a checkpoint to go on from; give another seed, for other scenes.
    """
    called = time.perf_counter()
    book = phrases(tokenizer.save(out), CONFIG)
    # optax's own types do not know dataclasses.
    params: Any = start(CONFIG, jax.random.key(seed))
    if resume:
        params = replace(params, model=load(resume)[1])
    size = sum(a.size for a in jax.tree.leaves(params.model))
    _say(f"{size:,} parameters, {pictures} x {PROMPTS} prompts a step, {jax.devices()[0]}")
    state = TrainState(params, jax.tree.map(jnp.copy, params), adamw().init(params))
    advance = partial(train_step, cfg=CONFIG, book=book, pictures=pictures)
    key = jax.random.key(seed + FIRST_SEED)
    running: deque[jax.Array] = deque()
    step, done, began, saved = 0, 0.0, called, 0.0
    with (out / "curve.jsonl").open("w") as curve:
        while done < 1:
            now = jnp.float32(peak_rate * schedule(step, done))
            state, parts = advance(state, key, jnp.int32(step), now)
            step += 1
            # The clock sets the learning rate, so that it must not run ahead of the device.
            running.append(parts["gradient"])
            if len(running) > IN_FLIGHT:
                running.popleft().block_until_ready()
            elif step == 1:
                running[0].block_until_ready()
                began = time.perf_counter()
                _say(f"first step after {began - called:.0f} s")
            elapsed = time.perf_counter() - began
            done = step / steps if steps else elapsed / max(seconds - (began - called), 1)
            if step % LOG_EVERY == 0 or done >= 1:
                line = {name: round(float(value), 4) for name, value in parts.items()}
                speed = (step - 1) * pictures / max(elapsed, 1e-9)
                line = {"step": step, "seconds": round(elapsed, 1), "rate": float(now), **line}
                curve.write(json.dumps(line) + "\n")
                curve.flush()
                shown = " ".join(f"{name} {value:.4g}" for name, value in line.items())
                _say(f"{shown} | {speed:.0f} images/s")
            if elapsed > saved + SAVE_EVERY or done >= 1:
                save(out, state)
                saved = elapsed


def save(out: Path, state: TrainState) -> None:
    """Write the averaged weights in place of earlier ones; SystemExit if they are not finite."""
    average = jax.device_get(state.average.model)
    if not all(np.isfinite(a).all() for a in jax.tree.leaves(average)):
        raise SystemExit("the weights are not finite: try a lower --rate")
    with TemporaryDirectory(dir=out) as unfinished:
        write(unfinished, CONFIG, jax.tree.map(lambda a: a.astype(np.float16), average))
        for file in Path(unfinished).iterdir():
            file.replace(out / file.name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=330, help="wall time in all")
    parser.add_argument("--steps", type=int, help="instead of --seconds")
    parser.add_argument("--batch", type=int, default=32, help="pictures a step")
    parser.add_argument("--rate", type=float, default=6e-4, help="greatest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    a = parser.parse_args()
    train(
        a.out,
        seconds=a.seconds,
        steps=a.steps,
        pictures=a.batch,
        peak_rate=a.rate,
        seed=a.seed,
        resume=a.resume,
    )


if __name__ == "__main__":
    main()
