"""`POST /v1/segment`: pictures and prompts in, masks out."""

import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from jaxinfer.segmentation import Instance, PictureError, Prompt, PromptError, Segmentation
from jaxinfer.segmenter import THRESHOLD, Segmenter
from server.errors import ApiError
from server.requests import convert, read_object

MAX_PICTURES = 64
"""Pictures of one request."""

MAX_PROMPTS = 256
"""Prompts about one picture in one request."""

_DATA_URL = re.compile(r"data:[^,]*?;base64,", re.ASCII)

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Format = Literal["rle", "polygons", "png", "none"]


class PromptIn(Struct, forbid_unknown_fields=True):
    """A prompt; the fields are those of `jaxinfer.Prompt`."""

    text: str | None = None
    boxes: list[tuple[float, float, float, float]] = []
    negative_boxes: list[tuple[float, float, float, float]] = []
    points: list[tuple[float, float]] = []
    negative_points: list[tuple[float, float]] = []
    threshold: Share | None = None
    max_objects: Count | None = None
    label: str | None = None


Phrase = str | PromptIn


class SegmentRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/segment`.

    `images` are base64 or `data:` URLs of picture files. `prompts` are asked about every picture,
    or there is a list of them for each. `format` says how masks come back: COCO's run lengths,
    polygons, PNG files in base64, or not at all.
    """

    images: Annotated[list[str], Meta(min_length=1, max_length=MAX_PICTURES)]
    prompts: Annotated[list[Phrase | list[Phrase]], Meta(min_length=1)]
    model: str | None = None
    threshold: Share = THRESHOLD
    max_objects: Count | None = None
    nms_iou: Share | None = None
    format: Format = "rle"


class SegmentForm(Struct, kw_only=True):
    """The same as a form: files as `image`, each phrase as `prompt`, or all as `prompts`."""

    image: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_PICTURES)]
    prompt: list[str] = []
    prompts: list[Phrase | list[Phrase]] = []
    model: str | None = None
    threshold: Share = THRESHOLD
    max_objects: Count | None = None
    nms_iou: Share | None = None
    format: Format = "rle"


class RunLengths(Struct):
    """COCO's compressed run lengths; `size` is height and width."""

    size: list[int]
    counts: str


class ObjectOut(Struct, omit_defaults=True):
    """An object; the mask is in the field of the format that was asked for.

    `box`: left, top, right, bottom in pixels. `polygons`: pieces, each an outline and its holes.
    `png`: base64 of a file of one bit a pixel.
    """

    prompt: str
    prompt_index: int
    score: float
    box: tuple[float, float, float, float]
    area: int
    rle: RunLengths | UnsetType = UNSET
    polygons: list[list[list[list[float]]]] | UnsetType = UNSET
    png: str | UnsetType = UNSET


class PromptOut(Struct):
    """A prompt and how likely there is such a thing in the picture; null for points."""

    prompt: str
    presence: float | None


class PictureOut(Struct):
    """What was found in one picture, at its upright size in pixels."""

    width: int
    height: int
    prompts: list[PromptOut]
    objects: list[ObjectOut]


class SegmentResponse(Struct):
    """One result for each picture, in order."""

    model: str
    results: list[PictureOut]
    object: str = "segmentation"


class Job(Struct):
    """A request that has been checked as far as that needs no model."""

    images: list[bytes]
    prompts: list[list[Prompt]]
    model: str | None
    threshold: float
    max_objects: int | None
    nms_iou: float | None
    format: Format


async def read_segment_request(headers: Headers, body: bytes) -> Job:
    """Decode a request, JSON or multipart. Raises ApiError (400) that names the field."""
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        asked = convert(await _read_form(headers, body), SegmentForm, strict=False)
        if bool(asked.prompt) == bool(asked.prompts):
            raise ApiError("give prompt, once for each phrase, or prompts as JSON", param="prompt")
        images, prompts = asked.image, asked.prompts or list(asked.prompt)
    else:
        asked = convert(read_object(body), SegmentRequest)
        images = [_from_base64(text, f"images[{i}]") for i, text in enumerate(asked.images)]
        prompts = asked.prompts
    limits = asked.threshold, asked.max_objects, asked.nms_iou
    return Job(images, _prompts(prompts, len(images)), asked.model, *limits, asked.format)


def answer(job: Job, segmenter: Segmenter, model: str) -> SegmentResponse:
    """Do what is asked; this takes a while. Raises ApiError (400) for a bad prompt or picture."""
    try:
        results = segmenter.segment(
            job.images,
            job.prompts,
            threshold=job.threshold,
            max_objects=job.max_objects,
            nms_iou=job.nms_iou,
        )
    except PromptError as error:
        raise ApiError(str(error), param="prompts", code="invalid_value") from error
    except PictureError as error:
        raise ApiError(str(error), param="images", code="invalid_image") from error
    return SegmentResponse(model, [_picture(result, job.format) for result in results])


def _picture(result: Segmentation, form: Format) -> PictureOut:
    prompts = zip(result.prompts, result.presence, strict=True)
    return PictureOut(
        result.width,
        result.height,
        [PromptOut(prompt, presence) for prompt, presence in prompts],
        [_object(found, form) for found in result.objects],
    )


def _object(found: Instance, form: Format) -> ObjectOut:
    out = ObjectOut(found.prompt, found.prompt_index, found.score, found.box, found.area)
    match form:
        case "rle":
            out.rle = RunLengths(**found.rle())
        case "polygons":
            out.polygons = [[ring.tolist() for ring in piece] for piece in found.polygons()]
        case "png":
            out.png = base64.b64encode(found.png()).decode()
    return out


def _prompts(given: list[Phrase | list[Phrase]], pictures: int) -> list[list[Prompt]]:
    """The prompts of each picture."""
    lists = [item for item in given if isinstance(item, list)]
    shared = [item for item in given if not isinstance(item, list)]
    if lists and (shared or len(lists) != pictures):
        raise ApiError(
            f"prompts is a list of prompts for all pictures, or a list of lists, one for each of "
            f"the {pictures}",
            param="prompts",
        )
    if max(map(len, [shared, *lists])) > MAX_PROMPTS:
        raise ApiError(f"at most {MAX_PROMPTS} prompts about a picture", param="prompts")
    if shared:
        return [[_prompt(item, f"prompts[{i}]") for i, item in enumerate(shared)]] * pictures
    return [
        [_prompt(item, f"prompts[{i}][{j}]") for j, item in enumerate(items)]
        for i, items in enumerate(lists)
    ]


def _prompt(given: Phrase, where: str) -> Prompt:
    fields: Mapping[str, Any] = (
        {"text": given} if isinstance(given, str) else msgspec.structs.asdict(given)
    )
    try:
        return Prompt(**fields)
    except PromptError as error:
        raise ApiError(f"{where}: {error}", param=where, code="invalid_value") from error


def _from_base64(text: str, where: str) -> bytes:
    if text.startswith(("http:", "https:")):
        raise ApiError(
            f"{where}: pictures are not fetched from URLs; send the file in base64",
            param=where,
            code="unsupported_parameter",
        )
    try:
        return base64.b64decode(_DATA_URL.sub("", text[:100]) + text[100:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            f"{where} is not base64 ({error}); encode the file's bytes, without line breaks, or "
            "send a form with the file",
            param=where,
        ) from error


async def _read_form(headers: Headers, body: bytes) -> dict[str, Any]:
    """The fields of a form; files as bytes, `image` and `prompt` as lists, `prompts` from JSON."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(
        headers,
        stream(),  # pyright: ignore[reportArgumentType]  # any iterator will do
        max_files=MAX_PICTURES,
        max_fields=MAX_PROMPTS + 10,
    )
    try:
        form: FormData = await parser.parse()
    except (MultiPartException, KeyError) as error:
        detail = getattr(error, "message", "the boundary is missing")
        raise ApiError(f"the form cannot be read: {detail}") from error
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) != (name == "image"):
            raise ApiError(f"{name}: only image is a file, with a file name", param=name)
        content = await value.read() if isinstance(value, UploadFile) else value
        if name in ("image", "prompt"):
            fields.setdefault(name, []).append(content)
        elif name in fields:
            raise ApiError(f"{name} is given twice", param=name)
        else:
            fields[name] = content
    await form.close()
    if "prompts" in fields:
        try:
            fields["prompts"] = msgspec.json.decode(fields["prompts"])
        except msgspec.DecodeError as error:
            raise ApiError(f"prompts is not JSON: {error}", param="prompts") from error
    return fields
