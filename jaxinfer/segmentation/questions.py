"""Questions and answers, and the arrays that questions become."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.sam.clicks import NEGATIVE, PADDING, POSITIVE, ClickPrompts
from jaxinfer.sam.preprocess import Picture
from jaxinfer.segmentation.device import Boxes, Limits, bucket
from jaxinfer.segmentation.export import RunLengths
from jaxinfer.segmentation.prompts import Prompt

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

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.picture.height, self.picture.width

    @property
    def floor(self) -> float:
        """The score to exceed."""
        if self.prompt.threshold is not None:
            return self.prompt.threshold
        return -np.inf if self.prompt.is_click else self.threshold

    def kept(self, scores: np.ndarray) -> int:
        """How many candidates of falling scores are wanted."""
        above = int(np.count_nonzero(scores > self.floor))
        return min(above, self.prompt.max_objects or self.max_objects or above)


@dataclass(frozen=True, eq=False)
class Candidate:
    """An object: the `outline` of its mask, and its `box` in pixels."""

    score: float
    box: BoxPixels
    outline: RunLengths


@dataclass(frozen=True, eq=False)
class Answer:
    """What a question found, the best first; `presence` is None for points."""

    question: Question
    presence: float | None
    objects: list[Candidate]


def in_pixels(box: np.ndarray, question: Question) -> BoxPixels:
    """A box given in parts of the picture's sides, cut to the picture."""
    scale = question.size[::-1] * 2
    left, top, right, bottom = (float(x) for x in np.clip(box, 0, 1) * scale)
    return left, top, right, bottom


def pictures_of(questions: Sequence[Question]) -> tuple[list[bytes], np.ndarray]:
    """The pictures of some questions, each once, and for each question its place among them."""
    places: dict[bytes, int] = {}
    image = [places.setdefault(question.picture.digest, len(places)) for question in questions]
    return list(places), np.array(image, np.int32)


def limits_of(questions: Sequence[Question]) -> Limits:
    """The limits of some questions, as `Question.kept` has them."""
    every = np.iinfo(np.int32).max
    most = [min(q.prompt.max_objects or q.max_objects or every, every) for q in questions]
    return Limits(np.array([q.floor for q in questions], np.float32), np.array(most, np.int32))


def boxes_of(questions: Sequence[Question]) -> Boxes:
    """Exemplars as the model takes them: cut to the picture, cx, cy, w, h as parts of its sides."""
    most = max(len(q.prompt.boxes) + len(q.prompt.negative_boxes) for q in questions)
    width = bucket(most) if most else 0
    boxes = np.zeros((len(questions), width, 4), np.float32)
    labels = np.zeros((len(questions), width), np.int32)
    mask = np.zeros((len(questions), width), bool)
    for row, question in enumerate(questions):
        size = question.size[::-1]
        given = (*question.prompt.boxes, *question.prompt.negative_boxes)
        for column, box in enumerate(given):
            corners = np.reshape(np.array(box, np.float64), (2, 2)) / size
            low, high = np.clip(corners, 0, 1)
            boxes[row, column] = (*(low + high) / 2, *high - low)
        labels[row, : len(question.prompt.boxes)] = 1
        mask[row, : len(given)] = True
    return Boxes(boxes, labels, mask)


def points_of(questions: Sequence[Question], image: np.ndarray) -> ClickPrompts:
    """Points as the model takes them, as parts of the picture's sides."""
    most = max(len(q.prompt.points) + len(q.prompt.negative_points) for q in questions)
    points = np.zeros((len(questions), bucket(most), 2), np.float32)
    labels = np.full((len(questions), bucket(most)), PADDING, np.int32)
    for row, question in enumerate(questions):
        inside, outside = question.prompt.points, question.prompt.negative_points
        given = (*inside, *outside)
        points[row, : len(given)] = np.array(given, np.float64) / question.size[::-1]
        labels[row, : len(given)] = [POSITIVE] * len(inside) + [NEGATIVE] * len(outside)
    return ClickPrompts(image, points, labels)
