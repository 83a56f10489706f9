"""From pictures and prompts to answers: what is computed, what is remembered, in which batches."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np

from jaxinfer.sam.clicks import NEGATIVE, PADDING, POSITIVE, ClickPrompts
from jaxinfer.sam.config import Config
from jaxinfer.sam.params import Params
from jaxinfer.sam.preprocess import Picture
from jaxinfer.sam.tokenizer import Tokenizer
from jaxinfer.segmentation import device
from jaxinfer.segmentation.cache import Cache, CacheStats
from jaxinfer.segmentation.device import Boxes, Embedded, Found, bucket, pad
from jaxinfer.segmentation.masks import to_picture
from jaxinfer.segmentation.prompts import Prompt, PromptError

MAX_PROMPTS = 16
"""Prompts that the detector works on together."""

TEXT_CACHE = 64 * 2**20
"""Bytes of text features to keep: some thousand prompts."""

BoxPixels = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt about a picture; `index` counts the picture's prompts.

    `threshold` and `max_objects` hold where the prompt has none of its own, the former for words
    and boxes only: points choose an object whatever its score.
    """

    picture: Picture
    prompt: Prompt
    index: int
    threshold: float
    max_objects: int | None

    def exceeded(self, scores: np.ndarray) -> np.ndarray:
        """Which scores are high enough, bool."""
        if self.prompt.threshold is not None:
            return scores > self.prompt.threshold
        return scores > (-np.inf if self.prompt.is_click else self.threshold)


@dataclass(frozen=True, eq=False)
class Candidate:
    """An object: `logits` `[4g, 4g]` of its mask, `box` in pixels; None where points chose it."""

    score: float
    box: BoxPixels | None
    logits: np.ndarray

    def mask(self, picture: Picture) -> np.ndarray:
        """Its mask, bool, at the size of the picture."""
        return to_picture(self.logits, picture.height, picture.width)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a question found, the best first; `presence` is None for points."""

    question: Question
    presence: float | None
    objects: list[Candidate]


@dataclass(frozen=True)
class SegmenterStats:
    """What was computed since the segmenter was made, and what its caches hold.

    Attributes:
        pictures: pictures that went through the image encoder.
        texts: prompts that went through the text encoder.
        detections: prompts that the detector answered.
        clicks: prompts that the click head answered.
        picture_cache: of image embeddings.
        text_cache: of text features.
    """

    pictures: int
    texts: int
    detections: int
    clicks: int
    picture_cache: CacheStats
    text_cache: CacheStats


@dataclass(frozen=True, eq=False)
class Detecting:
    """Questions about concepts that the device is working on."""

    questions: list[Question]
    found: Found

    def answers(self) -> list[Answer]:
        """Wait, and take what each question wants to the host."""
        found = self.found
        scores, presence, boxes = jax.device_get((found.scores, found.presence, found.boxes))
        chosen = [_choose(row, q) for row, q in zip(scores, self.questions, strict=False)]
        rows = np.repeat(np.arange(len(chosen)), [len(queries) for queries in chosen])
        logits = iter(device.pick(found.masks, rows, np.concatenate(chosen)))
        return [
            Answer(
                question,
                float(presence[row]),
                [
                    Candidate(
                        float(scores[row, query]),
                        _in_pixels(boxes[row, query], question.picture),
                        next(logits),
                    )
                    for query in chosen[row]
                ],
            )
            for row, question in enumerate(self.questions)
        ]


@dataclass(frozen=True, eq=False)
class Clicking:
    """Questions by points that the device is working on."""

    questions: list[Question]
    masks: jax.Array
    iou: jax.Array

    def answers(self) -> list[Answer]:
        """Wait, and take the masks to the host."""
        masks, scores = jax.device_get((self.masks, self.iou))
        return [
            Answer(
                question,
                None,
                [Candidate(float(score), None, mask)] if question.exceeded(score) else [],
            )
            for question, mask, score in zip(self.questions, masks, scores.clip(0, 1), strict=False)
        ]


class Engine:
    """The model with its caches; any number of threads may use it.

    Args:
        cfg: the model's shape.
        params: its parameters.
        tokenizer: of its text encoder.
        max_batch: pictures embedded together.
        cache_bytes: of image embeddings to keep.
    """

    def __init__(
        self, cfg: Config, params: Params, tokenizer: Tokenizer, max_batch: int, cache_bytes: int
    ) -> None:
        self.config, self._params = cfg, params
        self._max_batch = max_batch
        self._pictures: Cache[tuple[bytes, str], Embedded] = Cache(cache_bytes)
        self._texts: Cache[bytes, jax.Array] = Cache(TEXT_CACHE)
        self._counts = {"pictures": 0, "texts": 0, "detections": 0, "clicks": 0}
        self._lock = threading.Lock()
        self._ids = lru_cache(4096)(lambda words: tokenizer.encode([words])[0][0])

    def check(self, prompt: Prompt) -> None:
        """Raise PromptError for a prompt that this model cannot read."""
        if not prompt.is_click:
            self._ids(prompt.words)
        elif self._params.clicks is None:
            raise PromptError(
                "this model has no click head, or was loaded without it (clicks=True loads it "
                "where the checkpoint has one): use words or boxes instead of points"
            )

    def work(self, questions: Sequence[Question]) -> Iterator[Detecting | Clicking]:
        """Set the device to work on questions about a batch of pictures, some at a time.

        Each item holds the masks of all its candidates on the device until it is let go of.
        """
        with self._lock:
            embedded = self._embed(questions)
        concepts = [question for question in questions if not question.prompt.is_click]
        points = [question for question in questions if question.prompt.is_click]
        for some in _chunks(concepts, MAX_PROMPTS):
            with self._lock:
                detecting = self._detect(some, embedded)
            yield detecting
        for some in _chunks(points, MAX_PROMPTS):
            with self._lock:
                clicking = self._click(some, embedded)
            yield clicking

    def stats(self) -> SegmenterStats:
        """Counters and caches now."""
        with self._lock:
            return SegmenterStats(
                **self._counts,
                picture_cache=self._pictures.stats(),
                text_cache=self._texts.stats(),
            )

    def forget(self) -> None:
        """Empty the caches."""
        with self._lock:
            self._pictures.clear()
            self._texts.clear()

    def _embed(self, questions: Sequence[Question]) -> dict[tuple[bytes, str], Embedded]:
        """Features by the picture's digest and their kind, from the cache or computed now."""
        wanted: dict[tuple[bytes, str], Picture] = {}
        for question in questions:
            wanted[question.picture.digest, _kind(question.prompt)] = question.picture
        have = {key: entry for key in wanted if (entry := self._pictures.get(key)) is not None}
        missing: dict[bytes, set[str]] = {}
        for digest, kind in wanted.keys() - have.keys():
            missing.setdefault(digest, set()).add(kind)
        by_digest = {digest: picture for (digest, _), picture in wanted.items()}
        for kinds in ({"concept"}, {"point"}, {"concept", "point"}):
            pictures = [by_digest[digest] for digest in by_digest if missing.get(digest) == kinds]
            for some in _chunks(pictures, self._max_batch):
                computed = device.embed_pictures(
                    self._params,
                    self.config,
                    np.stack(pad([picture.pixels for picture in some])),
                    concepts="concept" in kinds,
                    points="point" in kinds,
                )
                self._counts["pictures"] += len(some)
                for picture, embedded in zip(some, computed, strict=False):
                    for kind in kinds:
                        only = _only(embedded, kind)
                        have[picture.digest, kind] = only
                        self._pictures.put((picture.digest, kind), only)
        return have

    def _embed_texts(self, questions: Sequence[Question]) -> list[jax.Array]:
        """Text features `[T, D]` of each question, from the cache or computed now."""
        keys = [self._ids(question.prompt.words) for question in questions]
        wanted = {ids.tobytes(): ids for ids in keys}
        have = {key: entry for key in wanted if (entry := self._texts.get(key)) is not None}
        missing = [key for key in wanted if key not in have]
        if missing:
            ids = np.stack(pad([wanted[key] for key in missing]))
            computed = device.embed_texts(self._params, self.config, ids)
            self._counts["texts"] += len(missing)
            for key, text in zip(missing, computed, strict=False):
                have[key] = text
                self._texts.put(key, text)
        return [have[ids.tobytes()] for ids in keys]

    def _detect(
        self, questions: list[Question], embedded: dict[tuple[bytes, str], Embedded]
    ) -> Detecting:
        padded = pad(questions)
        pictures, image = _places(padded)
        found = device.detect(
            self._params,
            self.config,
            pad([embedded[digest, "concept"].features for digest in pictures]),
            image,
            pad(self._embed_texts(questions)),
            np.stack([self._ids(question.prompt.words) != 0 for question in padded]),
            _boxes(padded),
        )
        self._counts["detections"] += len(questions)
        return Detecting(questions, found)

    def _click(
        self, questions: list[Question], embedded: dict[tuple[bytes, str], Embedded]
    ) -> Clicking:
        padded = pad(questions)
        pictures, image = _places(padded)
        points, labels = _points(padded)
        masks, iou = device.click(
            self._params,
            self.config,
            pad([embedded[digest, "point"].clicks for digest in pictures]),
            ClickPrompts(image, points, labels),
            (labels != PADDING).sum(1) == 1,
        )
        self._counts["clicks"] += len(questions)
        return Clicking(questions, masks, iou)


def _kind(prompt: Prompt) -> str:
    return "point" if prompt.is_click else "concept"


def _only(embedded: Embedded, kind: str) -> Embedded:
    if kind == "point":
        return Embedded(None, embedded.clicks)
    return Embedded(embedded.features, None)


def _places(questions: Sequence[Question]) -> tuple[list[bytes], np.ndarray]:
    """The pictures of some questions, each once, and for each question its place among them."""
    pictures = list(dict.fromkeys(question.picture.digest for question in questions))
    places = [pictures.index(question.picture.digest) for question in questions]
    return pictures, np.array(places, np.int32)


def _boxes(questions: Sequence[Question]) -> Boxes:
    """Exemplars as the model takes them: cut to the picture, cx, cy, w, h as parts of its sides."""
    most = max(len(q.prompt.boxes) + len(q.prompt.negative_boxes) for q in questions)
    width = bucket(most) if most else 0
    boxes = np.zeros((len(questions), width, 4), np.float32)
    labels = np.zeros((len(questions), width), np.int32)
    mask = np.zeros((len(questions), width), bool)
    for row, question in enumerate(questions):
        size = (question.picture.width, question.picture.height)
        given = (*question.prompt.boxes, *question.prompt.negative_boxes)
        for column, box in enumerate(given):
            corners = np.reshape(np.array(box, np.float64), (2, 2)) / size
            low, high = np.clip(corners, 0, 1)
            boxes[row, column] = (*(low + high) / 2, *high - low)
        labels[row, : len(question.prompt.boxes)] = 1
        mask[row, : len(given)] = True
    return Boxes(boxes, labels, mask)


def _points(questions: Sequence[Question]) -> tuple[np.ndarray, np.ndarray]:
    """Points `[P, N, 2]` as parts of the picture's sides, and their labels `[P, N]`."""
    most = max(len(q.prompt.points) + len(q.prompt.negative_points) for q in questions)
    points = np.zeros((len(questions), bucket(most), 2), np.float32)
    labels = np.full((len(questions), bucket(most)), PADDING, np.int32)
    for row, question in enumerate(questions):
        size = (question.picture.width, question.picture.height)
        inside, outside = question.prompt.points, question.prompt.negative_points
        given = (*inside, *outside)
        points[row, : len(given)] = np.array(given, np.float64) / size
        labels[row, : len(given)] = [POSITIVE] * len(inside) + [NEGATIVE] * len(outside)
    return points, labels


def _choose(scores: np.ndarray, question: Question) -> np.ndarray:
    """Which candidates exceed the threshold, the best first."""
    most = question.prompt.max_objects or question.max_objects
    order = np.argsort(-scores, kind="stable")
    return order[question.exceeded(scores[order])][:most]


def _in_pixels(box: np.ndarray, picture: Picture) -> BoxPixels:
    scale = (picture.width, picture.height) * 2
    left, top, right, bottom = (float(x) for x in np.clip(box, 0, 1) * scale)
    return left, top, right, bottom


def _chunks[T](things: Sequence[T], size: int) -> list[list[T]]:
    return [list(things[start : start + size]) for start in range(0, len(things), size)]
