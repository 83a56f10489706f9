"""Masks made on the device are those made on the host, in the same run lengths."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from jaxinfer import Prompt, Segmenter
from jaxinfer.sam import outlines
from jaxinfer.sam.compiling import jit
from jaxinfer.segmentation import Segmentation, work
from jaxinfer.segmentation.export import changes_to_rle, from_rle, to_rle, words_to_changes
from jaxinfer.segmentation.masks import to_picture
from tests.segmentation.helpers import noise, random_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIDE = 24
trace = jit(outlines.trace)


def logits(count: int, seed: int, coarse: int = 5) -> np.ndarray:
    """Smooth maps `[1, count, SIDE, SIDE]` with some pieces each, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    maps = rng.normal(size=(1, count, coarse, coarse)).astype(np.float32)
    smooth = jax.image.resize(maps, (1, count, SIDE, SIDE), "cubic")
    return np.asarray(smooth.astype(jnp.bfloat16).astype(jnp.float32))


def on_device(maps: np.ndarray, height: int, width: int, kept: int) -> Iterator[dict]:
    """Run lengths, as they are listed and as the bits have them."""
    room = outlines.room(height, width)
    assert room is not None
    places = outlines.places([(height, width)], SIDE, room)
    made = jax.tree.map(np.asarray, trace(maps, np.array([kept], np.int32), places))
    for number, changes, words in zip(made.count[0], made.changes[0], made.words[0], strict=True):
        packed = words_to_changes(words[:width], height)
        assert len(packed) == number
        assert np.array_equal(packed[: len(changes)], changes[:number])
        yield changes_to_rle(packed, height, width)


def check(rle: dict, logits: np.ndarray, height: int, width: int) -> None:
    """The host's run lengths, but for pixels whose logit is 0 as far as float32 can tell.

    Compilers may fuse a product with a sum, which moves the last bit.
    """
    mask = to_picture(logits, height, width)
    differ = np.argwhere(from_rle(rle) != mask)
    assert len(differ) or rle == to_rle(mask)
    for pixel in differ:
        place = (pixel + 0.5) * (SIDE / np.array([height, width])) - 0.5
        assert abs(map_coordinates(logits, place, order=1, mode="nearest")) < 1e-5


@settings(max_examples=60)
@given(st.integers(1, 256), st.integers(1, 256), st.integers(0, 2**32 - 1))
def test_small_pictures(height: int, width: int, seed: int) -> None:
    maps = logits(3, seed)
    first, second, beyond = on_device(maps, height, width, 2)
    check(first, maps[0, 0], height, width)
    check(second, maps[0, 1], height, width)
    assert beyond == to_rle(np.zeros((height, width), bool))


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (256, 256), (257, 31), (480, 640), (30, 2000), (2000, 30)]
)
def test_sizes_up_to_and_beyond_a_room(height: int, width: int) -> None:
    maps = logits(2, height)
    for rle, each in zip(on_device(maps, height, width, 2), maps[0], strict=True):
        check(rle, each, height, width)


@pytest.mark.parametrize("value", [-1, 0, 1])
def test_empty_and_full_masks(value: int) -> None:
    maps = np.full((1, 1, SIDE, SIDE), value, np.float32)
    (rle,) = on_device(maps, 40, 30, 1)
    assert rle == to_rle(np.full((40, 30), value > 0))


def test_more_changes_than_are_listed() -> None:
    stripes = np.where(np.arange(SIDE)[:, None] % 2, 1, -1) * np.ones(SIDE)
    (rle,) = on_device(stripes[None, None].astype(np.float32), 250, 250, 1)
    assert rle == to_rle(to_picture(stripes, 250, 250))


@pytest.mark.parametrize("first", [1, 4])
def test_more_objects_than_are_outlined_at_once(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FIRST", first)
    host, on_gpu = (Segmenter(random_model(), device_masks=where) for where in (False, True))
    pictures = [noise(150, 90), noise(300, 200, 1), noise(40, 30, 2)]
    prompts = ["cat", Prompt("sun", max_objects=2), Prompt(points=[(9, 9)])]
    options = {"threshold": 0, "max_objects": 2**40}
    ask = partial(Segmenter.segment, images=pictures, prompts=prompts, **options)
    for ours, theirs in zip(ask(on_gpu), ask(host), strict=True):
        same(ours, theirs)


def test_a_picture_larger_than_any_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "ROOMS", (64,))
    host, on_gpu = (Segmenter(random_model(), device_masks=where) for where in (False, True))
    same(*(each.segment(noise(150, 90), "cat", threshold=0) for each in (on_gpu, host)))


def same(ours: Segmentation, theirs: Segmentation) -> None:
    assert ours.presence == theirs.presence
    assert len(ours.objects) == len(theirs.objects) > 0
    for a, b in zip(ours.objects, theirs.objects, strict=True):
        assert (a.score, a.prompt_index) == (b.score, b.prompt_index)
        assert a.box == b.box
        assert np.count_nonzero(a.mask != b.mask) <= 1
        assert a.area == np.count_nonzero(a.mask)
