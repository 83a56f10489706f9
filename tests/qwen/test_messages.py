"""Replies taken apart: the format, its liberties, and independence of how the text is cut."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.qwen.chat import ChatTemplate
from jaxinfer.qwen.messages import (
    CallArguments,
    CallStart,
    Message,
    MessageParser,
    TextDelta,
    ToolCall,
    join,
    parse,
)

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny_qwen"
TEMPLATE = ChatTemplate.from_dir(CHECKPOINT)
USER = {"role": "user", "content": "Hi"}


def tool(name: str, schema: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    parameters = schema or {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(body: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def value_of(text: str, schema: Any, root: dict[str, Any] | None = None) -> Any:
    parameters = {"type": "object", "properties": {"x": schema}} | (root or {})
    reply = call(f"<parameter=x>\n{text}\n</parameter>\n")
    message = parse(reply, thinking=False, tools=[tool("f", parameters)])
    return message.tool_calls[0].arguments["x"]


WHOLE = (
    "I look it up.\n</think>\n\nOne moment.\n\n"
    + call("<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n", "weather")
    + "\n"
    + call("", "clock")
)
WEATHER = tool("weather", city={"type": "string"}, days={"type": "integer"})


def test_reasoning_content_and_calls() -> None:
    message = parse(WHOLE, thinking=True, tools=[WEATHER, tool("clock")])
    calls = (ToolCall("weather", {"city": "Paris", "days": 3}), ToolCall("clock", {}))
    assert message == Message("I look it up.", "One moment.", calls)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("", True, Message(None, "")),
        ("Hello\n", False, Message(None, "Hello")),
        ("\n\n  indented", False, Message(None, "  indented")),
        ("still thinking", True, Message("still thinking", "")),
        ("\n</think>\n\nHi", True, Message(None, "Hi")),
        ("<think>\nwell\n</think>\n\nHi", True, Message("well", "Hi")),
        ("a</think>b</think>c", True, Message("a", "bc")),
        ("</think>\n\nHi", False, Message(None, "Hi")),
        ("a < b and c <fun", False, Message(None, "a < b and c <fun")),
    ],
)
def test_without_calls(text: str, thinking: bool, expected: Message) -> None:
    assert parse(text, thinking=thinking) == expected


def test_a_call_ends_the_reasoning() -> None:
    message = parse("I need it.\n" + call(""), thinking=True)
    assert message == Message("I need it.", "", (ToolCall("f", {}),))


def test_a_function_named_in_the_reasoning_does_not_end_it() -> None:
    message = parse("call <function=f> now</think>", thinking=True)
    assert message == Message("call <function=f> now", "")


@pytest.mark.parametrize(
    "text",
    [
        call("<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"),
        call("<parameter=a>\n1\n<parameter=b>\n2\n"),
        call("<parameter=a>1<parameter=b>2"),
        "<function=f><parameter=a>1</parameter><parameter=b>2</parameter></function>",
        "<function=f><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2</tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2</parameter>",
        call("<parameter=a>1</parameter><parameter=a>9</parameter><parameter=b>2</parameter>"),
        call("<parameter=a>1</parameter>?<parameter=b>2</parameter><parameter=c"),
    ],
)
def test_liberties(text: str) -> None:
    assert parse(text, thinking=False).tool_calls == (ToolCall("f", {"a": "1", "b": "2"}),)


def test_two_calls_of_which_the_first_is_not_closed() -> None:
    text = "<tool_call>\n<function=f>\n" + call("", "g")
    assert [c.name for c in parse(text, thinking=False).tool_calls] == ["f", "g"]


def test_text_around_calls_is_content() -> None:
    message = parse("A\n\n" + call("") + "\nB\n", thinking=False)
    assert message == Message(None, "A\n\nB", (ToolCall("f", {}),))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        "<tool_call>",
        "<tool_call>\n<function=",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=></tool_call>",
        "<tool_call>\n<function=f</tool_call>",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert parse(text, thinking=False) == Message(None, text)


def test_calls_may_be_left_alone() -> None:
    parser = MessageParser(thinking=True, calls=False)
    text = "a " + call("")
    assert join([*parser.feed(text), *parser.finish()]) == Message(text, "")


def test_a_lone_function_must_be_offered() -> None:
    text = "<function=g></function>"
    assert parse(text, thinking=False, tools=[tool("f")]) == Message(None, text)
    assert parse(text, thinking=False, tools=[tool("g")]).tool_calls == (ToolCall("g", {}),)
    assert parse(call("", "h"), thinking=False, tools=[tool("g")]).tool_calls[0].name == "h"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("three", {"type": "integer"}, "three"),
        ("true", {"type": "integer"}, "true"),
        ("-2.50", {"type": "number"}, -2.5),
        ("16.0", {"type": "number"}, 16.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("none", {"type": ["string", "null"]}, "none"),
        ('["a", 1]', {"type": "array"}, ["a", 1]),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ('{"a": {"b": 1}}', {"type": "object"}, {"a": {"b": 1}}),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ('["a"]', {"type": "object"}, '["a"]'),
        ("12", {"type": "string"}, "12"),
        (' "x" ', {"type": "string"}, ' "x" '),
        ("12", {}, "12"),
        ("12", None, "12"),
        ("12", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 12),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("red", {"enum": ["red"]}, "red"),
        ("1", {"const": 1}, 1),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
        ("[1]", {"items": {}}, [1]),
        ("5", {"$ref": "#/$defs/n"}, 5),
        ("5", {"$ref": "#/$defs/self"}, "5"),
        ("5", {"$ref": "#/nowhere/x"}, "5"),
        ("\n\ntwo lines\n\n", {"type": "string"}, "\n\ntwo lines\n\n"),
    ],
)
def test_values_take_their_declared_type(text: str, schema: Any, value: Any) -> None:
    root = {"$defs": {"n": {"type": "integer"}, "self": {"$ref": "#/$defs/self"}}}
    found = value_of(text, schema, root)
    assert (type(found), found) == (type(value), value)


def test_undeclared_values_are_strings() -> None:
    text = call("<parameter=y>\n1\n</parameter>\n")
    assert parse(text, thinking=False, tools=[tool("f")]).tool_calls[0].arguments == {"y": "1"}
    assert parse(text, thinking=False, tools=[{"name": "f"}]).tool_calls[0].arguments == {"y": "1"}
    assert parse(text, thinking=False).tool_calls[0].arguments == {"y": "1"}


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = MessageParser(thinking=True, tools=[WEATHER])
    assert parser.feed("Hm") == [TextDelta("reasoning", "Hm")]
    assert parser.feed(".\n</thi") == [TextDelta("reasoning", ".")]
    assert parser.feed("nk>\n\nHi <") == [TextDelta("content", "Hi")]
    assert parser.feed("3 <tool_call><function=weather>") == [
        TextDelta("content", " <3"),
        CallStart(0, "weather"),
    ]
    assert parser.feed("<parameter=city>Par") == []
    assert parser.feed("is</parameter>") == [CallArguments(0, '{"city": "Paris"')]
    assert parser.feed("<parameter=days>2</parameter>") == [CallArguments(0, ', "days": 2')]
    assert parser.feed("</function></tool_call>") == [CallArguments(0, "}")]
    assert parser.finish() == []


PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "<function=", "</function>",
    "<parameter=a>", "<parameter=", "</parameter>", "<think>", "</think>", "\n", " ", ">", "<", "1",
    "word", "é", "{}",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=14),
    cuts=st.lists(st.integers(0, 120), max_size=12),
    thinking=st.booleans(),
    offered=st.sampled_from([None, [], [tool("f", a={"type": "integer"})]]),
)
def test_cuts_make_no_difference(
    pieces: list[str], cuts: list[int], thinking: bool, offered: Any
) -> None:
    text = "".join(pieces)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser = MessageParser(thinking=thinking, tools=offered)
    deltas = [d for a, b in pairwise(edges) for d in parser.feed(text[a:b])] + parser.finish()
    assert join(deltas) == parse(text, thinking=thinking, tools=offered)


def test_character_by_character() -> None:
    parser = MessageParser(thinking=True, tools=[WEATHER, tool("clock")])
    deltas = [delta for character in WHOLE for delta in parser.feed(character)]
    expected = parse(WHOLE, thinking=True, tools=[WEATHER, tool("clock")])
    assert join(deltas + parser.finish()) == expected


WORDS = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="<\r\x00"), max_size=20
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner | WORDS, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
}
ARGUMENTS = st.fixed_dictionaries({}, optional={
    "text": WORDS,
    "count": st.integers(-(10**20), 10**20),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "list": st.lists(JSON, max_size=3),
    "map": st.dictionaries(WORDS, JSON, max_size=3),
})  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(reasoning=WORDS, content=WORDS, arguments=st.lists(ARGUMENTS, max_size=3))
def test_round_trip_through_the_template(
    reasoning: str, content: str, arguments: list[dict[str, Any]]
) -> None:
    calls = [{"function": {"name": "f", "arguments": a}} for a in arguments]
    reply = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    messages = [USER, reply | ({"tool_calls": calls} if calls else {})]
    tools = [tool("f", TYPED)]
    prompt = TEMPLATE.render([USER], tools)
    text = TEMPLATE.render(messages, tools, add_generation_prompt=False)
    message = parse(
        text.removeprefix(prompt).removesuffix("<|im_end|>\n"), thinking=True, tools=tools
    )
    assert message.reasoning == (reasoning.strip() or None)
    assert message.content == content.strip()
    assert [c.arguments for c in message.tool_calls] == arguments


def test_heldout_conversations() -> None:
    lines = (CHECKPOINT / "heldout" / "chat.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        tools, thinking = record["tools"], record["enable_thinking"]
        for at, message in enumerate(record["messages"]):
            if message["role"] != "assistant":
                continue
            before = record["messages"][:at]
            prompt = TEMPLATE.render(before, tools, enable_thinking=thinking)
            text = TEMPLATE.render([*before, message], tools, add_generation_prompt=False)
            reply = text.removeprefix(prompt).removesuffix("<|im_end|>\n")
            parsed = parse(reply, thinking=thinking, tools=tools)
            assert parsed.content == message["content"]
            assert (parsed.reasoning or "") == message["reasoning_content"]
            expected = [call["function"] for call in message.get("tool_calls", [])]
            assert [{"name": c.name, "arguments": c.arguments} for c in parsed.tool_calls] == (
                expected
            )
