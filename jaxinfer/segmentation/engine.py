"""From pictures and prompts to work: what is computed, what is remembered, in which batches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jaxinfer.sam.clicks import PADDING
from jaxinfer.sam.config import Config
from jaxinfer.sam.params import Params
from jaxinfer.sam.tokenizer import Tokenizer
from jaxinfer.segmentation import device
from jaxinfer.segmentation.cache import Cache, CacheStats
from jaxinfer.segmentation.device import Parts, pad
from jaxinfer.segmentation.prompts import Prompt, PromptError
from jaxinfer.segmentation.questions import Question, boxes_of, pictures_of, points_of
from jaxinfer.segmentation.work import Work
from jaxinfer.tree import tree

MAX_PROMPTS = 16
"""Prompts that the detector works on together."""

TEXT_CACHE = 64 * 2**20
"""Bytes of text features to keep: some thousand prompts."""


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


@tree
class Embedded:
    """What is known of a picture: what the trunk `seen`, and `features` and `clicks` of it, each
    None until it is needed."""

    seen: Any = None
    features: Any = None
    clicks: Any = None


class Engine:
    """The model with its caches; any number of threads may use it.

    Args:
        cfg: the model's shape.
        params: its parameters.
        tokenizer: of its text encoder.
        max_batch: pictures embedded together.
        cache_bytes: of image embeddings to keep.
        device_masks: whether masks are brought to size on the device.
    """

    def __init__(
        self,
        cfg: Config,
        params: Params,
        tokenizer: Tokenizer,
        *,
        max_batch: int,
        cache_bytes: int,
        device_masks: bool,
    ) -> None:
        self.config, self._parts = cfg, Parts(params)
        self._max_batch, self._device_masks = max_batch, device_masks
        self._pictures: Cache[bytes, Embedded] = Cache(cache_bytes)
        self._texts: Cache[bytes, jax.Array] = Cache(TEXT_CACHE)
        self._counts = {"pictures": 0, "texts": 0, "detections": 0, "clicks": 0}
        self._lock = threading.Lock()
        self._ids = lru_cache(4096)(lambda words: tokenizer.encode([words])[0][0])

    @property
    def can_click(self) -> bool:
        """Whether points can be asked about."""
        return self._parts.clicks is not None

    def check(self, prompt: Prompt) -> None:
        """Raise PromptError for a prompt that this model cannot read."""
        if not prompt.is_click:
            self._ids(prompt.words)
        elif not self.can_click:
            raise PromptError(
                "this model has no click head, or was loaded without it (clicks=True loads it "
                "where the checkpoint has one): use words or boxes instead of points"
            )

    def work(self, questions: Sequence[Question]) -> Iterator[Work]:
        """Set the device to work on questions about a batch of pictures, some at a time."""
        with self._lock:
            embedded = self._embed(questions)
        concepts = [question for question in questions if not question.prompt.is_click]
        points = [question for question in questions if question.prompt.is_click]
        for some in _chunks(concepts, MAX_PROMPTS):
            with self._lock:
                work = self._detect(some, embedded)
            yield work
        for some in _chunks(points, MAX_PROMPTS):
            with self._lock:
                work = self._click(some, embedded)
            yield work

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

    def _embed(self, questions: Sequence[Question]) -> dict[bytes, Embedded]:
        """What questions need to know of their pictures, by digest, remembered or computed now."""
        pictures = {question.picture.digest: question.picture for question in questions}
        have = {digest: self._pictures.get(digest) or Embedded() for digest in pictures}
        points = {q.picture.digest for q in questions if q.prompt.is_click}
        concepts = {q.picture.digest for q in questions if not q.prompt.is_click}
        need_features = [d for d in pictures if d in concepts and have[d].features is None]
        need_clicks = [d for d in pictures if d in points and have[d].clicks is None]
        need = set(need_features + need_clicks)
        unseen = [digest for digest in pictures if digest in need and have[digest].seen is None]

        def fill(part: str, wanted: list[bytes], source: Callable, compute: Callable) -> None:
            for some in _chunks(wanted, self._max_batch):
                computed = compute(pad([source(digest) for digest in some]))
                for digest, found in zip(some, computed, strict=False):
                    have[digest] = replace(have[digest], **{part: found})

        cfg, parts = self.config, self._parts
        see = partial(device.see, parts.trunk, cfg)
        features = partial(device.features, parts.features, cfg)
        clicks = partial(device.click_features, parts.clicks, cfg)
        fill("seen", unseen, lambda digest: pictures[digest].pixels, see)
        fill("features", need_features, lambda digest: have[digest].seen, features)
        fill("clicks", need_clicks, lambda digest: have[digest].seen, clicks)
        self._counts["pictures"] += len(unseen)
        for digest in need:
            # What the trunk saw is of no more use to a model that cannot click.
            kept = have[digest] if self.can_click else replace(have[digest], seen=None)
            self._pictures.put(digest, kept)
        return have

    def _embed_texts(self, questions: Sequence[Question]) -> list[jax.Array]:
        """Text features `[T, D]` of each question, from the cache or computed now."""
        keys = [self._ids(question.prompt.words) for question in questions]
        wanted = {ids.tobytes(): ids for ids in keys}
        have = {key: entry for key in wanted if (entry := self._texts.get(key)) is not None}
        missing = [key for key in wanted if key not in have]
        if missing:
            ids = np.stack(pad([wanted[key] for key in missing]))
            computed = device.embed_texts(self._parts.text, self.config, ids)
            self._counts["texts"] += len(missing)
            for key, text in zip(missing, computed, strict=False):
                have[key] = text
                self._texts.put(key, text)
        return [have[ids.tobytes()] for ids in keys]

    def _detect(self, questions: list[Question], embedded: dict[bytes, Embedded]) -> Work:
        padded = pad(questions)
        digests, image = pictures_of(padded)
        found = device.detect(
            self._parts.detector,
            self.config,
            pad([embedded[digest].features for digest in digests]),
            image,
            pad(self._embed_texts(questions)),
            np.stack([self._ids(question.prompt.words) != 0 for question in padded]),
            boxes_of(padded),
        )
        self._counts["detections"] += len(questions)
        return Work.start(questions, found, on_device=self._device_masks)

    def _click(self, questions: list[Question], embedded: dict[bytes, Embedded]) -> Work:
        padded = pad(questions)
        digests, image = pictures_of(padded)
        prompts = points_of(padded, image)
        found = device.click(
            self._parts.clicks,
            self.config,
            pad([embedded[digest].clicks for digest in digests]),
            prompts,
            (prompts.labels != PADDING).sum(1) == 1,
        )
        self._counts["clicks"] += len(questions)
        return Work.start(questions, found, on_device=self._device_masks)


def _chunks[T](things: Sequence[T], size: int) -> list[list[T]]:
    return [list(things[start : start + size]) for start in range(0, len(things), size)]
