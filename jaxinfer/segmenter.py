"""SAM as a service in one process: pictures and prompts in, masks out."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, overload

import jax
from PIL import Image

from jaxinfer.pictures import PictureError, PictureLike
from jaxinfer.sam.fp8 import quantise
from jaxinfer.sam.preprocess import Picture, read_picture
from jaxinfer.sam.tokenizer import PromptError
from jaxinfer.segmentation.engine import Engine, SegmenterStats
from jaxinfer.segmentation.loading import SamModel
from jaxinfer.segmentation.masks import suppress
from jaxinfer.segmentation.prompts import (
    Prompt,
    PromptsLike,
    check_count,
    check_inside,
    check_share,
    per_picture,
)
from jaxinfer.segmentation.questions import Answer, Question
from jaxinfer.segmentation.results import Instance, Segmentation

THRESHOLD = 0.5
"""The score that an object must exceed, unless told otherwise."""

LARGEST_BATCH = 64
"""Pictures that can be embedded together."""

_AHEAD = 4
"""Works and ends of batches that follow the one whose answers are waited for: two full batches, so
that the device is never without work."""

_WARM = 3
"""Runs after which nothing about a program changes any more."""

OnError = Callable[[int, Exception], None]
"""Told the number of a picture that cannot be read, and why."""


class Segmenter:
    """Finds the objects in pictures that words, boxes or points ask for.

    It remembers the embeddings of pictures and the features of words, so that another prompt about
    a picture costs no more than the detector. Any number of threads may use it.

    Attributes:
        name: of the checkpoint.
        config: the model's shape.
    """

    def __init__(
        self,
        model: str | Path | SamModel = "tiny_sam",
        *,
        clicks: bool = False,
        dtype: Any = None,
        fp8: bool = False,
        max_batch: int = 8,
        cache_bytes: int = 2 * 2**30,
        threads: int | None = None,
        device_masks: bool | None = None,
        progress: bool = False,
    ) -> None:
        """Load a checkpoint.

        Args:
            model: a directory, one of Meta's `.pt` files, the name of a checkpoint that ships with
                the package, or a model that is loaded already.
            clicks: load the click head too, which points need.
            dtype: of the arithmetic; None for bfloat16 on a GPU and float32 elsewhere.
            fp8: multiply in the image encoder with 8 bits: faster on a GPU, and less exact.
            max_batch: pictures embedded together.
            cache_bytes: device memory for image embeddings; at full size in bfloat16 one takes
                56 MB, 77 MB with clicks.
            threads: that decode and resize, and as many that make results; None for as many as
                there are processors, at most 16.
            device_masks: bring masks to the picture's size on the device, which finds the same
                ones; None where that is a GPU. On a CPU the host is faster.
            progress: show a bar while loading.

        Raises CheckpointError, ConfigError or FileNotFoundError for a checkpoint that cannot be
        loaded, ValueError for an option out of range.
        """
        if max_batch not in range(1, LARGEST_BATCH + 1):
            raise ValueError(f"max_batch must be from 1 to {LARGEST_BATCH}, not {max_batch}")
        if cache_bytes < 0:
            raise ValueError(f"cache_bytes must be at least 0, not {cache_bytes}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.name = "sam" if isinstance(model, SamModel) else str(model)
        if not isinstance(model, SamModel):
            model = SamModel.load(model, clicks=clicks, dtype=dtype, progress=progress)
        if device_masks is None:
            device_masks = jax.default_backend() == "gpu"
        self.config = model.config
        self._max_batch = max_batch
        self._engine = Engine(
            model.config,
            quantise(model.params) if fp8 else model.params,
            model.tokenizer,
            max_batch=max_batch,
            cache_bytes=cache_bytes,
            device_masks=device_masks,
        )
        threads = threads or min(16, os.cpu_count() or 1)
        self._reading = ThreadPoolExecutor(threads, "segmenter-reading")
        # Others, because they wait for the device, and no picture should wait for them.
        self._answering = ThreadPoolExecutor(threads, "segmenter-answering")

    @overload
    def segment(
        self,
        images: list[PictureLike] | tuple[PictureLike, ...],
        prompts: PromptsLike,
        *,
        threshold: float = ...,
        max_objects: int | None = ...,
        nms_iou: float | None = ...,
    ) -> list[Segmentation]: ...

    @overload
    def segment(
        self,
        images: PictureLike,
        prompts: PromptsLike,
        *,
        threshold: float = ...,
        max_objects: int | None = ...,
        nms_iou: float | None = ...,
    ) -> Segmentation: ...

    def segment(
        self,
        images: Any,
        prompts: PromptsLike,
        *,
        threshold: float = THRESHOLD,
        max_objects: int | None = None,
        nms_iou: float | None = None,
    ) -> Segmentation | list[Segmentation]:
        """Find what the prompts ask for.

        Args:
            images: a picture (see `PictureLike`), or a list or tuple of them.
            prompts: one or several, asked about every picture; or a list of lists, one for each.
            threshold: the score that an object must exceed, unless its prompt says otherwise;
                points choose their object whatever its score.
            max_objects: the most objects for a prompt, unless it says otherwise; the model itself
                finds at most `config.num_queries`.
            nms_iou: drop objects whose masks overlap that of a better one, of any prompt, by more
                than this intersection over union; None keeps all, as the model was made to.

        Returns one result for a picture, a list of them for a list.

        Raises PromptError and PictureError, which say what is wrong and what would help, and
        OSError for a file that cannot be opened.
        """
        many = isinstance(images, list | tuple)
        results = self.stream(
            images if many else [images],
            prompts,
            threshold=threshold,
            max_objects=max_objects,
            nms_iou=nms_iou,
        )
        return list(results) if many else next(results)

    def stream(
        self,
        images: Sequence[PictureLike],
        prompts: PromptsLike,
        *,
        threshold: float = THRESHOLD,
        max_objects: int | None = None,
        nms_iou: float | None = None,
        on_error: OnError | None = None,
    ) -> Iterator[Segmentation]:
        """As `segment`, but gives each picture's result when it is there, in order.

        Pictures are decoded ahead while the device works, a few batches at a time, so there may be
        any number of them. With `on_error`, pictures that cannot be read are told to it, and left
        out. Wrong prompts are told of at once.
        """
        check_share("threshold", threshold)
        if max_objects is not None:
            check_count("max_objects", max_objects)
        if nms_iou is not None:
            check_share("nms_iou", nms_iou)
        asked = per_picture(prompts, len(images))
        for prompt in {id(prompt): prompt for each in asked for prompt in each}.values():
            self._engine.check(prompt)

        def questions(image: int, picture: Picture) -> list[Question]:
            return [
                Question(picture, prompt, index, threshold, max_objects)
                for index, prompt in enumerate(asked[image])
            ]

        read = partial(self._read_checked, asked)
        return self._results(self._read_ahead(images, read, on_error), questions, nms_iou)

    def read(self, image: PictureLike) -> Picture:
        """Decode and resize a picture, to ask about it more than once without doing so again."""
        return read_picture(image, self.config.trunk.image_size)

    def stats(self) -> SegmenterStats:
        """What was computed so far, and what the caches hold."""
        return self._engine.stats()

    def forget(self) -> None:
        """Empty the caches."""
        self._engine.forget()

    def warm_up(
        self,
        *,
        batches: Sequence[int] | None = None,
        prompts: int = 1,
        boxes: int = 0,
        points: int = 0,
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Compile what requests of some shapes need, so that the first of them is not slow.

        It asks about grey pictures, and empties the caches.

        Args:
            batches: numbers of pictures; None for the powers of two up to `max_batch`. Others are
                padded to the next one.
            prompts: of words about each picture; 0 for none.
            boxes: also a prompt with so many boxes about each picture.
            points: also a prompt with so many points about each picture.
            sizes: widths and heights of pictures; None for the model's own. Others that need a
                square of the same side (`jaxinfer.sam.outlines.ROOMS`) are served by the same
                programs.

        Raises PromptError for points where there is no click head, ValueError for a batch that is
        larger than `max_batch`.
        """
        side = self.config.trunk.image_size
        if batches is None:
            batches = sorted({*(2**i for i in range(7) if 2**i < self._max_batch), self._max_batch})
        if any(not 1 <= count <= self._max_batch for count in batches):
            raise ValueError(
                f"batches are {list(batches)}; they must be from 1 to max_batch ({self._max_batch})"
            )
        kinds = [[Prompt(f"{i}") for i in range(prompts)]]
        kinds.append([Prompt(boxes=[(0, 0, 1, 1)] * boxes)] if boxes else [])
        kinds.append([Prompt(points=[(0, 0)] * points)] if points else [])
        kinds = [asked for asked in kinds if asked]
        for prompt in chain(*kinds):
            self._engine.check(prompt)
        for size, count, asked in product(sizes or [(side, side)], batches, kinds):
            grey = [self.read(Image.new("RGB", size, (shade,) * 3)) for shade in range(count)]
            questions = [
                Question(each, q, i, 1, None) for each in grey for i, q in enumerate(asked)
            ]
            for _ in range(_WARM if jax.default_backend() == "gpu" else 1):
                self.forget()
                for work in self._engine.work(questions):
                    work.warm_up()
        self.forget()

    def _read_checked(self, asked: list[list[Prompt]], image: int, source: PictureLike) -> Picture:
        """A picture of a call, whose prompts lie within it."""
        try:
            picture = self.read(source)
            for prompt in asked[image]:
                check_inside(prompt, picture.width, picture.height)
        except (PictureError, PromptError) as error:
            raise type(error)(f"picture {image}: {error}") from error
        return picture

    def _read_ahead(
        self,
        images: Sequence[PictureLike],
        read: Callable[[int, PictureLike], Picture],
        on_error: OnError | None,
    ) -> Iterator[tuple[int, Picture]]:
        """The pictures that can be read, with their numbers; some are worked on in advance."""
        tasks = (
            (image, self._reading.submit(read, image, source))
            for image, source in enumerate(images)
        )
        for image, task in _ahead(tasks, 2 * self._max_batch):
            try:
                yield image, task.result()
            except (PictureError, OSError) as error:
                if on_error is None:
                    raise
                on_error(image, error)

    def _results(
        self,
        pictures: Iterator[tuple[int, Picture]],
        questions: Callable[[int, Picture], list[Question]],
        nms_iou: float | None,
    ) -> Iterator[Segmentation]:
        """Results in order, with more work under way while one is turned into them."""

        def pieces() -> Iterator[tuple[list, list[Future[Answer]]]]:
            while batch := list(islice(pictures, self._max_batch)):
                asked = [(picture, questions(image, picture)) for image, picture in batch]
                for work in self._engine.work([q for _, each in asked for q in each]):
                    rows = range(len(work.questions))
                    yield [], [self._answering.submit(work.answer, row) for row in rows]
                yield asked, []

        answers: dict[Question, Answer] = {}
        for asked, tasks in _ahead(pieces(), _AHEAD):
            answers |= {answer.question: answer for answer in (task.result() for task in tasks)}
            for picture, each in asked:
                yield _result(picture, [answers.pop(question) for question in each], nms_iou)


def _result(picture: Picture, answers: list[Answer], nms_iou: float | None) -> Segmentation:
    objects = [
        Instance(each.outline, each.box, each.score, question.prompt.name, question.index)
        for question, found in ((answer.question, answer.objects) for answer in answers)
        for each in found
    ]
    if nms_iou is not None and objects:
        outlines, scores = zip(*((each.outline, each.score) for each in objects), strict=True)
        objects = [objects[i] for i in suppress(outlines, scores, nms_iou)]
    return Segmentation(
        picture.width,
        picture.height,
        tuple(objects),
        tuple(answer.question.prompt.name for answer in answers),
        tuple(answer.presence for answer in answers),
        picture.name,
    )


def _ahead[T](items: Iterable[T], count: int) -> Iterator[T]:
    """The same items; `count` more are taken before each is given."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting
