"""What a prompt may be."""

from typing import Any

import pytest

from jaxinfer.sam.tokenizer import PromptError
from jaxinfer.segmentation import Prompt
from jaxinfer.segmentation.prompts import per_picture


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "give text, boxes or points"),
        ({"negative_boxes": [(0, 0, 1, 1)]}, "only refine"),
        ({"text": 7}, "must be a string"),
        ({"text": "cat", "points": [(1, 1)]}, "another prompt"),
        ({"boxes": [(0, 0, 1, 1)], "points": [(1, 1)]}, "another prompt"),
        ({"negative_points": [(1, 1)]}, "a point on the object"),
        ({"boxes": [(0, 0, 1)]}, r"boxes has \[0.0, 0.0, 1.0\]"),
        ({"boxes": (0, 0, 1, 1)}, "each item of 4 numbers"),
        ({"boxes": [(5, 0, 5, 1)]}, "is empty"),
        ({"boxes": [(0, 0, float("nan"), 1)]}, "finite"),
        ({"points": [(1, 2, 3)]}, "points has"),
        ({"boxes": [(0, 0, 1, 1)] * 65}, "at most 64 boxes"),
        ({"points": [(0, 0)] * 65}, "at most 64 points"),
        ({"text": "cat", "threshold": -0.1}, "threshold"),
        ({"text": "cat", "max_objects": 0}, "max_objects"),
    ],
)
def test_prompts_that_mean_nothing(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(PromptError, match=match):
        Prompt(**fields)


def test_names_of_what_is_found() -> None:
    assert Prompt("cat").name == "cat"
    assert Prompt("cat", label="pet").name == "pet"
    assert Prompt(boxes=[(0, 0, 1, 1)]).name == "visual"
    assert Prompt(points=[(0, 0)]).name == "point"


def test_prompts_of_each_picture() -> None:
    cat, sun = Prompt("cat"), Prompt("sun")
    assert per_picture("cat", 2) == [[cat], [cat]]
    assert per_picture(cat, 1) == [[cat]]
    assert per_picture(["cat", sun], 2) == [[cat, sun]] * 2
    assert per_picture([["cat"], ("sun", cat)], 2) == [[cat], [sun, cat]]
    assert per_picture([[], ["cat"]], 2) == [[], [cat]]
