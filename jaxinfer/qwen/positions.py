"""Where tokens stand: placeholder expansion and multimodal rotary positions, on the host.

In the tokens of a prompt a *span* is an unbroken run of one placeholder id (`image_token_id` or
`video_token_id`). An image is one span. A video is one span per temporal patch, each behind its own
text ("<0.3 seconds>") and inside its own vision start and end tokens.

Pictures and videos are given by their grids `(t, h, w)`: temporal patches, rows and columns of
patches, in the order in which they stand in the prompt.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from jaxinfer.qwen.config import Config

Grid = tuple[int, int, int]
"""`(t, h, w)` of an image (`t` = 1) or a video, counted in patches before merging."""


class VisionInputError(ValueError):
    """Pictures that cannot be used, or that do not fit the prompt; the message says which."""


def frame_tokens(grid: Grid, merge: int) -> int:
    """Tokens of one temporal patch of `grid`, with `merge` x `merge` patches a token.

    Raises VisionInputError if a side is not a positive multiple of `merge`.
    """
    t, h, w = grid
    if min(t, h, w) < 1 or h % merge or w % merge:
        raise VisionInputError(
            f"grid {(t, h, w)}: all sides must be positive, and rows and columns of patches "
            f"multiples of {merge}"
        )
    return (h // merge) * (w // merge)


def grid_tokens(grid: Grid, merge: int) -> int:
    """Tokens of all temporal patches of `grid`; raises as `frame_tokens` does."""
    return grid[0] * frame_tokens(grid, merge)


def placeholder_mask(token_ids: Sequence[int] | np.ndarray, cfg: Config) -> np.ndarray:
    """Which tokens vision features replace: bool `[T]`, True at image and video placeholders.

    The k-th True takes the k-th row of the features of all grids in order.
    """
    wanted = [i for i in (cfg.image_token_id, cfg.video_token_id) if i is not None]
    return np.isin(np.asarray(token_ids, np.int64), np.array(wanted, np.int64))


def expand_image_tokens(token_ids: Sequence[int], cfg: Config, grids: Sequence[Grid]) -> list[int]:
    """Repeat every placeholder token as often as its picture has tokens.

    Args:
        token_ids: a prompt with one placeholder an image, and one a temporal patch of a video.
        cfg: names the placeholder ids and the merge size.
        grids: the images and videos in order.

    Returns:
        The prompt with a span of full length for every placeholder.

    Raises VisionInputError if there are more or fewer placeholders than the grids ask for.
    """
    where = np.flatnonzero(placeholder_mask(token_ids, cfg))
    sizes = [size for size, _, _ in _frames(cfg, grids)]
    if len(where) != len(sizes):
        raise VisionInputError(
            f"the prompt has {len(where)} image or video placeholders for {len(sizes)} pictures"
            f"{_hint(len(where), len(sizes))}"
        )
    repeats = np.ones(len(token_ids), np.int64)
    repeats[where] = sizes
    return np.repeat(np.asarray(token_ids, np.int64), repeats).tolist()


def mrope_positions(
    token_ids: Sequence[int] | np.ndarray, cfg: Config, grids: Sequence[Grid]
) -> tuple[np.ndarray, int]:
    """Rotary positions of an expanded prompt along time, height and width.

    Text advances all three by one a token. A span that starts at position `s` and has `H` rows and
    `W` columns of tokens gets time `s`, height `s + row`, width `s + column`; what follows
    continues at `s + max(H, W)`. (As `get_rope_index` of transformers' Qwen3.5-MoE.)

    Args:
        token_ids: a prompt `[T]` whose placeholders are expanded.
        cfg: names the placeholder ids and the merge size.
        grids: the images and videos in order.

    Returns:
        positions: int32 `[3, T]`, rows time, height, width.
        rope_delta: what to add to a token's index behind the prompt to get its position (the same
            on all three axes); zero or negative.

    Raises VisionInputError if the spans and the grids differ in number or length.
    """
    ids = np.asarray(token_ids, np.int64)
    spans = list(_spans(ids, cfg))
    frames = _frames(cfg, grids)
    if len(spans) != len(frames):
        raise VisionInputError(
            f"the prompt has {len(spans)} image or video spans for {len(frames)} pictures"
            f"{_hint(len(spans), len(frames))}"
        )
    positions = np.empty((3, len(ids)), np.int32)
    index = position = 0
    for number, ((start, end), (size, rows, columns)) in enumerate(zip(spans, frames, strict=True)):
        if end - start != size:
            raise VisionInputError(
                f"image or video span {number} has {end - start} tokens; its picture has "
                f"{rows} x {columns} = {size}"
            )
        positions[:, index:start] = position + np.arange(start - index)
        position += start - index
        positions[0, start:end] = position
        positions[1, start:end] = position + np.repeat(np.arange(rows), columns)
        positions[2, start:end] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        index = end
    positions[:, index:] = position + np.arange(len(ids) - index)
    return positions, position - index


def _spans(ids: np.ndarray, cfg: Config) -> Iterator[tuple[int, int]]:
    """`(start, end)` of every unbroken run of one placeholder id."""
    where = np.flatnonzero(placeholder_mask(ids, cfg))
    # Inside a run, index minus rank is constant; the id tells adjacent runs of two kinds apart.
    for _, run in groupby(enumerate(where), lambda item: (item[1] - item[0], ids[item[1]])):
        members = [int(index) for _, index in run]
        yield members[0], members[-1] + 1


def _frames(cfg: Config, grids: Sequence[Grid]) -> list[tuple[int, int, int]]:
    """`(tokens, rows, columns)` of every temporal patch of every grid, counted in tokens."""
    if not grids:
        return []
    if cfg.vision is None:
        raise VisionInputError(
            "this checkpoint has no vision tower (no vision_config): it takes text only"
        )
    m = cfg.vision.spatial_merge_size
    frames = []
    for grid in grids:
        frames += [(frame_tokens(grid, m), grid[1] // m, grid[2] // m)] * grid[0]
    return frames


def _hint(found: int, given: int) -> str:
    if found > given:
        return "; text that spells out a placeholder token counts as one"
    return "; a video needs one for each temporal patch"
