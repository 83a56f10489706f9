"""Requests and responses of the OpenAI routes, and what is refused in them."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from server.errors import ApiError

# --- requests -----------------------------------------------------------------------------------


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


Positive = Annotated[int, Meta(ge=1)]


class ChatRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`; None stands for the checkpoint's own default.

    `top_k`, `min_p`, `ignore_eos`, `stop_token_ids` and `chat_template_kwargs` go beyond OpenAI's
    fields.
    """

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Annotated[str, Meta(min_length=1)] | list[Annotated[str, Meta(min_length=1)]] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: bool = False
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
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that cannot be honoured, each with the values that ask for what is done anyway."""


def read_chat_request(body: bytes) -> ChatRequest:
    """Decode and check a request. Raises ApiError (400) that names the field."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not a JSON object: {error}") from error
    fields = {name: value for name, value in raw.items() if value is not None}
    for name in ACCEPTED & fields.keys():
        del fields[name]
    for name in NEUTRAL.keys() & fields.keys():
        if fields.pop(name) not in NEUTRAL[name]:
            raise ApiError(
                f"{name} is not supported; leave it out", param=name, code="unsupported_parameter"
            )
    known = set(ChatRequest.__struct_fields__)
    if unknown := sorted(fields.keys() - known):
        raise ApiError(f"unknown field {unknown[0]}", param=unknown[0], code="unknown_parameter")
    return _convert(fields)


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`")


def _convert(fields: dict[str, Any]) -> ChatRequest:
    try:
        return msgspec.convert(fields, ChatRequest)
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


# --- responses ----------------------------------------------------------------------------------


class UsageOut(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(Struct):
    """Log probability of one token; `bytes` are the UTF-8 of what it stands for."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] = []


class Logprobs(Struct):
    """Log probabilities of all generated tokens: of thoughts and markup, too."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionOut(Struct):
    """Name and arguments (JSON) of a call; in a stream, a fragment of them."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallOut(Struct):
    """A tool call; in a stream, a fragment of one, told apart by `index`."""

    function: FunctionOut
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ReplyOut(Struct):
    """The assistant's message."""

    content: str | None
    reasoning_content: str | None
    tool_calls: list[CallOut] | UnsetType = UNSET
    role: str = "assistant"
    refusal: None = None


class ChoiceOut(Struct):
    """The one choice of a response."""

    message: ReplyOut
    finish_reason: str
    logprobs: Logprobs | None = None
    index: int = 0


class ChatCompletion(Struct):
    """A response that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChoiceOut]
    usage: UsageOut
    object: str = "chat.completion"


class DeltaOut(Struct):
    """What a piece of a stream adds to the message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallOut] | UnsetType = UNSET


class ChunkChoice(Struct):
    """The one choice of a piece of a stream."""

    delta: DeltaOut
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    index: int = 0


class ChatChunk(Struct):
    """A piece of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageOut | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class ModelCard(Struct):
    """A model that is served; `max_model_len` is its context in tokens."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "jaxinfer"


class ModelList(Struct):
    """All models that are served."""

    data: list[ModelCard]
    object: str = "list"
