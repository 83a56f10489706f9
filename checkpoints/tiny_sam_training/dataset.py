"""Examples: pictures of scenes, prompts about them, and what each prompt should find."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from tokenizers import Tokenizer

from checkpoints.tiny_sam_training import scenes, words
from checkpoints.tiny_sam_training.scenes import THINGS
from checkpoints.tiny_sam_training.words import ANY, COLOUR, SHAPE, SIZE, TEXTURE
from jaxinfer.sam.config import Config
from jaxinfer.tree import tree

KINDS = ("present", "near", "random", "absent", "box", "unlike")
"""Kinds of prompts: about a thing in the picture; that with one word changed; about anything that
could be drawn; about what never is; a thing shown by a box, without words; words and a box around
a thing that is not meant. What a "near" or "random" prompt asks for may well be there."""
PRESENT, NEAR, RANDOM, ABSENT, BOX, UNLIKE = range(len(KINDS))

GENERIC = 0.12
"""How often the noun of a prompt leaves the shape open."""


@dataclass(frozen=True)
class Course:
    """How prompts are asked.

    Attributes:
        shares: how often each kind comes, unless one is asked for.
        named: how often a prompt names size, texture and colour.
        changed: weights of the attributes of which a "near" prompt changes one.
        borrowed: whether it prefers the class of another thing in the picture.
    """

    shares: tuple[float, ...]
    named: tuple[float, float, float]
    changed: tuple[float, float, float, float]
    borrowed: bool


EVEN = Course((0.36, 0.22, 0.09, 0.12, 0.14, 0.07), (0.25, 0.25, 0.5), (1, 1, 1, 1), False)
"""What a model is measured by."""

HARD = Course((0.30, 0.36, 0.06, 0.08, 0.09, 0.11), (0.3, 0.6, 0.65), (1, 5, 5, 2), True)
"""What it is taught by: texture and colour decide often. Where they seldom do, a model learns
shape and size, and brightness for colour, and no texture at all."""


@tree
class Examples:
    """B pictures with K prompts each; S is the picture's side, M the masks'.

    `pixels`: `[B, S, S, 3]` uint8; `owner`: `[B, M, M]` int32, the thing seen at each pixel, -1 for
    none; `things`: `[B, THINGS, 4]`, their boxes (cx, cy, w, h); `classes`: `[B, THINGS, 4]` int32,
    their attributes; `kind`: `[B, K]` int32; `row`: `[B, K]` int32, the prompt's number in
    `Phrases`; `box`: `[B, K, 1, 4]`, `box_label` and `box_mask`: `[B, K, 1]`, as in
    `jaxinfer.sam.model.Prompts`; `wanted`: `[B, K, THINGS]` bool.
    """

    pixels: jax.Array
    owner: jax.Array
    things: jax.Array
    classes: jax.Array
    kind: jax.Array
    row: jax.Array
    box: jax.Array
    box_label: jax.Array
    box_mask: jax.Array
    wanted: jax.Array


@dataclass(frozen=True, eq=False)
class Phrases:
    """All prompts: about drawn things in the order of `words.drawn_prompts`, then about things
    that are not, then `words.VISUAL`; `ids`: `[count, context]` int32; `classes`: `[count, 4]`
    int32, what they name. Compared by identity, so that it can be a static argument of `jit`."""

    texts: list[str]
    ids: np.ndarray
    classes: np.ndarray
    drawn: int

    @property
    def visual(self) -> int:
        """Number of the prompt for boxes without words."""
        return len(self.texts) - 1


def phrases(tokenizer: Tokenizer, cfg: Config, *, heldout: bool = False) -> Phrases:
    """The prompts and their ids; `heldout` takes nouns of absent things that training does not."""
    drawn = list(words.drawn_prompts())
    nouns = words.HELDOUT_NOUNS if heldout else words.ABSENT_NOUNS
    absent = words.absent_prompts(nouns, words.ABSENT_PROMPTS, seed=int(heldout))
    texts = [*drawn, *absent, words.VISUAL]
    ids = np.zeros((len(texts), cfg.text.context), np.int32)
    for row, encoded in zip(ids, tokenizer.encode_batch(texts), strict=True):
        row[: len(encoded.ids)] = encoded.ids
    classes = np.full((len(texts), 4), ANY, np.int32)
    classes[: len(drawn)] = list(words.drawn_meanings())
    return Phrases(texts, ids, classes, len(drawn))


def sample(
    key: jax.Array,
    cfg: Config,
    book: Phrases,
    pictures: int,
    prompts: int,
    *,
    kind: jax.Array | None = None,
    owner_side: int | None = None,
    course: Course = EVEN,
) -> Examples:
    """Random examples.

    Args:
        key: what they follow from.
        cfg: its picture and mask sizes count.
        book: the prompts.
        pictures: B.
        prompts: K.
        kind: of all prompts, if not as the course has it.
        owner_side: side of `owner`, if not that of the masks.
        course: how prompts are asked.
    """

    def one(key: jax.Array) -> Examples:
        drawing, asking = random.split(key)
        scene = scenes.draw_scene(drawing)
        side = cfg.trunk.image_size
        things = scenes.boxes(scenes.owners(scene, side))
        there = scene.there & (things[:, 2] > 0)
        ask = jax.vmap(lambda key: _ask(key, scene.classes, there, book, kind, course))
        kinds, rows, shown, wanted = ask(random.split(asking, prompts))
        return Examples(
            pixels=scenes.paint(scene, side),
            owner=scenes.owners(scene, owner_side or cfg.mask_size),
            things=things,
            classes=scene.classes,
            kind=kinds,
            row=rows,
            box=things[shown][:, None],
            box_label=(kinds == BOX).astype(jnp.int32)[:, None],
            box_mask=((kinds == BOX) | (kinds == UNLIKE))[:, None],
            wanted=wanted,
        )

    return jax.vmap(one)(random.split(key, pictures))


def _ask(
    key: jax.Array,
    classes: jax.Array,
    there: jax.Array,
    book: Phrases,
    kind: jax.Array | None,
    course: Course,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One prompt: its kind, its number, the thing that it is about, and what it asks for.

    Args:
        classes: `[THINGS, 4]`.
        there: `[THINGS]` bool.
    """
    keys = iter(random.split(key, 10))
    counts = jnp.array([len(attribute) for attribute in words.ATTRIBUTES])
    drawn_kind = random.choice(next(keys), len(KINDS), p=jnp.array(course.shares))
    form = drawn_kind if kind is None else kind
    seen = jnp.where(there, 0.0, -jnp.inf)
    shown = random.categorical(next(keys), seen)
    named = random.uniform(next(keys), (4,)) < jnp.array([*course.named, 1 - GENERIC])
    # With more than its shape named, nothing would be left but what is like the box.
    only_shape = (jnp.arange(4) == SHAPE) & random.bernoulli(next(keys))
    named = jnp.where(form == UNLIKE, only_shape, named)
    anything = random.randint(next(keys), (4,), 0, counts)
    target = jnp.where(form == RANDOM, anything, classes[shown])

    # Another class for one of the words; a prompt of none gets a noun.
    named = named.at[SHAPE].set(named[SHAPE] | ((form == NEAR) & ~named.any()))
    # Efraimidis and Spirakis, 2006: a uniform number to the power of 1 / weight draws by weight.
    chance = random.uniform(next(keys), (4,)) ** (1 / jnp.array(course.changed, jnp.float32))
    changed = jnp.where(named, chance, -1).argmax()
    step = random.randint(next(keys), (4,), 1, counts)
    other = (target + step) % counts
    row_key, absent_key, rival_key = keys
    if course.borrowed:
        rival = classes[random.categorical(rival_key, seen)]
        other = jnp.where(rival == target, other, rival)
    other = target.at[changed].set(other[changed])
    target = jnp.where(form == NEAR, other, target)

    fits = there & (~named | (classes == target)).all(1)
    kindred = there & (classes == classes[shown])[:, jnp.array([COLOUR, SHAPE])].all(1)
    nothing = jnp.zeros(THINGS, bool)
    wanted = jnp.stack([fits, fits, fits, nothing, kindred, fits & ~kindred])[form]

    row = _row(row_key, jnp.where(named, target, ANY))
    absent = random.randint(absent_key, (), book.drawn, book.visual)
    row = jnp.where(form == ABSENT, absent, jnp.where(form == BOX, book.visual, row))
    return form, row, shown, wanted


def _row(key: jax.Array, classes: jax.Array) -> jax.Array:
    """Number of a prompt that names these classes (`ANY` for none), in any of the ways to say it.

    As `words.drawn_prompts` counts them: openings, sizes, textures, colours, nouns.
    """
    keys = random.split(key, 6)
    row = random.randint(keys[4], (), 0, len(words.OPENINGS))
    for attribute in (SIZE, TEXTURE, COLOUR, SHAPE):
        meanings = jnp.array([meaning for _, meaning in words.choices(attribute)])
        fitting = jnp.where(meanings == classes[attribute], 0.0, -jnp.inf)
        word = random.categorical(keys[attribute], fitting)
        if attribute == SHAPE:
            word = word + len(meanings) * random.randint(keys[5], (), 0, 2)
            meanings = jnp.tile(meanings, 2)
        row = row * len(meanings) + word
    return row
