"""Answers that conform to what the client has asked for."""

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI

from tests.server.helpers import CAPITAL, QUICK, ask

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "country": {"enum": ["Norway", "Sweden"]},
        "mark": {"const": "</think>"},
    },
    "required": ["city", "country", "mark"],
    "additionalProperties": False,
}
AS_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True},
}


def check(content: str) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(content))


def test_an_answer_without_thoughts_conforms_to_its_schema(client: OpenAI) -> None:
    choice = ask(client, response_format=AS_SCHEMA, extra_body=QUICK).choices[0]
    assert (choice.finish_reason, choice.message.reasoning_content) == ("stop", None)
    check(choice.message.content)


def test_thoughts_are_free_and_the_answer_conforms(client: OpenAI) -> None:
    free = ask(client).choices[0].message
    message = ask(client, response_format=AS_SCHEMA).choices[0].message
    assert message.reasoning_content == free.reasoning_content
    check(message.content)


def test_a_streamed_answer_conforms(client: OpenAI) -> None:
    chunks = list(ask(client, response_format=AS_SCHEMA, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert any(getattr(delta, "reasoning_content", None) for delta in deltas)
    check("".join(delta.content or "" for delta in deltas))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_json_object_is_one(client: OpenAI) -> None:
    form = {"type": "json_object"}
    choice = ask(client, max_tokens=400, response_format=form, extra_body=QUICK).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("asked", "regex"),
    [
        ({"choice": ["Rome\n", "Paris\n"]}, "(Rome|Paris)\n"),
        ({"regex": "[A-Z][a-z]{3}, [0-9]{4}"}, "[A-Z][a-z]{3}, [0-9]{4}"),
        ({"grammar": 'start: "It is " /[A-Z][a-z]{2,8}/ "!"'}, "It is [A-Z][a-z]{2,8}!"),
        ({"json": {"enum": [17, 4]}}, "17|4"),
        ({"json": '{"enum": [17, 4]}'}, "17|4"),
    ],
)
def test_other_constraints(client: OpenAI, asked: dict[str, Any], regex: str) -> None:
    options = QUICK | {"structured_outputs": asked}
    choice = ask(client, CAPITAL, extra_body=options).choices[0]
    assert re.fullmatch(regex, choice.message.content)
    assert choice.finish_reason == "stop"
