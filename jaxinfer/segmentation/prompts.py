"""What is asked about a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jaxinfer.sam.tokenizer import PromptError

Box = Sequence[float]
"""Left, top, right and bottom in pixels of the upright picture."""

Point = Sequence[float]
"""x and y in pixels of the upright picture."""

EXEMPLAR_WORD = "visual"
"""What the model was trained to read where boxes come without words."""

MAX_BOXES = 64
"""Boxes of one prompt."""

MAX_POINTS = 64
"""Points of one prompt."""


@dataclass(frozen=True)
class Prompt:
    """One question about a picture.

    Either words, boxes or both, which find everything alike; or points, which choose one object.

    Attributes:
        text: a short noun phrase, such as "red car".
        boxes: examples of what is meant, as `Box`.
        negative_boxes: examples of what is not meant.
        points: on the object, as `Point`.
        negative_points: beside the object; only together with `points`.
        threshold: the score that an object must exceed; None takes the call's, or none for points.
        max_objects: the most objects to return, the best first; None takes the call's.
        label: what the objects found are called; by default the text, "visual" or "point".

    Raises PromptError for a question that means nothing.
    """

    text: str | None = None
    boxes: Sequence[Box] = ()
    negative_boxes: Sequence[Box] = ()
    points: Sequence[Point] = ()
    negative_points: Sequence[Point] = ()
    threshold: float | None = None
    max_objects: int | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise PromptError(f"text is {self.text!r}; it must be a string")
        for name in ("boxes", "negative_boxes"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name), 4))
        for name in ("points", "negative_points"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name), 2))
        if self.is_click and (self.text is not None or self.boxes or self.negative_boxes):
            raise PromptError("points choose one object; give words and boxes in another prompt")
        if self.negative_points and not self.points:
            raise PromptError("negative_points only refine points; give a point on the object")
        if self.text is None and not self.boxes and not self.is_click:
            raise PromptError(
                "the prompt is empty; give text, boxes or points (negative_boxes only refine)"
            )
        if len(self.boxes) + len(self.negative_boxes) > MAX_BOXES:
            raise PromptError(f"a prompt takes at most {MAX_BOXES} boxes")
        if len(self.points) + len(self.negative_points) > MAX_POINTS:
            raise PromptError(f"a prompt takes at most {MAX_POINTS} points")
        for box in (*self.boxes, *self.negative_boxes):
            if box[2] <= box[0] or box[3] <= box[1]:
                raise PromptError(
                    f"box {list(box)} is empty; give left, top, right and bottom in pixels"
                )
        if self.threshold is not None:
            check_share("threshold", self.threshold)
        if self.max_objects is not None:
            check_count("max_objects", self.max_objects)

    @property
    def is_click(self) -> bool:
        """Whether it is points that choose an object."""
        return bool(self.points or self.negative_points)

    @property
    def words(self) -> str:
        """What the text encoder reads."""
        return EXEMPLAR_WORD if self.text is None else self.text

    @property
    def name(self) -> str:
        """What the objects found are called."""
        return self.label or ("point" if self.is_click else self.words)


PromptLike = str | Prompt

PromptsLike = PromptLike | Sequence[PromptLike] | Sequence[Sequence[PromptLike]]
"""One prompt or several for every picture, or a list of them for each."""


def check_share(name: str, value: Any) -> None:
    """Raise PromptError for what is no number from 0 to 1."""
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise PromptError(f"{name} is {value!r}; it must be a number from 0 to 1")


def check_count(name: str, value: Any) -> None:
    """Raise PromptError for what is no whole number of at least 1."""
    if not isinstance(value, Integral) or value < 1:
        raise PromptError(f"{name} is {value!r}; it must be a whole number of at least 1")


def check_inside(prompt: Prompt, width: int, height: int) -> None:
    """Raise PromptError for a box or a point that lies wholly outside of its picture."""
    for box in (*prompt.boxes, *prompt.negative_boxes):
        if box[0] >= width or box[1] >= height or box[2] <= 0 or box[3] <= 0:
            raise PromptError(_outside("box", box, width, height))
    for point in (*prompt.points, *prompt.negative_points):
        if not (0 <= point[0] <= width and 0 <= point[1] <= height):
            raise PromptError(_outside("point", point, width, height))


def per_picture(prompts: PromptsLike, pictures: int) -> list[list[Prompt]]:
    """The prompts of each picture.

    One prompt, or a list of them, is asked about every picture; a list of lists has one for each.

    Raises PromptError if there are none, or not as many lists as pictures.
    """
    given: Sequence[Any] = prompts if isinstance(prompts, list | tuple) else [prompts]
    lists = [item for item in given if isinstance(item, list | tuple)]
    if not lists:
        if not given:
            raise PromptError("no prompts given; name what to look for, as 'red car'")
        return [[as_prompt(item) for item in given]] * pictures
    if len(lists) != len(given):
        raise PromptError("give a list of prompts, or a list of lists, one for each picture")
    if len(lists) != pictures:
        raise PromptError(
            f"{pictures} pictures, but {len(lists)} lists of prompts; give a list for each "
            "picture, or one list for all"
        )
    return [[as_prompt(item) for item in items] for items in lists]


def as_prompt(prompt: object) -> Prompt:
    """A `Prompt` from itself or from words; raises PromptError for anything else."""
    if isinstance(prompt, str):
        return Prompt(prompt)
    if isinstance(prompt, Prompt):
        return prompt
    raise PromptError(
        f"{type(prompt).__name__} is no prompt; give a string or a Prompt, or a list of them"
    )


def _numbers(name: str, given: Sequence[Sequence[float]], count: int) -> tuple:
    try:
        rows = tuple(tuple(float(number) for number in row) for row in given)
    except (TypeError, ValueError) as error:
        raise PromptError(
            f"{name} is {given!r}; it must be a list, each item of {count} numbers in pixels"
        ) from error
    for row in rows:
        if len(row) != count or not all(map(math.isfinite, row)):
            raise PromptError(f"{name} has {list(row)}; each takes {count} finite numbers")
    return rows


def _outside(what: str, numbers: Sequence[float], width: int, height: int) -> str:
    return (
        f"{what} {list(numbers)} lies outside of the picture, which is {width} x {height} pixels "
        "(after turning it upright); coordinates are pixels from the upper left corner"
    )
