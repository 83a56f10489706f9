"""What the model says, taken apart: reasoning, content and tool calls, whole or as it streams."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.qwen.argument_types import coerce

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called, with arguments as JSON values."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A reply.

    Attributes:
        reasoning: what was thought first; None if nothing was.
        content: what is said to the user.
        tool_calls: in the order in which they were written.
    """

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class TextDelta:
    """More text of the reasoning or of the content."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; `index` counts from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: the fragments of one call add up to a JSON object."""

    index: int
    fragment: str


Delta = TextDelta | CallStart | CallArguments


def parse(
    text: str, *, thinking: bool, tools: Sequence[Mapping[str, Any]] | None = None
) -> Message:
    """Take a whole reply apart; see `MessageParser`."""
    parser = MessageParser(thinking=thinking, tools=tools)
    return join([*parser.feed(text), *parser.finish()])


def join(deltas: Iterable[Delta]) -> Message:
    """The message that the deltas of a whole stream add up to."""
    text = {"reasoning": "", "content": ""}
    calls: list[tuple[str, list[str]]] = []
    for delta in deltas:
        match delta:
            case TextDelta(kind, more):
                text[kind] += more
            case CallStart(_, name):
                calls.append((name, []))
            case CallArguments(index, fragment):
                calls[index][1].append(fragment)
    return Message(
        text["reasoning"] or None,
        text["content"],
        tuple(ToolCall(name, json.loads("".join(fragments))) for name, fragments in calls),
    )


@dataclass
class _Call:
    """A call that is being read."""

    index: int
    name: str
    properties: Mapping[str, Any]
    root: Any
    seen: set[str] = field(default_factory=set)
    parameter: str = ""
    value: str = ""


class MessageParser:
    """Takes a reply apart as its text arrives; how the text is cut makes no difference.

    The format is that of Qwen's chat template: the reasoning up to `</think>` if the prompt has
    opened it, then content, then calls

        <tool_call>
        <function=NAME>
        <parameter=KEY>
        VALUE
        </parameter>
        </function>
        </tool_call>

    with these liberties: `<tool_call>` ends the reasoning; `</think>` may be repeated; `<function=`
    may stand alone; any closing tag of a call may be missing. A value ends at the next tag, and is
    converted to the type that the tool declares for it, or else stays a string. Leading newlines
    and trailing whitespace of reasoning and content are left out; content after a call is a new
    paragraph. A call without a function's name is content as it stands.

    Args:
        thinking: whether the prompt ends within the reasoning.
        tools: the tools offered, in OpenAI's form. When given, a `<function=` that stands alone
            must name one of them; in a `<tool_call>` any name is taken.
        calls: False to leave all that looks like a call in the content.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        calls: bool = True,
    ) -> None:
        self._schemas = {} if tools is None else dict(_schema(tool) for tool in tools)
        alone = [_FUNCTION]
        if tools is not None:
            alone = [f"{_FUNCTION}{name}>" for name in self._schemas]
        self._in_reasoning = [_THINK, _END_THINK, *([_CALL] if calls else [])]
        self._in_content = [_END_THINK, *([_CALL, _END_CALL, *alone] if calls else [])]
        self._step = self._reasoning if thinking else self._content
        self._rest = ""
        self._raw = ""
        self._name = ""
        self._call: _Call | None = None
        self._count = 0
        self._trims = {"reasoning": _Trim(), "content": _Trim()}

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text adds."""
        self._rest += text
        deltas: list[Delta] = []
        while True:
            before = len(self._rest)
            deltas += self._step()
            if len(self._rest) == before or not self._rest:
                return deltas

    def finish(self) -> list[Delta]:
        """What is left when no more text comes; a call that is still open is closed."""
        rest, self._rest = self._rest, ""
        if self._step == self._reasoning:
            return list(self._text("reasoning", rest))
        if self._call is not None:
            if self._step == self._value:
                self._call.value += rest
            return list(self._close())
        return list(self._text("content", self._raw + rest))

    # Each step reads from the front of `_rest`, and changes `_step` when it meets a tag.

    def _reasoning(self) -> Iterator[Delta]:
        text, tag = self._until(self._in_reasoning)
        yield from self._text("reasoning", text)
        if tag == _END_THINK:
            self._step = self._content
        elif tag == _CALL:
            self._open(tag)

    def _content(self) -> Iterator[Delta]:
        text, tag = self._until(self._in_content)
        yield from self._text("content", text)
        if tag == _CALL:
            self._open(tag)
        elif tag == _FUNCTION:
            self._open(tag)
            self._step = self._function_name
        elif tag.startswith(_FUNCTION):
            yield from self._start(tag.removeprefix(_FUNCTION).removesuffix(">"))

    def _before_function(self) -> Iterator[Delta]:
        text, tag = self._until([_FUNCTION, _END_CALL])
        self._raw += text + tag
        if tag == _FUNCTION:
            self._name, self._step = "", self._function_name
        elif tag:
            yield from self._give_up()

    def _function_name(self) -> Iterator[Delta]:
        text, tag = self._until([">", _END_CALL])
        self._raw += text + tag
        self._name += text
        if tag == ">" and self._name.strip():
            yield from self._start(self._name.strip())
        elif tag == ">" and self._raw.startswith(_CALL):
            self._step = self._before_function
        elif tag:
            yield from self._give_up()

    def _between(self) -> Iterator[Delta]:
        """Within a function, outside its parameters; text that is there means nothing."""
        _, tag = self._until([_PARAMETER, _END_FUNCTION, _END_CALL, _CALL])
        if tag:
            yield from self._turn(tag)

    def _parameter_name(self) -> Iterator[Delta]:
        text, tag = self._until([">", _END_FUNCTION, _END_CALL])
        assert self._call is not None
        self._call.parameter += text
        if tag == ">":
            self._call.parameter = self._call.parameter.strip()
            self._step = self._value
        elif tag:
            self._step = self._between
            yield from self._turn(tag)

    def _value(self) -> Iterator[Delta]:
        text, tag = self._until([_END_PARAMETER, _PARAMETER, _END_FUNCTION, _END_CALL])
        assert self._call is not None
        self._call.value += text
        if tag:
            yield from self._argument()
            self._step = self._between
            yield from self._turn(tag)

    def _turn(self, tag: str) -> Iterator[Delta]:
        """Go on after a tag within a function."""
        if tag == _PARAMETER:
            self._step = self._parameter_name
        elif tag != _END_PARAMETER:
            yield from self._close()
            if tag == _CALL:
                self._open(tag)

    # Pieces of the steps.

    def _until(self, tags: Sequence[str]) -> tuple[str, str]:
        """Take the text before the first of the tags, and that tag.

        If there is none, takes ("", as second) all text that cannot be the beginning of one.
        """
        found = [(at, tag) for tag in tags if (at := self._rest.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            text, self._rest = self._rest[:at], self._rest[at + len(tag) :]
            return text, tag
        # Every tag but the one-character ">" begins so; there may be a tag for each of many tools.
        held = max(_overlap(self._rest, tag) for tag in tags) if "<" in self._rest else 0
        at = len(self._rest) - held
        text, self._rest = self._rest[:at], self._rest[at:]
        return text, ""

    def _text(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[Delta]:
        shown = self._trims[kind].add(text)
        if shown:
            yield TextDelta(kind, shown)

    def _open(self, tag: str) -> None:
        self._raw, self._name, self._step = tag, "", self._before_function

    def _give_up(self) -> Iterator[Delta]:
        """What looked like a call is text."""
        raw, self._raw, self._step = self._raw, "", self._content
        yield from self._text("content", raw)

    def _start(self, name: str) -> Iterator[Delta]:
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        known = properties if isinstance(properties, Mapping) else {}
        self._call = _Call(self._count, name, known, schema)
        self._raw, self._count, self._step = "", self._count + 1, self._between
        self._trims["content"].new_paragraph()
        yield CallStart(self._call.index, name)

    def _argument(self) -> Iterator[Delta]:
        """The parameter that has been read; of a repeated one, the first counts."""
        call = self._call
        assert call is not None
        name, text = call.parameter, call.value.removeprefix("\n").removesuffix("\n")
        call.parameter = call.value = ""
        if name and name not in call.seen:
            value = coerce(text, call.properties.get(name), call.root)
            pair = f"{_json(name)}: {_json(value)}"
            yield CallArguments(call.index, (", " if call.seen else "{") + pair)
            call.seen.add(name)

    def _close(self) -> Iterator[Delta]:
        call = self._call
        assert call is not None
        if self._step == self._value:
            yield from self._argument()
        yield CallArguments(call.index, "}" if call.seen else "{}")
        self._call, self._step = None, self._content


class _Trim:
    """Leaves out leading newlines and trailing whitespace of a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._at_start = True
        self._separator = ""

    def add(self, text: str) -> str:
        """What can be shown now."""
        text = self._held + text
        if self._at_start:
            text = text.lstrip("\n")
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown and self._at_start:
            self._at_start = False
            return self._separator + shown
        return shown

    def new_paragraph(self) -> None:
        """Start again, a blank line further on if there has been text."""
        self._held = ""
        if not self._at_start:
            self._at_start, self._separator = True, "\n\n"


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of a text that is a beginning of a tag."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)


def _schema(tool: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and parameters of a tool, from `{"function": {...}}` or the inner object alone."""
    function = tool.get("function", tool)
    return function.get("name", ""), function.get("parameters")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
