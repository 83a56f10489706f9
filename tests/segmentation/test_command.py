"""`jaxinfer segment`, from a checkpoint on disk to files on disk."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image
from pycocotools.coco import COCO
from typer.testing import CliRunner

from checkpoints import sam
from checkpoints.files import SINGLE
from jaxinfer import Segmenter
from jaxinfer.cli import app
from jaxinfer.pictures import open_picture, to_rgb
from jaxinfer.sam.tokenizer import from_merges
from jaxinfer.segmentation import draw
from tests.segmentation.helpers import CONFIG, TOKENIZER, noise, random_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sam")
    sam.write(directory, CONFIG, replace(random_model().params, clicks=None))
    TOKENIZER.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(3):
        noise(40 + 10 * number, 50, number).save(pictures / f"{number}.png")
    (pictures / "notes.txt").write_text("no picture")
    return pictures


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_picture(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    picture, overlay = folder / "0.png", tmp_path / "overlay.png"
    options = ("--model", checkpoint, "--threshold", 0)
    result = run("segment", picture, "cat", *options, "--max-objects", 2, "--out", overlay)
    assert result.exit_code == 0, result.stderr
    expected = Segmenter(checkpoint).segment(picture, "cat", threshold=0, max_objects=2)
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    for line, found in zip(lines[1:], expected.objects, strict=True):
        assert line.split()[:2] == ["cat", f"{found.score:.2f}"]
    assert np.array_equal(np.asarray(Image.open(overlay)), np.asarray(draw(picture, expected)))


def test_examples_and_what_is_not_found(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ("--model", checkpoint, "--out", out, "--threshold", 1)
    result = run("segment", folder / "0.png", "cat", "[sun]", "--box", "1,2,30,40", *options)
    assert result.exit_code == 0, result.stderr
    assert "none found (presence 0." in result.stdout
    assert "[sun]" in result.stdout
    names = [category["name"] for category in json.loads(out.read_text())["categories"]]
    assert names == ["cat", "[sun]"]
    result = run("segment", folder / "0.png", "--box", "1,2,30,40", *options)
    assert "visual" in result.stdout


def test_a_folder(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "broken.jpg").write_bytes(b"no picture")
    out = tmp_path / "found"
    options = ("--model", checkpoint, "--threshold", 0)
    result = run("segment", folder, "cat", *options, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "left out: picture 3" in result.stderr
    assert "broken.jpg" in result.stderr
    dataset = COCO(str(out / "coco.json"))
    assert [image["file_name"] for image in dataset.imgs.values()] == ["0.png", "1.png", "2.png"]
    assert len(dataset.anns) == 3 * CONFIG.num_queries
    for number in range(3):
        overlay = to_rgb(open_picture(out / f"{number}.png.png"))
        assert overlay.size == (40 + 10 * number, 50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent.png", "cat"), "no picture or folder absent.png"),
        ((".", "cat"), "has no pictures"),
        (("0.png",), "say what to look for"),
        (("0.png", ""), "is empty"),
        (("0.png", "cat", "--box", "1,2,3"), "--box 1,2,3: give 4 numbers"),
        (("0.png", "cat", "--point", "a,b"), "--point a,b: give 2 numbers"),
        (("0.png", "cat", "--out", "absent/o.png"), "no directory absent"),
        (("0.png", "cat", "--model", "absent"), "tiny_sam"),
        (("0.png", "cat", "--model", "tiny_qwen"), "holds no SAM 3 model"),
        (("notes.txt", "cat"), "notes.txt: 10 bytes are no picture"),
    ],
)
def test_errors_are_one_line(
    checkpoint: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    if arguments[0] == ".":
        for path in folder.glob("*.png"):
            path.unlink()
    model = () if "--model" in arguments else ("--model", checkpoint)
    result = run("segment", *arguments, *model)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_a_tokenizer_of_another_model_is_refused(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    """Ids that the model has no row for would be read as others."""
    for name in ("config.json", SINGLE):
        (tmp_path / name).symlink_to(checkpoint / name)
    from_merges([f"a {letter}" for letter in "abcdefg"]).save(str(tmp_path / "tokenizer.json"))
    result = run("segment", folder / "0.png", "cat", "--model", tmp_path)
    assert result.exit_code == 2
    assert "has 521 tokens, the model 520; put the model's own there" in result.stderr


def test_what_a_checkpoint_holds(checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    assert result.exit_code == 0, result.stderr
    assert "pictures of 112 x 112 in 8 x 8 patches" in result.stdout
    assert "not read: for semantic maps" in result.stdout


def test_serving_a_segmenter_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[uvicorn.Server] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self))
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
    result = run("serve", "--segmenter", checkpoint, "--port", 0)
    assert result.exit_code == 0, result.stderr
    assert f"serving {checkpoint} at http://127.0.0.1:" in result.stderr
    paths = [route.path for route in served[0].config.app.routes]
    assert "/v1/segment" in paths
    assert "/v1/chat/completions" not in paths
