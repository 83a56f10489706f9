"""Requests of the OpenAI routes, and what is refused in them."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from server.errors import ApiError


class Part(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(Struct):
    """Name and arguments (JSON) of a call in the history."""

    name: str
    arguments: str = ""


class PastCall(Struct):
    """A tool call in the history."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class Function(Struct):
    """A function that is offered."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool that is offered."""

    type: Literal["function"]
    function: Function


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """A JSON object."""


class NamedSchema(Struct, forbid_unknown_fields=True):
    """A JSON schema; the answer conforms to it whether `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that conforms to a schema."""

    json_schema: NamedSchema


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """What an answer must conform to, beyond OpenAI's formats; one of them is given.

    `json` is a schema, `grammar` one in llguidance's dialect of Lark.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


Positive = Annotated[int, Meta(ge=1)]


class ChatRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`; None stands for the checkpoint's own default.

    `top_k`, `min_p`, `min_tokens`, `repetition_penalty`, `bad_words`, `allowed_token_ids`,
    `stop_token_ids`, `ignore_eos`, `structured_outputs`, `cache_salt` and `chat_template_kwargs` go
    beyond OpenAI's fields. Fields that are called as those of `SamplingParams` mean the same;
    ranges that are not given here are checked there.
    """

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: Annotated[str, Meta(min_length=1)] | list[Annotated[str, Meta(min_length=1)]] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


ACCEPTED = frozenset((
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
))  # fmt: skip
"""OpenAI's fields that ask for nothing that would change the answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that cannot be honoured, each with the values that ask for what is done anyway."""


def read_chat_request(body: bytes) -> ChatRequest:
    """Decode and check a request. Raises ApiError (400) that names the field."""
    fields = read_object(body)
    for name in ACCEPTED & fields.keys():
        del fields[name]
    for name in NEUTRAL.keys() & fields.keys():
        if fields.pop(name) not in NEUTRAL[name]:
            raise ApiError(
                f"{name} is not supported; leave it out", param=name, code="unsupported_parameter"
            )
    # The keys of `logit_bias` are numbers, which JSON can only write as strings.
    return convert(fields, ChatRequest, str_keys=True)


def read_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object that are not null. Raises ApiError (400) if it is none."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not a JSON object: {error}") from error
    return {name: value for name, value in raw.items() if value is not None}


_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`")


def convert[T: Struct](fields: dict[str, Any], kind: type[T], **options: Any) -> T:
    """The fields as a `kind`; options are those of `msgspec.convert`.

    Raises ApiError (400) that names the field.
    """
    if unknown := sorted(fields.keys() - set(kind.__struct_fields__)):
        raise ApiError(f"unknown field {unknown[0]}", param=unknown[0], code="unknown_parameter")
    try:
        return msgspec.convert(fields, kind, **options)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        assert found is not None
        what, path = found["what"], found["path"] or ""
        if missing := _MISSING.match(what):
            path = f"{path}.{missing['name']}".removeprefix(".")
            raise ApiError(
                f"{path} is missing", param=path, code="missing_required_parameter"
            ) from error
        message = f"{path}: {what[0].lower()}{what[1:]}"
        raise ApiError(message, param=path or None, code="invalid_value") from error
