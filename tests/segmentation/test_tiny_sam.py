"""What the shipped checkpoint finds in scenes that it was not trained on."""

from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from checkpoints import SHIPPED
from checkpoints.tiny_sam_training import scenes, words
from jaxinfer import Prompt, Segmenter
from jaxinfer.sam.compiling import jit

pytestmark = pytest.mark.skipif(
    not (SHIPPED["tiny_sam"] / "config.json").is_file(), reason="tiny_sam is not there"
)

SIDE, SCENES, ASKED = 400, 4, 8
"""Pixels, pictures, and prompts about each: so many that one program serves them all."""


@dataclass
class Asked:
    """A scene, what was asked about it, and what was found.

    `named`: the masks that each of the first prompts should find; the last prompt shows the box of
    `example`; nothing fits those between.
    """

    pixels: np.ndarray
    named: list[list[np.ndarray]]
    example: np.ndarray
    prompts: list[str | Prompt]
    found: list[list[np.ndarray]] = field(default_factory=list)


@pytest.fixture(scope="module")
def answers() -> list[Asked]:
    @jit
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        scene = scenes.draw_scene(key)
        return scenes.paint(scene, SIDE), scenes.owners(scene, SIDE), scene.classes

    keys = jax.random.split(jax.random.key(20_000_001), SCENES)
    asked = [ask(*map(np.asarray, draw(key))) for key in keys]
    results = Segmenter("tiny_sam").segment(
        [each.pixels for each in asked], [each.prompts for each in asked]
    )
    for each, result in zip(asked, results, strict=True):
        each.found = [[] for _ in each.prompts]
        for found in result.objects:
            each.found[found.prompt_index].append(found.mask)
    return asked


def ask(pixels: np.ndarray, owner: np.ndarray, classes: np.ndarray) -> Asked:
    """Words for what is there, then for what is not, then an example."""
    masks: dict[tuple[int, int], list[np.ndarray]] = {}
    for thing in np.unique(owner[owner >= 0]):
        kind = int(classes[thing, words.COLOUR]), int(classes[thing, words.SHAPE])
        masks.setdefault(kind, []).append(owner == thing)
    kinds = list(masks)[: ASKED - 4]
    prompts = [f"{words.COLOURS[c][0]} {words.SHAPES[s][0]}" for c, s in kinds]
    prompts += words.HELDOUT_NOUNS[: ASKED - 1 - len(kinds)]
    example = max(masks.values(), key=len)[0]
    rows, columns = np.nonzero(example)
    box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    return Asked(pixels, [masks[kind] for kind in kinds], example, [*prompts, Prompt(boxes=[box])])


def best(mask: np.ndarray, found: list[np.ndarray]) -> float:
    """The greatest IoU with any of those found."""
    return max((float((mask & other).sum() / (mask | other).sum()) for other in found), default=0.0)


def test_words_find_what_they_name(answers: list[Asked]) -> None:
    overlaps = np.array(
        [
            best(mask, found)
            for each in answers
            for masks, found in zip(each.named, each.found, strict=False)
            for mask in masks
        ]
    )
    assert len(overlaps) > 2 * SCENES
    assert np.mean(overlaps > 0.5) > 0.8
    assert np.mean(overlaps[overlaps > 0.5]) > 0.8


def test_what_is_absent_is_not_found(answers: list[Asked]) -> None:
    found = [bool(f) for each in answers for f in each.found[len(each.named) : -1]]
    assert len(found) >= 3 * SCENES
    assert np.mean(found) <= 0.1


def test_an_example_finds_what_is_like_it(answers: list[Asked]) -> None:
    assert np.median([best(each.example, each.found[-1]) for each in answers]) > 0.7
