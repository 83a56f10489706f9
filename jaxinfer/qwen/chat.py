"""Chat messages to prompt text, through the checkpoint's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The template is missing or invalid, or it refused the messages; the text says which."""


class ChatTemplate:
    """A compiled chat template.

    The environment is the one that checkpoints' templates are written for: sandboxed,
    `trim_blocks` and `lstrip_blocks` on, loop controls, `tojson` without ASCII escapes, and
    `raise_exception` for the template's own complaints.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"chat template, line {error.lineno}: {error.message}"
            ) from error

    @classmethod
    def from_dir(cls, path: str | Path) -> ChatTemplate:
        """Read `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json`."""
        directory = Path(path)
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            return cls(template_file.read_text(encoding="utf-8"))
        config_file = directory / "tokenizer_config.json"
        if config_file.is_file():
            source = json.loads(config_file.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(source, str):
                return cls(source)
        raise ChatTemplateError(
            f"{directory} holds no chat template: expected chat_template.jinja, or a string "
            "under chat_template in tokenizer_config.json"
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render OpenAI-style messages to the prompt.

        Tool-call arguments may be a mapping or a JSON string that holds an object. Further
        keywords (`enable_thinking`, `preserve_thinking`, `add_vision_id`) reach the template
        as they are.
        """
        prepared = [_decode_tool_calls(message, index) for index, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=prepared,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatTemplateError(str(error)) from error


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _decode_tool_calls(message: Message, index: int) -> Message:
    """The message with the arguments of each of its tool calls as a mapping."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_decode_call(call, index) for call in calls]}


def _decode_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _decode_call(call["function"], index)}
    return {**call, "arguments": _decode_arguments(call.get("arguments"), index)}


def _decode_arguments(arguments: Any, index: int) -> Mapping[str, Any]:
    """Arguments as a mapping; None and a blank string mean a call without arguments."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ChatTemplateError(
                f"messages[{index}]: tool call arguments are not valid JSON: {error}"
            ) from error
    if not isinstance(decoded, Mapping):
        raise ChatTemplateError(
            f"messages[{index}]: tool call arguments must be a JSON object, "
            f"not {type(decoded).__name__}"
        )
    return decoded
