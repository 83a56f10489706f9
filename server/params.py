"""From a chat request to sampling parameters."""

import re
from dataclasses import fields, replace

from jaxinfer.engine import SamplingParams, StructuredOutput
from server.errors import ApiError
from server.requests import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)

_END_OF_CALL = "</tool_call>"
_SAME = {f.name for f in fields(SamplingParams)} & set(ChatRequest.__struct_fields__)


def sampling_params(request: ChatRequest, defaults: SamplingParams, tools: bool) -> SamplingParams:
    """The checkpoint's own parameters with those of the request in their place.

    Args:
        request: whose parameters they are.
        defaults: the checkpoint's.
        tools: whether the model is offered any.

    Raises ApiError (400) that names the field at fault.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    if tools and not request.parallel_tool_calls:
        # Nothing after the first call is wanted, and the parser closes what is open.
        stop = [*stop, _END_OF_CALL]
    given = {name: getattr(request, name) for name in _SAME} | {
        "max_tokens": _max_tokens(request),
        # OpenAI's seeds are of any sign and size.
        "seed": None if request.seed is None else request.seed % 2**32,
        "stop": tuple(stop),
        "structured": _structured(request, tools),
    }
    try:
        return replace(defaults, **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        raise refusal(error, request) from error


def refusal(error: ValueError, request: ChatRequest) -> ApiError:
    """An error of the engine, whose message begins with what is at fault, as the client's."""
    found = re.match(r"\w+", str(error))
    word = found[0] if found else ""
    if word == "structured":
        param = "response_format" if request.structured_outputs is None else "structured_outputs"
    else:
        param = word if word in ChatRequest.__struct_fields__ else "messages"
    return ApiError(str(error), param=param, code="invalid_value")


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_tokens is {old} and max_completion_tokens {new}; give one of them",
            param="max_tokens",
        )
    return old if new is None else new


def _structured(request: ChatRequest, tools: bool) -> StructuredOutput | None:
    """What the answer must conform to, if anything."""
    form, other = request.response_format, request.structured_outputs
    if isinstance(form, TextFormat):
        form = None
    if form is None and other is None:
        return None
    param = "response_format" if other is None else "structured_outputs"
    if form is not None and other is not None:
        raise ApiError("give response_format or structured_outputs, not both", param=param)
    if tools:
        raise ApiError(
            f"{param} cannot go with tools, since a call would not conform: leave out one of "
            "them, or set tool_choice to 'none'",
            param=param,
        )
    match form:
        case JsonObjectFormat():
            return StructuredOutput(json_object=True)
        case JsonSchemaFormat(named):
            return StructuredOutput(json_schema=named.schema)
    assert other is not None
    return _one_of(other)


def _one_of(asked: StructuredOutputs) -> StructuredOutput:
    names = asked.__struct_fields__
    given = [name for name in names if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        raise ApiError(
            f"structured_outputs takes exactly one of {', '.join(names)}; "
            f"{' and '.join(given) or 'none'} given",
            param="structured_outputs",
        )
    return StructuredOutput(
        json_schema=asked.json,
        json_object=bool(asked.json_object),
        regex=asked.regex,
        lark=asked.grammar,
        choice=tuple(asked.choice or ()),
    )
