"""The `Segmenter`: right whatever the batch, and computing nothing twice."""

import io
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from jaxinfer import Prompt, Segmenter
from jaxinfer.sam.tokenizer import PromptError
from jaxinfer.segmentation import PictureError, Segmentation, work
from jaxinfer.segmenter import SamModel
from tests.segmentation.helpers import CONFIG, ask, noise, random_model

BOX, OTHER = (5, 5, 50, 60), (60.5, 40, 90, 80)


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return Segmenter(random_model(), max_batch=2, threads=2)


def without_clicks() -> SamModel:
    loaded = random_model()
    return SamModel(loaded.config, replace(loaded.params, clicks=None), loaded.tokenizer)


def check(result: Segmentation, picture: Image.Image, expected: dict[str, tuple]) -> None:
    """The result is what the model says of the picture alone, the best first."""
    assert (result.width, result.height) == picture.size
    assert result.prompts == tuple(expected)
    for index, (name, (scores, boxes, masks)) in enumerate(expected.items()):
        found = [each for each in result.objects if each.prompt_index == index]
        order = np.argsort(-scores, kind="stable")
        assert [each.prompt for each in found] == [name] * CONFIG.num_queries
        np.testing.assert_allclose([each.score for each in found], scores[order], atol=1e-5)
        np.testing.assert_allclose([each.box for each in found], boxes[order], atol=0.01)
        for each, mask in zip(found, masks[order], strict=True):
            assert each.mask.dtype == bool
            # A pixel whose logit is almost 0 may fall either way.
            assert np.count_nonzero(each.mask != mask) <= 2


def test_batches_of_pictures_and_prompts_mix_freely(segmenter: Segmenter) -> None:
    pictures = [noise(150, 90, 0), noise(40, 70, 1), noise(112, 112, 2)]
    asked: list[list[str | Prompt]] = [
        ["cat", Prompt(boxes=[BOX], negative_boxes=[OTHER])],
        ["a dog", "cat", Prompt("sun", boxes=[(1, 2, 30, 40)])],
        ["cat"],
    ]
    results = segmenter.segment(pictures, asked, threshold=0)
    expected = [
        {
            "cat": ask(pictures[0], "cat"),
            "visual": ask(pictures[0], "visual", [BOX, OTHER], [1, 0]),
        },
        {
            "a dog": ask(pictures[1], "a dog"),
            "cat": ask(pictures[1], "cat"),
            "sun": ask(pictures[1], "sun", [(1, 2, 30, 40)], [1]),
        },
        {"cat": ask(pictures[2], "cat")},
    ]
    for result, picture, each in zip(results, pictures, expected, strict=True):
        check(result, picture, each)


def test_one_picture_in_any_form_gives_one_result(segmenter: Segmenter, tmp_path: Path) -> None:
    picture = noise(150, 90)
    expected = {"cat": ask(picture, "cat")}
    path = tmp_path / "noise.png"
    picture.save(path)
    for source in (picture, np.asarray(picture), path, str(path), path.read_bytes()):
        check(segmenter.segment(source, "cat", threshold=0), picture, expected)
    assert segmenter.segment(path, "cat").name == "noise.png"


def test_nothing_is_computed_twice() -> None:
    segmenter = Segmenter(random_model(), max_batch=2)
    picture, other = noise(150, 90), noise(40, 70, 1)
    segmenter.segment([picture, picture], "cat")
    stats = segmenter.stats()
    assert (stats.pictures, stats.texts, stats.detections) == (1, 1, 2)
    segmenter.segment(picture, "  CAT ")
    segmenter.segment([other, picture], ["cat", "sun"])
    stats = segmenter.stats()
    assert (stats.pictures, stats.texts, stats.detections) == (2, 2, 7)
    assert (stats.picture_cache.hits, stats.picture_cache.entries) == (2, 2)
    segmenter.forget()
    segmenter.segment(picture, "cat")
    assert (segmenter.stats().pictures, segmenter.stats().texts) == (3, 3)


def test_the_cache_of_pictures_is_bounded() -> None:
    one = sum((4 * g) ** 2 for g in (8, 4, 2)) * CONFIG.width * 4 + CONFIG.width * 4
    segmenter = Segmenter(without_clicks(), max_batch=2, cache_bytes=2 * one)
    pictures = [noise(30, 30, seed) for seed in range(3)]
    for picture in (*pictures, pictures[2], pictures[0]):
        segmenter.segment(picture, "cat")
    stats = segmenter.stats()
    assert stats.pictures == 4
    assert stats.picture_cache.evictions == 2
    assert stats.picture_cache.bytes == 2 * one
    nothing = Segmenter(random_model(), cache_bytes=0)
    assert nothing.segment(pictures[0], "cat", threshold=0).objects
    assert nothing.stats().picture_cache.entries == 0


def test_words_and_points_look_at_a_picture_together() -> None:
    segmenter, picture = Segmenter(random_model()), noise(30, 30)
    prompts = ["cat", Prompt(points=[(9, 9)])]
    together = segmenter.segment(picture, prompts, threshold=0)
    assert segmenter.stats().pictures == 1
    segmenter.forget()
    one_by_one = [segmenter.segment(picture, prompt, threshold=0) for prompt in prompts]
    assert segmenter.stats().pictures == 2
    assert segmenter.stats().picture_cache.entries == 1
    found = [each for result in one_by_one for each in result.objects]
    assert [each.rle() for each in together.objects] == [each.rle() for each in found]


def test_a_warm_segmenter_compiles_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FIRST", 2)
    segmenter = Segmenter(random_model(), max_batch=2, device_masks=True)
    segmenter.warm_up(batches=[2], boxes=2, points=1, sizes=[(200, 130)])
    assert segmenter.stats().picture_cache.entries == 0
    prompts = ["cat", Prompt(boxes=[BOX], negative_boxes=[OTHER]), Prompt(points=[(9, 9)])]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for prompt in prompts:
            segmenter.segment([noise(150, 90), noise(256, 90, 1)], prompt, threshold=0)
    assert not [each for each in caplog.messages if "ompil" in each]
    with pytest.raises(ValueError, match="from 1 to max_batch"):
        segmenter.warm_up(batches=[3])


def test_thresholds_and_limits(segmenter: Segmenter) -> None:
    picture = noise(150, 90)
    scores = np.sort(ask(picture, "cat")[0])[::-1]
    between = float(scores[1:3].mean())

    def count(prompt: Any, **options: Any) -> int:
        return len(segmenter.segment(picture, prompt, **options).objects)

    assert count("cat") == np.count_nonzero(scores > 0.5)
    assert count("cat", threshold=between) == 2
    assert count(Prompt("cat", threshold=between)) == 2
    assert count(Prompt("cat", threshold=1), threshold=0) == 0
    assert count("cat", threshold=0, max_objects=3) == 3
    assert count(Prompt("cat", max_objects=1), threshold=0, max_objects=3) == 1
    result = segmenter.segment(picture, ["cat", "sun"], threshold=1)
    assert result.objects == ()
    assert len(result.presence) == 2


def test_overlapping_objects_are_dropped_across_prompts(segmenter: Segmenter) -> None:
    picture = noise(150, 90)
    words = ["cat", Prompt("cat", label="again")]
    everything = segmenter.segment(picture, words, threshold=0)
    assert len(everything.objects) == 2 * CONFIG.num_queries
    kept = segmenter.segment(picture, words, threshold=0, nms_iou=0.999).objects
    # Every object was found twice.
    assert len(kept) <= CONFIG.num_queries
    assert {each.prompt for each in kept} == {"cat"}


def test_points_choose_one_object_each(segmenter: Segmenter) -> None:
    picture = noise(150, 90)
    prompts = [
        Prompt(points=[(30, 40)]),
        Prompt(points=[(30, 40), (100, 60)], negative_points=[(149, 1)], label="it"),
    ]
    alone = [segmenter.segment(picture, prompt).objects for prompt in prompts]
    together = segmenter.segment(picture, [prompts[1], "cat", prompts[0]], threshold=1)
    assert together.presence[0] is None
    assert [each.prompt for each in together.objects] == ["it", "point"]
    for each, (expected,) in zip(together.objects, reversed(alone), strict=True):
        assert np.count_nonzero(each.mask != expected.mask) <= 2
        assert each.score == pytest.approx(expected.score, abs=1e-5)
        assert 0 <= each.score <= 1
        rows, columns = np.nonzero(each.mask)
        assert each.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


def test_points_need_a_click_head() -> None:
    segmenter = Segmenter(without_clicks())
    with pytest.raises(PromptError, match="no click head"):
        segmenter.segment(noise(9, 9), Prompt(points=[(1, 1)]))


def test_a_picture_that_was_read_is_not_read_again(segmenter: Segmenter) -> None:
    picture = noise(150, 90)
    read = segmenter.read(picture)
    check(segmenter.segment(read, "cat", threshold=0), picture, {"cat": ask(picture, "cat")})


def test_results_come_while_pictures_are_still_read(segmenter: Segmenter, tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(list):
        def __iter__(self):
            for i, item in enumerate(list.__iter__(self)):
                seen.append(i)
                yield item

    pictures = Watched(noise(30, 30, seed % 3) for seed in range(40))
    stream = segmenter.stream(pictures, "cat")
    next(stream)
    assert len(seen) < 20
    assert len(list(stream)) == 39


def test_the_device_has_more_to_do_while_answers_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segmenter = Segmenter(random_model(), max_batch=1)
    answer, deadline = work.Work.answer, time.monotonic() + 60

    def late(self: work.Work, row: int) -> Any:
        while segmenter.stats().detections < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        return answer(self, row)

    monkeypatch.setattr(work.Work, "answer", late)
    assert len(segmenter.segment([noise(30, 30, seed) for seed in range(4)], "cat")) == 4
    assert time.monotonic() < deadline


def test_pictures_that_cannot_be_read(segmenter: Segmenter, tmp_path: Path) -> None:
    good = noise(30, 30)
    pictures = [good, b"no picture", tmp_path / "absent.png", good]
    with pytest.raises(PictureError, match="picture 1: 10 bytes are no picture"):
        segmenter.segment(pictures, "cat")
    told: dict[int, Exception] = {}
    results = list(segmenter.stream(pictures, "cat", on_error=told.__setitem__))
    assert len(results) == 2
    assert list(told) == [1, 2]
    assert isinstance(told[2], FileNotFoundError)


@pytest.mark.parametrize(
    ("images", "prompts", "options", "match"),
    [
        (noise(9, 9), [], {}, "no prompts"),
        (noise(9, 9), [""], {}, "empty"),
        (noise(9, 9), "1 2 3 4 5 6 7 8 9 1 2 3 4 5 6", {}, "15 tokens, and the model reads 14"),
        (noise(9, 9), ["cat", ["sun"]], {}, "list of lists"),
        ([noise(9, 9)], [["cat"], ["sun"]], {}, "1 pictures, but 2 lists"),
        (noise(9, 9), [7], {}, "int is no prompt"),
        (noise(9, 9), {"text": "cat"}, {}, "dict is no prompt"),
        (noise(9, 9), "cat", {"threshold": 1.5}, "threshold is 1.5"),
        (noise(9, 9), "cat", {"threshold": "0.5"}, "threshold is '0.5'"),
        (noise(9, 9), "cat", {"max_objects": 0}, "max_objects is 0"),
        (noise(9, 9), "cat", {"nms_iou": -1}, "nms_iou is -1"),
        (noise(9, 9), Prompt(boxes=[(10, 0, 20, 5)]), {}, "picture 0: box .* 9 x 9 pixels"),
        (noise(9, 9), Prompt(points=[(3, -1)]), {}, "picture 0: point .* outside"),
    ],
)
def test_bad_questions_are_refused(
    segmenter: Segmenter, images: Any, prompts: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(PromptError, match=match):
        segmenter.segment(images, prompts, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"max_batch": 0}, "max_batch"), ({"cache_bytes": -1}, "cache"), ({"threads": 0}, "threads")],
)
def test_bad_options_are_refused(options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Segmenter(random_model(), **options)


def test_threads_share_a_segmenter(segmenter: Segmenter) -> None:
    pictures = [noise(50, 40, seed) for seed in range(4)]
    expected = [segmenter.segment(picture, "cat", threshold=0) for picture in pictures]
    segmenter.forget()
    results: dict[int, Segmentation] = {}

    def ask_about(index: int) -> None:
        file = io.BytesIO()
        pictures[index].save(file, "PNG")
        results[index] = segmenter.segment(file.getvalue(), "cat", threshold=0)

    threads = [threading.Thread(target=ask_about, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, each in enumerate(expected):
        pairs = zip(results[index].objects, each.objects, strict=True)
        assert all(np.array_equal(ours.mask, theirs.mask) for ours, theirs in pairs)
