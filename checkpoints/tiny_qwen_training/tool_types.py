"""What a tool of the dialogues is: its schema, and calls that fit it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

Json = dict[str, Any]


class Use(NamedTuple):
    """One call: an imperative clause that asks for it, arguments, reply and final answer."""

    ask: str
    arguments: Json
    result: Any
    answer: str
    questions: tuple[str, ...] = ()
    follow: str = ""


class Gap(NamedTuple):
    """A request that lacks a required argument, what to ask back, and that argument's name."""

    request: str
    clarify: str
    parameter: str


class Offer(NamedTuple):
    """A tool with this conversation's names; `use` draws a call, `topic` says what it is for."""

    schema: Json
    topic: str
    use: Callable[[], Use]
    gap: Gap | None = None

    @property
    def name(self) -> str:
        """The function's name in this conversation."""
        return self.schema["function"]["name"]


def one(rng: Random, choices: str) -> str:
    """One of the alternatives between bars."""
    return rng.choice(choices.split("|"))


def schema_of(
    name: str, description: str, required: int | None = None, /, **properties: Any
) -> Json:
    """A function's schema; the first `required` properties must be given, by default all.

    A property is `(type, description)` or a whole schema.
    """
    full = {
        key: value if isinstance(value, dict) else {"type": value[0], "description": value[1]}
        for key, value in properties.items()
    }
    parameters = {
        "type": "object",
        "properties": full,
        "required": list(full)[:required],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def text_of(description: str) -> tuple[str, str]:
    """A string property."""
    return "string", description


def array_of(kind: str, description: str) -> Json:
    """A property that is a list of one kind."""
    return {"type": "array", "items": {"type": kind}, "description": description}
