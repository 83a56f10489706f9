"""Questions that the device is working on, and their answers when it is done."""

import threading
from dataclasses import dataclass, field
from typing import Self

import jax
import numpy as np

from jaxinfer.sam import outlines
from jaxinfer.sam.outlines import Outlines, Places
from jaxinfer.segmentation import device, export
from jaxinfer.segmentation.device import Found
from jaxinfer.segmentation.export import RunLengths
from jaxinfer.segmentation.masks import to_picture
from jaxinfer.segmentation.questions import Answer, Candidate, Question, in_pixels, limits_of

FIRST = 16
"""Candidates for a prompt that are outlined at once; where more are wanted, all are, later."""


@dataclass(frozen=True, eq=False)
class Work:
    """Questions, and what the device will have found for them.

    `places` and `outlines` are None where masks are made on the host. The masks of all candidates
    stay on the device until this is let go of.
    """

    questions: list[Question]
    found: Found
    places: Places | None
    outlines: Outlines | None
    _fetching: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, questions: list[Question], found: Found, *, on_device: bool) -> Self:
        """Have masks made of what is being found, and all of it copied to the host.

        `found` has more rows than there are questions if it was padded. Pictures too large for any
        of `outlines.ROOMS` have their masks made on the host.
        """
        padded = device.pad(questions)
        sizes = [question.size for question in padded]
        room = outlines.room(max(h for h, _ in sizes), max(w for _, w in sizes))
        places = made = None
        if on_device and room is not None:
            places = outlines.places(sizes, found.masks.shape[-1], room)
            count = min(FIRST, found.scores.shape[1])
            made = device.outline(found, limits_of(padded), places, count=count)
        wanted = (found.scores, found.presence, found.boxes, made and (made.count, made.changes))
        for leaf in jax.tree.leaves(wanted):
            leaf.copy_to_host_async()
        return cls(questions, found, places, made)

    def answer(self, row: int) -> Answer:
        """The answer to a question, by its place; waits for the device."""
        question, found = self.questions[row], self.found
        scores = np.asarray(found.scores)[row]
        kept = question.kept(scores)
        made = self._outlines(row, kept)
        if found.boxes is None:
            boxes = [export.around(outline) for outline in made]
        else:
            boxes = [in_pixels(box, question) for box in np.asarray(found.boxes)[row, :kept]]
        presence = None if found.presence is None else float(np.asarray(found.presence)[row])
        objects = [
            Candidate(*each) for each in zip(scores[:kept].tolist(), boxes, made, strict=True)
        ]
        return Answer(question, presence, objects)

    def _outlines(self, row: int, kept: int) -> list[RunLengths]:
        """The masks of the first `kept` candidates for a question."""
        if not kept:
            return []
        question, made = self.questions[row], self.outlines
        height, width = question.size
        if made is None:
            order = np.asarray(self.found.order)[row, :kept]
            picked = device.pick(self.found.masks, row, order)
            return [export.to_rle(to_picture(logits, height, width)) for logits in picked]
        if kept > made.count.shape[1]:
            made, row = self.outline_all(row), 0
        number, changes = np.asarray(made.count)[row], np.asarray(made.changes)[row]
        return [
            export.changes_to_rle(
                changes[i, : number[i]]
                if number[i] <= changes.shape[1]
                else export.words_to_changes(self._words(made)[row, i, :width], height),
                height,
                width,
            )
            for i in range(kept)
        ]

    def outline_all(self, row: int) -> Outlines:
        """Outlines of all candidates for a question."""
        alone = device.one(self.found, np.int32(row))
        place = jax.tree.map(lambda leaf: leaf[row : row + 1], self.places)
        limits = limits_of([self.questions[row]])
        return device.outline(alone, limits, place, count=alone.scores.shape[1])

    def warm_up(self) -> None:
        """Do all that answers may need, and wait for it."""
        for row in range(len(self.questions)):
            self.answer(row)
        if self.places is not None:
            jax.block_until_ready(self.outline_all(0))

    def _words(self, made: Outlines) -> np.ndarray:
        """Masks with more changes than are listed; fetched by one thread for all."""
        with self._fetching:
            return np.asarray(made.words)
