"""Placeholder expansion and multimodal positions, against transformers and their own laws."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.positions import (
    Grid,
    VisionInputError,
    expand_image_tokens,
    grid_tokens,
    mrope_positions,
    placeholder_mask,
)

GOLDENS = Path(__file__).parents[1] / "goldens" / "qwen"
CFG = Config.read(GOLDENS)
START, END, IMAGE, VIDEO = 248, 249, 250, 251


@pytest.fixture(scope="module")
def cases() -> dict[str, np.ndarray]:
    return load_file(GOLDENS / "cases.safetensors")


def golden_grids(cases: dict[str, np.ndarray]) -> list[Grid]:
    return [(int(t), int(h), int(w)) for t, h, w in cases["multimodal.image_grid_thw"]]


def test_positions_match_transformers(cases: dict[str, np.ndarray]) -> None:
    positions, delta = mrope_positions(cases["multimodal.input_ids"], CFG, golden_grids(cases))
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, cases["multimodal.position_ids"])
    assert delta == cases["multimodal.rope_delta"]


def test_expansion_gives_the_prompt_of_transformers(cases: dict[str, np.ndarray]) -> None:
    expanded = cases["multimodal.input_ids"].tolist()
    compact = [t for i, t in enumerate(expanded) if t != IMAGE or expanded[i - 1] != IMAGE]
    assert expand_image_tokens(compact, CFG, golden_grids(cases)) == expanded
    mask = placeholder_mask(expanded, CFG)
    np.testing.assert_array_equal(mask, cases["multimodal.mm_token_type_ids"] == 1)


def test_a_video_is_a_span_a_temporal_patch() -> None:
    frame = [START, VIDEO, END]
    ids = expand_image_tokens([1, *frame, 2, 3, *frame, 4], CFG, [(2, 4, 6)])
    assert ids.count(VIDEO) == grid_tokens((2, 4, 6), 2) == 12
    positions, delta = mrope_positions(ids, CFG, [(2, 4, 6)])
    # 1 <start> | 2 x 3 tokens from 2 | <end> 2 3 <start> | 2 x 3 tokens from 9 | <end> 4
    times = [0, 1, *[2] * 6, 5, 6, 7, 8, *[9] * 6, 12, 13]
    rows = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 9, 9, 10, 10, 10, 12, 13]
    columns = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 9, 10, 11, 12, 13]
    np.testing.assert_array_equal(positions, [times, rows, columns])
    assert delta == 14 - 20


def test_images_and_videos_side_by_side_are_two_spans() -> None:
    ids = expand_image_tokens([IMAGE, VIDEO], CFG, [(1, 2, 4), (1, 4, 2)])
    assert ids == [IMAGE] * 2 + [VIDEO] * 2
    positions, delta = mrope_positions(ids, CFG, [(1, 2, 4), (1, 4, 2)])
    np.testing.assert_array_equal(positions, [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]])
    assert delta == 0


def test_empty_prompt() -> None:
    positions, delta = mrope_positions([], CFG, [])
    assert positions.shape == (3, 0)
    assert delta == 0
    assert expand_image_tokens([], CFG, []) == []


@given(st.lists(st.integers(0, 240), max_size=50))
def test_text_counts_up(ids: list[int]) -> None:
    positions, delta = mrope_positions(ids, CFG, [])
    np.testing.assert_array_equal(positions, np.tile(np.arange(len(ids)), (3, 1)))
    assert delta == 0
    assert expand_image_tokens(ids, CFG, []) == ids


texts = st.lists(st.integers(0, 240), max_size=8)
grids = st.tuples(
    st.integers(1, 3),
    st.integers(1, 6).map(lambda n: 2 * n),
    st.integers(1, 6).map(lambda n: 2 * n),
)


@given(texts, st.lists(st.tuples(st.booleans(), grids, texts), max_size=4))
def test_laws_of_positions(head: list[int], pieces: list[tuple[bool, Grid, list[int]]]) -> None:
    compact, shapes = list(head), []
    for is_video, (t, h, w), text in pieces:
        t = t if is_video else 1
        compact += [START, VIDEO if is_video else IMAGE, END] * t + text
        shapes.append((t, h, w))
    ids = expand_image_tokens(compact, CFG, shapes)
    assert [t for t in ids if t not in (IMAGE, VIDEO)] == [
        t for t in compact if t not in (IMAGE, VIDEO)
    ]
    assert placeholder_mask(ids, CFG).sum() == sum(grid_tokens(shape, 2) for shape in shapes)

    positions, delta = mrope_positions(ids, CFG, shapes)
    assert positions.shape == (3, len(ids))
    assert delta <= 0
    assert positions.max(initial=-1) + 1 == len(ids) + delta
    assert (np.diff(positions[0]) >= 0).all()
    text = positions[:, ~placeholder_mask(ids, CFG)]
    assert (text == text[0]).all()
    assert (np.diff(text[0]) >= 1).all()
    # No two tokens share a position, so that no two look alike to attention.
    assert len({tuple(column) for column in positions.T}) == len(ids)


@pytest.mark.parametrize(
    ("ids", "shapes", "message"),
    [
        ([1, IMAGE, 2], [], "1 image or video spans for 0 pictures; text that spells out"),
        ([1, 2], [(1, 2, 2)], "0 image or video spans for 1 pictures"),
        ([VIDEO, 1], [(2, 2, 2)], "1 image or video spans for 2 pictures; a video needs one"),
        ([IMAGE, IMAGE, IMAGE], [(1, 2, 4)], "span 0 has 3 tokens; its picture has 1 x 2 = 2"),
        ([IMAGE], [(1, 3, 2)], r"\(1, 3, 2\).*multiples of 2"),
        ([IMAGE], [(0, 2, 2)], "must be positive"),
    ],
)
def test_spans_that_do_not_fit(ids: list[int], shapes: list[Grid], message: str) -> None:
    with pytest.raises(VisionInputError, match=message):
        mrope_positions(ids, CFG, shapes)


@pytest.mark.parametrize(
    ("ids", "shapes", "message"),
    [
        ([1, IMAGE, IMAGE], [(1, 2, 2)], "2 image or video placeholders for 1 pictures"),
        ([1], [(1, 2, 2)], "0 image or video placeholders for 1 pictures"),
    ],
)
def test_placeholders_that_do_not_fit(ids: list[int], shapes: list[Grid], message: str) -> None:
    with pytest.raises(VisionInputError, match=message):
        expand_image_tokens(ids, CFG, shapes)


def test_text_only_checkpoint_refuses_pictures() -> None:
    text_only = replace(CFG, vision=None, image_token_id=None, video_token_id=None)
    positions, _ = mrope_positions([IMAGE, VIDEO], text_only, [])
    np.testing.assert_array_equal(positions[0], [0, 1])
    with pytest.raises(VisionInputError, match="no vision tower"):
        mrope_positions([IMAGE], text_only, [(1, 2, 2)])
