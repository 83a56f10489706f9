"""`/v1/segment` over HTTP, with a segmenter alone."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from jaxinfer import LLM, Prompt, Segmenter
from jaxinfer.segmentation.export import from_rle
from server.app import MAX_BODY, create_app
from tests.segmentation.helpers import noise, random_model
from tests.server.helpers import Server

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PICTURE = noise(60, 45)
BOX = [5, 5, 50, 40]


def file(picture: Image.Image = PICTURE, form: str = "PNG") -> bytes:
    data = io.BytesIO()
    picture.save(data, form)
    return data.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return Segmenter(random_model())


@pytest.fixture(scope="module")
def client(segmenter: Segmenter) -> Iterator[httpx.Client]:
    running = Server(segmenter=segmenter, segmenter_name="sam-random")
    with httpx.Client(base_url=running.url, timeout=120) as client:
        yield client
    running.close()


def post(client: httpx.Client, **fields: Any) -> Any:
    body = {"images": [text(file())], "prompts": ["cat"], "threshold": 0} | fields
    response = client.post("/v1/segment", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_run_lengths_of_words_boxes_and_points(client: httpx.Client, segmenter: Segmenter) -> None:
    other = noise(30, 50, 1)
    answer = post(
        client,
        model="sam-random",
        images=[text(file()), "data:image/png;base64," + text(file(other))],
        prompts=[
            ["cat", {"boxes": [BOX], "max_objects": 2}, {"points": [[9, 9]], "label": "it"}],
            [{"text": "sun", "boxes": [BOX], "negative_boxes": [[1, 1, 9, 9]]}],
        ],
    )
    expected = segmenter.segment(
        [PICTURE, other],
        [
            ["cat", Prompt(boxes=[BOX], max_objects=2), Prompt(points=[(9, 9)], label="it")],
            [Prompt("sun", boxes=[BOX], negative_boxes=[(1, 1, 9, 9)])],
        ],
        threshold=0,
    )
    assert answer["model"] == "sam-random"
    for got, result in zip(answer["results"], expected, strict=True):
        assert (got["width"], got["height"]) == (result.width, result.height)
        assert [each["prompt"] for each in got["prompts"]] == list(result.prompts)
        presence = [each["presence"] for each in got["prompts"]]
        assert presence == pytest.approx(list(result.presence), abs=1e-5)
        for each, found in zip(got["objects"], result.objects, strict=True):
            assert np.array_equal(from_rle(each["rle"]), found.mask)
            assert each["box"] == pytest.approx(found.box, abs=0.01)
            assert each["score"] == pytest.approx(found.score, abs=1e-5)
            assert (each["prompt"], each["prompt_index"]) == (found.prompt, found.prompt_index)
            assert each["area"] == found.area
            assert not {"png", "polygons"} & each.keys()
    assert answer["results"][0]["prompts"][2] == {"prompt": "it", "presence": None}


def test_other_formats(client: httpx.Client) -> None:
    masks = [from_rle(each["rle"]) for each in post(client)["results"][0]["objects"]]
    pngs = post(client, format="png")["results"][0]["objects"]
    for each, mask in zip(pngs, masks, strict=True):
        image = Image.open(io.BytesIO(base64.b64decode(each["png"])))
        assert np.array_equal(np.asarray(image), mask)
    polygons = post(client, format="polygons")["results"][0]["objects"]
    for each, mask in zip(polygons, masks, strict=True):
        points = np.array([point for piece in each["polygons"] for point in piece[0]])
        rows, columns = np.nonzero(mask)
        assert points.min(0).tolist() == [columns.min(), rows.min()]
        assert points.max(0).tolist() == [columns.max() + 1, rows.max() + 1]
    nothing = post(client, format="none")["results"][0]["objects"]
    assert nothing[0].keys() == {"prompt", "prompt_index", "score", "box", "area"}


def test_a_form(client: httpx.Client) -> None:
    files = [("image", ("a.png", file())), ("image", ("b.png", file(noise(30, 50, 1))))]
    as_json = post(client, images=[text(data) for _, (_, data) in files], prompts=["cat", "sun"])
    form = {"prompt": ["cat", "sun"], "threshold": "0", "model": "sam-random"}
    response = client.post("/v1/segment", files=files, data=form)
    assert response.json() == as_json
    as_json = post(client, prompts=[{"boxes": [BOX]}], format="polygons", max_objects=1)
    form = {
        "prompts": json.dumps([{"boxes": [BOX]}]),
        "threshold": "0",
        "format": "polygons",
        "max_objects": "1",
    }
    response = client.post("/v1/segment", files=files[:1], data=form)
    assert response.json() == as_json


def test_limits_are_passed_on(client: httpx.Client) -> None:
    assert post(client, threshold=1)["results"][0]["objects"] == []
    assert len(post(client, max_objects=2)["results"][0]["objects"]) == 2
    twice = [{"text": "cat"}, {"text": "cat", "label": "again"}]
    kept = post(client, prompts=twice, nms_iou=0.999)["results"][0]["objects"]
    assert {each["prompt"] for each in kept} == {"cat"}


def test_many_clients_at_once(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(client), range(8)))
    assert all(answer == answers[0] for answer in answers)


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"images": None}, "images", "missing"),
    ({"images": []}, "images", "length"),
    ({"images": ["no base64!"]}, "images[0]", "not base64"),
    ({"images": [text(b"no picture")]}, "images", "no picture in a known format"),
    ({"images": [text(file()), text(file(form="JPEG")[:300])]}, "images", "picture 1"),
    ({"images": ["https://example.org/cat.png"]}, "images[0]", "not fetched"),
    ({"images": ["/etc/passwd"]}, "images[0]", "not base64"),
    ({"prompts": None}, "prompts", "missing"),
    ({"prompts": []}, "prompts", "length"),
    ({"prompts": [""]}, "prompts", "is empty"),
    ({"prompts": ["1 2 3 4 5 6 7 8 9 0 1 2 3 4 5"]}, "prompts", "the model reads 14"),
    ({"prompts": [{}]}, "prompts[0]", "give text, boxes or points"),
    ({"prompts": [{"txt": "cat"}]}, "prompts[0]", "txt"),
    ({"prompts": [{"boxes": [[1, 2, 3]]}]}, "prompts[0].boxes[0]", "length"),
    ({"prompts": ["cat", {"boxes": [[9, 2, 3, 4]]}]}, "prompts[1]", "empty"),
    ({"prompts": [{"boxes": [[90, 2, 93, 4]]}]}, "prompts", "60 x 45 pixels"),
    ({"prompts": [{"points": [[1, 2]], "text": "cat"}]}, "prompts[0]", "another prompt"),
    ({"prompts": ["cat", ["sun"]]}, "prompts", "list of lists"),
    ({"prompts": [["cat"], ["sun"]]}, "prompts", "each of the 1"),
    ({"prompts": ["cat"] * 257}, "prompts", "at most 256"),
    ({"threshold": 2}, "threshold", "<= 1"),
    ({"max_objects": 0}, "max_objects", ">= 1"),
    ({"format": "bmp"}, "format", "bmp"),
    ({"prompt": "cat"}, "prompt", "unknown"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_refusals(
    client: httpx.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"images": [text(file())], "prompts": ["cat"]} | fields
    response = client.post("/v1/segment", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": {"image": ("a.png", file())}}, "give prompt"),
        ({"files": {"picture": ("a.png", file())}, "data": {"prompt": "x"}}, "only image"),
        ({"files": {"image": ("a.png", file())}, "data": {"prompts": "["}}, "not JSON"),
        ({"files": {"image": ("a.png", b"")}, "data": {"prompt": "x"}}, "no picture"),
        ({"content": b"--", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
        ({"content": b"[]"}, "JSON object"),
        ({"content": b"\xff"}, "JSON object"),
    ],
)
def test_bodies_that_cannot_be_read(
    client: httpx.Client, options: dict[str, Any], message: str
) -> None:
    response = client.post("/v1/segment", **options)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_other_refusals(client: httpx.Client) -> None:
    body = {"images": [text(file())], "prompts": ["cat"], "model": "other"}
    response = client.post("/v1/segment", json=body)
    assert response.status_code == 404
    assert "'sam-random'" in response.json()["error"]["message"]
    assert client.post("/v1/segment", content=b" " * (MAX_BODY + 1)).status_code == 413
    assert client.get("/v1/segment").status_code == 405
    assert client.post("/v1/chat/completions", json={}).status_code == 404


def test_models_and_health(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["sam-random"]
    assert client.get("/v1/models/sam-random").json()["id"] == "sam-random"
    assert client.get("/v1/models/tiny_qwen").status_code == 404
    assert client.get("/health").json() == {"status": "ok", "model": "sam-random"}


def test_both_models_are_served_together(tiny_llm: LLM, segmenter: Segmenter) -> None:
    running = Server(tiny_llm, segmenter=segmenter, segmenter_name="sam-random")
    try:
        listed = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["tiny_qwen", "sam-random"]
        with httpx.Client(base_url=running.url, timeout=120) as both:
            assert post(both)["results"]
        assert httpx.post(f"{running.url}/v1/chat/completions", json={}).status_code == 400
    finally:
        running.close()


def test_there_must_be_something_to_serve(tiny_llm: LLM, segmenter: Segmenter) -> None:
    with pytest.raises(ValueError, match="serve a language model"):
        create_app()
    with pytest.raises(ValueError, match="different names"):
        create_app(tiny_llm, segmenter=segmenter, segmenter_name="tiny_qwen")
