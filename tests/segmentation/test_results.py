"""Masks to the picture's size, and to the forms that others read."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from jaxinfer.segmentation import Instance, Segmentation, draw, to_coco
from jaxinfer.segmentation.drawing import colour
from jaxinfer.segmentation.export import from_rle, to_rle
from jaxinfer.segmentation.masks import suppress, to_picture
from tests.segmentation.helpers import noise

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "sam_pictures.npz")


def blobs(height: int, width: int, seed: int) -> np.ndarray:
    """A mask of pieces with holes."""
    return np.asarray(noise(width, height, seed))[..., 0] > 128


def ring() -> np.ndarray:
    y, x = np.mgrid[:60, :80]
    radius = np.hypot(y - 30, x - 40)
    return (radius < 25) & (radius > 10)


@pytest.fixture
def result() -> Segmentation:
    masks = [ring(), np.pad(np.ones((10, 12), bool), ((5, 45), (60, 8)))]
    objects = (
        Instance(to_rle(masks[0]), (15.0, 5.0, 65.0, 55.0), 0.9, "ring", 0),
        Instance(to_rle(masks[1]), (60.0, 5.0, 72.0, 15.0), 0.75, "box", 1),
    )
    names = ("ring", "box", "cat")
    return Segmentation(80, 60, objects, names, (0.95, 0.8, 0.01), "scene.png")


@pytest.mark.parametrize("number", range(5))
def test_masks_are_resized_as_torch_does(number: int) -> None:
    expected = GOLDEN[f"mask_{number}"]
    assert np.array_equal(to_picture(GOLDEN["logits"], *expected.shape), expected)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_looking_only_where_a_mask_can_be_loses_nothing(h: int, w: int, n: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(-1, 1, (n, n)).astype(np.float32)
    mask = to_picture(logits, h, w)
    whole = np.pad(logits, 1, "edge")
    y, x = (np.arange(h) + 0.5) * n / h + 0.5, (np.arange(w) + 0.5) * n / w + 0.5
    top, left = y.astype(int), x.astype(int)
    fy, fx = (y - top)[:, None], x - left
    above = whole[top][:, left] * (1 - fx) + whole[top][:, left + 1] * fx
    below = whole[top + 1][:, left] * (1 - fx) + whole[top + 1][:, left + 1] * fx
    logit = above * (1 - fy) + below * fy
    assert np.array_equal(mask[abs(logit) > 1e-4], logit[abs(logit) > 1e-4] > 0)


def test_of_overlapping_masks_the_best_remains() -> None:
    masks = np.zeros((4, 10, 10), bool)
    masks[0, :, :5] = True
    masks[1, :, :6] = True  # overlaps 0 by 5/6
    masks[2, :, 4:] = True  # overlaps 1 by 2/10
    outlines = [to_rle(mask) for mask in masks]
    assert suppress(outlines, [0.6, 0.9, 0.7, 0.5], 0.8) == [1, 2, 3]
    assert suppress(outlines, [0.9, 0.6, 0.7, 0.5], 0.8) == [0, 2, 3]
    assert suppress(outlines, [0.6, 0.9, 0.7, 0.5], 0.1) == [1, 3]
    assert suppress(outlines, [0.6, 0.9, 0.7, 0.5], 0.9) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_run_lengths_round_trip(seed: int) -> None:
    found = Instance(to_rle(blobs(37, 53, seed)), (0, 0, 53, 37), 1.0, "blob")
    rle = json.loads(json.dumps(found.rle()))
    assert rle["size"] == [37, 53]
    assert np.array_equal(from_rle(rle), found.mask)


@pytest.mark.parametrize("seed", range(4))
def test_polygons_enclose_the_mask(seed: int) -> None:
    mask = blobs(70, 90, seed) if seed else ring()
    large = Image.new("1", (8 * 90, 8 * 70))
    polygons = Instance(to_rle(mask), (0, 0, 90, 70), 1.0, "blob").polygons()
    for piece in polygons:
        for number, outline in enumerate(piece):
            points = [(8 * x, 8 * y) for x, y in outline.tolist()]
            ImageDraw.Draw(large).polygon(points, fill=number == 0)
    drawn = np.asarray(large)[4::8, 4::8][: mask.shape[0], : mask.shape[1]]
    # Each middle of a pixel lies in the polygons if the pixel is on.
    assert np.array_equal(drawn, mask)
    if not seed:
        assert [len(piece) for piece in polygons] == [2]


def test_a_square_has_few_corners() -> None:
    mask = np.zeros((20, 30), bool)
    mask[5:15, 10:25] = True
    ((outline,),) = Instance(to_rle(mask), (10, 5, 25, 15), 1.0, "box").polygons()
    assert len(outline) == 8  # each corner is cut
    assert outline.min(0).tolist() == [10, 5]
    assert outline.max(0).tolist() == [25, 15]


def test_coco_tools_read_the_data_set(result: Segmentation, tmp_path: Path) -> None:
    empty = Segmentation(30, 20, (), ("cat",), (0.1,))
    data = to_coco([result, empty])
    path = tmp_path / "coco.json"
    path.write_text(json.dumps(data))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(path))
        found = truth.loadRes(data["annotations"])
        evaluation = COCOeval(truth, found, "segm")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert evaluation.stats[0] == pytest.approx(1)
    assert [image["file_name"] for image in data["images"]] == ["scene.png", "2"]
    assert [category["name"] for category in data["categories"]] == ["ring", "box", "cat"]
    annotation = truth.loadAnns(truth.getAnnIds(imgIds=1))[0]
    assert np.array_equal(truth.annToMask(annotation), result.objects[0].mask)
    assert annotation["bbox"] == [15, 5, 50, 50]
    assert annotation["area"] == result.objects[0].area


def test_pngs(result: Segmentation) -> None:
    mask = Image.open(io.BytesIO(result.objects[0].png()))
    assert mask.mode == "1"
    assert np.array_equal(np.asarray(mask), result.objects[0].mask)
    labels = np.asarray(Image.open(io.BytesIO(result.png())))
    assert labels.dtype == np.uint8
    # The better object lies on top.
    assert np.array_equal(labels == 1, result.objects[0].mask)
    assert np.array_equal(labels == 2, result.objects[1].mask & ~result.objects[0].mask)


def test_more_objects_than_a_byte_holds() -> None:
    masks = np.eye(300, dtype=bool).reshape(300, 15, 20)
    objects = tuple(Instance(to_rle(mask), (0, 0, 1, 1), 0.5, "dot") for mask in masks)
    many = Segmentation(20, 15, objects, ("dot",), (1.0,))
    labels = np.asarray(Image.open(io.BytesIO(many.png())))
    assert np.array_equal(labels.ravel(), np.arange(1, 301))


def test_supervision_takes_results(result: Segmentation) -> None:
    supervision = pytest.importorskip("supervision")
    detections = result.to_supervision()
    assert isinstance(detections, supervision.Detections)
    assert detections["class_name"].tolist() == ["ring", "box"]
    assert detections.class_id.tolist() == [0, 1]
    areas = [found.area for found in result.objects]
    assert detections.area.tolist() == areas
    sure = detections[detections.confidence > 0.8]
    assert sure.xyxy.tolist() == [[15, 5, 65, 55]]
    drawn = supervision.MaskAnnotator().annotate(np.zeros((60, 80, 3), np.uint8), detections)
    assert drawn.any()
    assert len(Segmentation(5, 5, (), ("cat",), (0.0,)).to_supervision()) == 0


def test_supervision_need_not_be_installed(
    result: Segmentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "supervision", None)
    with pytest.raises(ImportError, match="pip install supervision"):
        result.to_supervision()


def test_an_overlay_shows_each_object(result: Segmentation) -> None:
    picture = Image.new("RGB", (80, 60), (100, 100, 100))
    drawn = np.asarray(draw(picture, result)).astype(int)
    inside, hole = drawn[30, 20], drawn[30, 40]
    assert hole.tolist() == [100, 100, 100]
    assert np.abs(inside - (0.55 * 100 + 0.45 * np.array(colour(0)))).max() <= 1
    # Its outline is opaque, and so is the label's ground.
    assert drawn[54, 40].tolist() == list(colour(0))
    assert (drawn == colour(1)).all(-1).sum() > 100
    with pytest.raises(ValueError, match="30 x 20 pixels"):
        draw(Image.new("RGB", (30, 20)), result)
