"""From a chat request to what the engine takes: prompt tokens and sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.engine import LLM, RequestError, SamplingParams
from jaxinfer.qwen.chat import ChatTemplateError
from jaxinfer.qwen.messages import MessageParser
from server.errors import ApiError
from server.params import sampling_params
from server.requests import ChatMessage, ChatRequest, Tool
from server.verbatim import VerbatimParser

TEMPLATE_OPTIONS = ("enable_thinking", "preserve_thinking", "add_vision_id")


@dataclass(frozen=True)
class Job:
    """A chat request, ready for the engine.

    Attributes:
        token_ids: the prompt.
        params: how to sample; `n` answers are asked for.
        thinking: whether the prompt ends within the model's reasoning.
        tools: what the model was offered, as it saw it.
    """

    token_ids: list[int]
    params: SamplingParams
    thinking: bool
    tools: list[dict[str, Any]]

    def parser(self) -> MessageParser | VerbatimParser:
        """A fresh parser for one answer."""
        if self.params.structured is not None:
            return VerbatimParser(thinking=self.thinking)
        return MessageParser(thinking=self.thinking, tools=self.tools, calls=bool(self.tools))


def prepare(request: ChatRequest, llm: LLM) -> Job:
    """Render and tokenise. Raises ApiError (400) that names the field at fault."""
    options = _template_options(request)
    tools = _tools(request)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    try:
        token_ids = llm.render(messages, tools or None, **options)
    except (ChatTemplateError, RequestError) as error:
        raise ApiError(str(error), param="messages") from error
    if len(token_ids) >= llm.context:
        raise ApiError(
            f"the prompt has {len(token_ids)} tokens and the context holds {llm.context}, one of "
            "them for the answer: shorten the messages",
            param="messages",
            code="context_length_exceeded",
        )
    params = sampling_params(request, llm.defaults, bool(tools))
    params = llm.after_thoughts(token_ids, params)
    return Job(token_ids, params, options.get("enable_thinking", True), tools)


def _template_options(request: ChatRequest) -> dict[str, bool]:
    options = dict(request.chat_template_kwargs)
    for name, value in options.items():
        param = f"chat_template_kwargs.{name}"
        if name not in TEMPLATE_OPTIONS:
            known = ", ".join(TEMPLATE_OPTIONS)
            raise ApiError(f"{param} is not one of {known}", param=param, code="unknown_parameter")
        if not isinstance(value, bool):
            raise ApiError(f"{param} must be true or false", param=param, code="invalid_value")
    effort = request.reasoning_effort
    if effort == "none":
        options.setdefault("enable_thinking", False)
    elif effort is not None:
        raise ApiError(
            f"reasoning_effort {effort!r} is not supported: the model thinks, or with 'none' it "
            "does not; leave it out",
            param="reasoning_effort",
            code="unsupported_value",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    return options


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools as the template shows them; none if the model must not call any."""
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        raise ApiError(
            "tool_choice can be 'auto' or 'none'; a call cannot be forced",
            param="tool_choice",
            code="unsupported_value",
        )
    if choice == "auto" and not request.tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    return [] if choice == "none" else tools


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    function = tool.function
    if function.strict:
        raise ApiError(
            "strict tools are not supported: arguments are not checked against the schema; leave "
            "strict out",
            param=f"{where}.function.strict",
            code="unsupported_value",
        )
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    return {"type": "function", "function": shown}


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as the template takes it."""
    if message.function_call is not None:
        raise ApiError(
            "function_call is not supported; use tool_calls",
            param=f"{where}.function_call",
            code="unsupported_parameter",
        )
    if message.audio is not None:
        raise ApiError(
            "audio is not supported", param=f"{where}.audio", code="unsupported_parameter"
        )
    content = _content(message, where)
    if content is None and message.role != "assistant":
        raise ApiError(f"{where}.content is missing", param=f"{where}.content")
    # The template knows no developer, whom OpenAI put in the system's place.
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": content or ""}
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if role != "assistant":
            raise ApiError(f"{where}.tool_calls: only the assistant calls tools", param=where)
        shown["tool_calls"] = [_call(call.function) for call in message.tool_calls]
    return shown


def _call(function: Any) -> Mapping[str, Any]:
    return {
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }


def _content(message: ChatMessage, where: str) -> str | None:
    if not isinstance(message.content, list):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        param = f"{where}.content[{i}]"
        if part.type != "text":
            raise ApiError(
                f"{param}: parts of type {part.type!r} are not served yet, only 'text'",
                param=f"{param}.type",
                code="unsupported_value",
            )
        if part.text is None:
            raise ApiError(f"{param}.text is missing", param=f"{param}.text")
        texts.append(part.text)
    return "".join(texts)
