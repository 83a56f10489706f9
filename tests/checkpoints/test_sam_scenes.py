"""The drawn world that the tiny segmentation checkpoint is taught, and its tokenizer."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints.tiny_sam_training import dataset, scenes, tokenizer, words
from checkpoints.tiny_sam_training.architecture import CONFIG
from checkpoints.tiny_sam_training.dataset import ABSENT, BOX, UNLIKE, Examples, Phrases
from checkpoints.tiny_sam_training.words import ANY, ATTRIBUTES, COLOUR, SHAPE
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.tokenizer import Tokenizer as SamTokenizer

PICTURES, PROMPTS, SIDE = 32, 12, 112


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return tokenizer.train()


@pytest.fixture(scope="module")
def book(trained: Tokenizer) -> Phrases:
    return dataset.phrases(trained, CONFIG)


@pytest.fixture(scope="module")
def drawn(book: Phrases) -> tuple[Examples, scenes.Scene]:
    """Examples with small pictures, and the scenes in them."""
    small = replace(CONFIG, trunk=replace(CONFIG.trunk, image_size=SIDE))

    def make(key: jax.Array) -> tuple[Examples, scenes.Scene]:
        examples = dataset.sample(key, small, book, PICTURES, PROMPTS, owner_side=SIDE)
        keys = jax.vmap(lambda k: jax.random.split(k)[0])(jax.random.split(key, PICTURES))
        return examples, replace(jax.vmap(scenes.draw_scene)(keys), noise=jnp.zeros(PICTURES))

    return jax.tree.map(np.asarray, jit(make)(jax.random.key(7)))


def meant_by(text: str) -> list[int]:
    """Classes that the words of a prompt name, found by reading it."""
    meanings: list[int] = [ANY] * 4
    for word in text.split():
        for attribute, classes in enumerate(ATTRIBUTES):
            for number, synonyms in enumerate(classes):
                if word in synonyms or word in [words.plural(s) for s in synonyms]:
                    meanings[attribute] = number
    return meanings


def test_what_a_prompt_wants_is_what_its_words_say(
    drawn: tuple[Examples, scenes.Scene], book: Phrases
) -> None:
    examples, scene = drawn
    seen = set()
    for picture in range(PICTURES):
        classes = scene.classes[picture]
        there = np.array([(examples.owner[picture] == i).any() for i in range(scenes.THINGS)])
        for prompt in range(PROMPTS):
            kind, text = examples.kind[picture, prompt], book.texts[examples.row[picture, prompt]]
            meanings = np.array(meant_by(text))
            fits = there & ((meanings == ANY) | (classes == meanings)).all(1)
            if kind in (BOX, UNLIKE):
                box = examples.box[picture, prompt, 0]
                shown = np.abs(examples.things[picture] - box).sum(1).argmin()
                alike = there & (classes == classes[shown])[:, [COLOUR, SHAPE]].all(1)
                fits = alike if kind == BOX else fits & ~alike
            elif kind == ABSENT:
                fits = np.zeros_like(there)
            np.testing.assert_array_equal(examples.wanted[picture, prompt], fits, text)
            seen.add((int(kind), bool(fits.any())))
    # All kinds came, and of those that may ask in vain, some did.
    assert {kind for kind, _ in seen} == set(range(len(dataset.KINDS)))
    assert {(dataset.NEAR, False), (dataset.NEAR, True), (UNLIKE, False), (UNLIKE, True)} <= seen


def test_pixels_of_a_plain_thing_have_its_colour(drawn: tuple[Examples, scenes.Scene]) -> None:
    examples, scene = drawn
    tested = set()
    for picture, thing in np.argwhere(scene.classes[:, :, words.TEXTURE] == 0):
        mask = examples.owner[picture] == thing
        if mask.sum() < 60:
            continue
        colour = np.median(examples.pixels[picture][mask], 0) / 255
        nearest = np.abs(np.array(scenes.PALETTE) - colour).sum(1).argmin()
        assert nearest == scene.classes[picture, thing, COLOUR]
        tested.add(int(nearest))
    assert len(tested) > 5


def test_boxes_are_tight_around_what_is_seen(drawn: tuple[Examples, scenes.Scene]) -> None:
    examples, _ = drawn
    count = 0
    for picture, thing in np.ndindex(PICTURES, scenes.THINGS):
        rows, columns = np.nonzero(examples.owner[picture] == thing)
        cx, cy, w, h = examples.things[picture, thing] * SIDE
        if not len(rows):
            assert w == h == 0
            continue
        expected = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        np.testing.assert_allclose((cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2), expected, 1e-4)
        count += 1
    assert count > 2 * PICTURES


def test_nothing_is_hidden_and_every_shape_comes(drawn: tuple[Examples, scenes.Scene]) -> None:
    examples, scene = drawn
    shapes = set()
    for picture, thing in np.argwhere(scene.there):
        area = (examples.owner[picture] == thing).sum() / SIDE**2
        # A star, the smallest part of its circle, covers about a third of it.
        assert area > 0.1 * np.pi * scene.radius[picture, thing] ** 2
        shapes.add(int(scene.classes[picture, thing, SHAPE]))
    assert shapes == set(range(len(words.SHAPES)))


def test_the_engine_reads_prompts_as_training_did(
    trained: Tokenizer, book: Phrases, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    read = SamTokenizer.read(tmp_path, CONFIG.text.context)
    rows = [0, book.drawn - 1, *range(123, len(book.texts), 997), book.visual]
    ids, mask = read.encode([book.texts[row] for row in rows])
    np.testing.assert_array_equal(ids, book.ids[rows])
    np.testing.assert_array_equal(mask, book.ids[rows] != 0)
    for slot in words.prompt_slots():
        for word in filter(None, slot):
            assert len(trained.encode(word).ids) == 3, word


@given(st.text(max_size=40))
def test_padding_never_occurs_in_text(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text).ids
    assert 0 not in ids
    # Every byte has a token, so that nothing is lost.
    kept = "".join(text.split()).lower()
    assert (len(ids) > 2) >= bool(kept.isascii() and kept.isprintable() and kept)


def test_heldout_nouns_are_new(book: Phrases) -> None:
    assert not {*words.HELDOUT_NOUNS} & {*words.ABSENT_NOUNS}
    every = " ".join(book.texts).split()
    assert not {*words.HELDOUT_NOUNS, *map(words.plural, words.HELDOUT_NOUNS)} & {*every}
