"""`jaxinfer demo`: one shipped model continues code, thinks and calls tools, the other segments."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.rule import Rule

from checkpoints import SHIPPED
from jaxinfer.commands import segment
from jaxinfer.commands.terminal import CALL, FIGURES, Clock, open_llm, out, show_reply
from jaxinfer.engine import LLM, SamplingParams
from jaxinfer.qwen.messages import Message, MessageParser, ToolCall

CODE = '''\
import threading

class Counter:
    """A counter that threads can share."""

    def __init__(self, start=0):
        self._lock = threading.Lock()
        self._value = start

    def increment(self):
'''
CODE_TOKENS = 44
QUESTION = "Who is older, Alice or Ben?"
REQUEST = "Please check the weather in Oslo and check the stock of the lantern."

SCENE = SHIPPED["tiny_sam"] / "heldout" / "scene.jpg"
"""A drawn scene that the little SAM was not trained on."""
WORDS = ("red ring", "white star", "big circle", "green heart")
"""What is looked for in it; there is no green heart."""

_ROUNDS = 3
"""The most times that the model may call tools before it must have answered."""


def _tool(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": meaning}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("get_weather", "Get the current weather.", "city", "The city"),
    _tool("check_stock", "Price and stock of an item.", "item", "Name of the item"),
]
TABLES: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "Oslo": {"temperature": 7, "sky": "rainy"},
        "Rome": {"temperature": 24, "sky": "sunny"},
    },
    "check_stock": {
        "lantern": {"price": 18, "stock": 12},
        "kite": {"price": 14, "stock": 6},
    },
}
"""What the tools know, by their name and their one argument."""


def run(overlay: Path) -> None:
    """Show all four parts, with figures after each answer; the picture is written to `overlay`."""
    start = time.perf_counter()
    llm = open_llm("tiny_qwen")
    out.print(f"ready after {time.perf_counter() - start:.0f} s", style=FIGURES)
    _continue_code(llm)
    _think(llm)
    _call_tools(llm)
    _segment(overlay)
    out.print()
    out.print(Rule(style="dim"))
    out.print(
        "Next: [bold]jaxinfer chat[/bold], [bold]jaxinfer serve[/bold], "
        "[bold]jaxinfer segment PICTURE WORDS[/bold], [bold]jaxinfer inspect tiny_qwen[/bold]"
    )


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def _title(text: str) -> None:
    out.print()
    out.print(Rule(text, align="left", style="dim"))


def _continue_code(llm: LLM) -> None:
    _title("1. It continues Python")
    out.print(CODE, style="dim", markup=False, end="", soft_wrap=True)
    clock = Clock()
    for chunk in clock.watch(llm.stream(CODE, _greedy(CODE_TOKENS))):
        out.print(chunk.text, markup=False, end="", soft_wrap=True)
    out.print()
    out.print(clock.figures(), style=FIGURES)


def _think(llm: LLM) -> None:
    _title("2. It thinks before it answers")
    _say(QUESTION)
    _reply(llm, [{"role": "user", "content": QUESTION}], [])


def _call_tools(llm: LLM) -> None:
    _title("3. It calls tools")
    _say(REQUEST)
    messages: list[dict[str, Any]] = [{"role": "user", "content": REQUEST}]
    for _ in range(_ROUNDS):
        message = _reply(llm, messages, TOOLS)
        if not message.tool_calls:
            return
        messages.append(_as_dict(message))
        for call in message.tool_calls:
            result = answer(call)
            out.print(f"{call.name} replies {result}", style=CALL, markup=False, soft_wrap=True)
            messages.append({"role": "tool", "content": result})


def _segment(overlay: Path) -> None:
    _title("4. The other model finds what words name in a picture")
    for words in WORDS:
        _say(words)
    start = time.perf_counter()
    segment.run(SCENE, WORDS, (), (), overlay, "tiny_sam")
    out.print(f"loaded, compiled and done in {time.perf_counter() - start:.0f} s", style=FIGURES)


def answer(call: ToolCall) -> str:
    """What a tool replies, as JSON; an error if it knows nothing of what is asked."""
    argument = next(iter(call.arguments.values()), None)
    table = TABLES.get(call.name, {})
    found = table.get(argument) if isinstance(argument, str) else None
    return json.dumps(found or {"error": "not found"})


def _say(text: str) -> None:
    out.print(f"> {text}", style="bold", markup=False)


def _reply(llm: LLM, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message:
    clock = Clock()
    chunks = clock.watch(llm.stream_chat(messages, _greedy(200), tools=tools))
    parser = MessageParser(thinking=True, tools=tools, calls=bool(tools))
    message = show_reply(chunks, parser)
    out.print(clock.figures(), style=FIGURES)
    return message


def _as_dict(message: Message) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning or "",
        "tool_calls": calls,
    }
