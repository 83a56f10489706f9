"""What the shipped checkpoint finds in scenes that it was not trained on."""

import jax
import numpy as np
import pytest

from checkpoints import SHIPPED
from checkpoints.tiny_sam_training import scenes, words
from jaxinfer import Prompt, Segmenter

pytestmark = pytest.mark.skipif(
    not (SHIPPED["tiny_sam"] / "config.json").is_file(), reason="tiny_sam is not there"
)

SIDE, SCENES = 400, 8


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return Segmenter("tiny_sam")


@pytest.fixture(scope="module")
def drawn() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pictures, for each pixel the thing seen there or -1, and the things' classes."""

    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        scene = scenes.draw_scene(key)
        return scenes.paint(scene, SIDE), scenes.owners(scene, SIDE), scene.classes

    keys = jax.random.split(jax.random.key(20_000_001), SCENES)
    return [tuple(map(np.asarray, draw(key))) for key in keys]


def wanted(scene: tuple[np.ndarray, np.ndarray, np.ndarray], colour: int, shape: int) -> list:
    """The masks of the things of a colour and a shape."""
    _, owner, classes = scene
    alike = (classes[:, words.COLOUR] == colour) & (classes[:, words.SHAPE] == shape)
    return [owner == i for i in np.flatnonzero(alike) if (owner == i).any()]


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


def kinds(scene: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[tuple[int, int]]:
    """Colours and shapes of the things that are seen."""
    _, owner, classes = scene
    seen = np.unique(owner[owner >= 0])
    return sorted({(int(c[words.COLOUR]), int(c[words.SHAPE])) for c in classes[seen]})


def test_words_find_what_they_name(segmenter: Segmenter, drawn: list) -> None:
    asked = [
        [f"{words.COLOURS[c][0]} {words.SHAPES[s][0]}" for c, s in kinds(scene)] for scene in drawn
    ]
    results = segmenter.segment([scene[0] for scene in drawn], asked)
    overlaps = []
    for scene, result in zip(drawn, results, strict=True):
        for index, (colour, shape) in enumerate(kinds(scene)):
            found = [each.mask for each in result.objects if each.prompt_index == index]
            for mask in wanted(scene, colour, shape):
                overlaps.append(max((iou(mask, other) for other in found), default=0.0))
    assert len(overlaps) > SCENES
    assert np.mean(np.array(overlaps) > 0.5) > 0.8
    assert np.mean([overlap for overlap in overlaps if overlap > 0.5]) > 0.8


def test_what_is_absent_is_not_found(segmenter: Segmenter, drawn: list) -> None:
    nouns = list(words.HELDOUT_NOUNS[:6])
    results = segmenter.segment([scene[0] for scene in drawn], nouns)
    wrong = sum(
        any(each.prompt_index == index for each in result.objects)
        for result in results
        for index in range(len(nouns))
    )
    assert wrong <= 0.1 * SCENES * len(nouns)


def test_an_example_finds_what_is_like_it(segmenter: Segmenter, drawn: list) -> None:
    overlaps = []
    for scene in drawn:
        colour, shape = max(kinds(scene), key=lambda kind: len(wanted(scene, *kind)))
        masks = wanted(scene, colour, shape)
        rows, columns = np.nonzero(masks[0])
        box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        found = segmenter.segment(scene[0], Prompt(boxes=[box])).objects
        overlaps.append(max((iou(masks[0], each.mask) for each in found), default=0.0))
    assert np.median(overlaps) > 0.7
