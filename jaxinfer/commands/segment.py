"""`jaxinfer segment`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from jaxinfer.commands.terminal import err, keep_compiled_steps, out
from jaxinfer.segmentation import CocoDataset, Prompt, Segmentation, draw
from jaxinfer.segmenter import Segmenter

COCO_FILE = "coco.json"
"""What the data set is called in the directory of a folder's results."""


def open_segmenter(model: str, **options: Any) -> Segmenter:
    """Load a model; progress goes to standard error."""
    keep_compiled_steps()
    return Segmenter(model, progress=True, **options)


def run(
    source: Path,
    words: Sequence[str],
    boxes: Sequence[str],
    points: Sequence[str],
    destination: Path | None,
    model: str,
    **limits: Any,
) -> None:
    """Segment a picture or the pictures of a folder; `limits` are those of `Segmenter.segment`."""
    prompts = make_prompts(words, boxes, points)
    pictures = find_pictures(source)
    whole = source.is_dir()
    destination = destination or Path("segmented" if whole else "segmented.png")
    if whole and destination.suffix:
        raise ValueError(f"--out {destination} is a file; for a folder give a directory")
    if whole:
        destination.mkdir(parents=True, exist_ok=True)
    elif not destination.parent.is_dir():
        raise ValueError(f"--out {destination}: there is no directory {destination.parent}")
    segmenter = open_segmenter(model, clicks=bool(points))
    if whole:
        _folder(segmenter, pictures, prompts, destination, limits)
    else:
        _picture(segmenter, source, prompts, destination, limits)


def make_prompts(words: Sequence[str], boxes: Sequence[str], points: Sequence[str]) -> list[Prompt]:
    """Each phrase is a prompt, with all boxes as its examples; the points together are one.

    Raises ValueError for numbers that are none, and if there is nothing to look for.
    """
    examples = tuple(_numbers("--box", box, 4) for box in boxes)
    prompts = [Prompt(text, boxes=examples) for text in words]
    if examples and not words:
        prompts.append(Prompt(boxes=examples))
    if points:
        prompts.append(Prompt(points=tuple(_numbers("--point", point, 2) for point in points)))
    if not prompts:
        raise ValueError('say what to look for, such as "red car", or give --box or --point')
    return prompts


def find_pictures(source: Path) -> list[Path]:
    """The picture itself, or those directly in the folder, by name.

    Raises ValueError if there are none, FileNotFoundError if there is no such file.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"there is no picture or folder {source}")
    known = Image.registered_extensions()
    found = sorted(path for path in source.iterdir() if path.suffix.lower() in known)
    if not found:
        raise ValueError(f"{source} has no pictures")
    return found


def _numbers(option: str, text: str, count: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise ValueError(f"{option} {text}: give {count} numbers in pixels with commas between")
    return numbers


def _picture(
    segmenter: Segmenter,
    source: Path,
    prompts: list[Prompt],
    destination: Path,
    limits: dict[str, Any],
) -> None:
    with err.status("segmenting"):
        result = segmenter.segment(source, prompts, **limits)
    out.print(table(result))
    if destination.suffix.lower() == ".json":
        dataset = CocoDataset()
        dataset.add(result)
        destination.write_text(json.dumps(dataset.as_dict()))
    else:
        draw(source, result).save(destination)
    err.print(f"wrote {destination}", style="green", markup=False, soft_wrap=True)


def _folder(
    segmenter: Segmenter,
    pictures: list[Path],
    prompts: list[Prompt],
    destination: Path,
    limits: dict[str, Any],
) -> None:
    dataset = CocoDataset()
    left_out: list[str] = []
    found = 0
    results = segmenter.stream(
        pictures, prompts, on_error=lambda image, error: left_out.append(str(error)), **limits
    )
    for result in track(results, "segmenting", total=len(pictures), console=err):
        assert result.name is not None
        dataset.add(result)
        found += len(result.objects)
        source = pictures[0].parent / result.name
        draw(source, result).save(destination / f"{result.name}.png")
    (destination / COCO_FILE).write_text(json.dumps(dataset.as_dict()))
    for message in left_out:
        err.print(f"left out: {message}", style="red", markup=False, soft_wrap=True)
    done = len(pictures) - len(left_out)
    err.print(
        f"{found} objects in {done} pictures; wrote {destination / COCO_FILE} and overlays",
        style="green",
        markup=False,
        soft_wrap=True,
    )
    if not done:
        raise ValueError("no picture could be read")


def table(result: Segmentation) -> Table:
    """What was found, a line each, and how sure the model is of what was not."""
    shown = Table("object", "score", "box", "pixels", box=None, header_style="dim")
    for found in result.objects:
        box = " ".join(f"{side:.0f}" for side in found.box)
        shown.add_row(escape(found.prompt), f"{found.score:.2f}", box, f"{found.area}")
    seen = {found.prompt_index for found in result.objects}
    for index, (name, presence) in enumerate(zip(result.prompts, result.presence, strict=True)):
        if index not in seen:
            doubt = "" if presence is None else f"(presence {presence:.2f})"
            shown.add_row(escape(name), "-", f"none found {doubt}", "", style="dim")
    return shown
