"""Requests for JSON: facts as objects, data read out of a sentence, answers to a given schema."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from checkpoints.tiny_qwen_training import world
from checkpoints.tiny_qwen_training.skills import Exchange
from checkpoints.tiny_qwen_training.tool_types import Json, one

_KIND_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
               dict: "object"}  # fmt: skip


def _known(rng: Random) -> tuple[str, Json]:
    """A thing of the world and what is known about it."""
    source = rng.choice((world.PEOPLE, world.ITEMS, world.BOOKS, world.COUNTRIES))
    row = rng.choice(source)
    subject = row[0]
    if source is world.ITEMS:
        subject = f"the {subject}"
    elif source is world.BOOKS:
        subject = f"the book {subject}"
    return subject, row._asdict()


def _told(rng: Random) -> tuple[str, Json]:
    """A sentence full of made-up values, and the values."""
    name, city, word = world.first_name(rng), world.city(rng), world.made_up_word(rng)
    count, price = rng.randrange(2, 90), rng.randrange(3, 400) / 2
    flag = rng.random() < 0.5
    items = list(dict.fromkeys(world.product(rng) for _ in range(rng.randrange(2, 4))))
    no = "" if flag else "not "
    return rng.choice((
        (f"{name} is {count} years old and lives in {city}.",
         {"name": name, "age": count, "city": city}),
        (f"{name} bought {world.listing(items)} for ${price}.",
         {"buyer": name, "items": items, "total": price}),
        (f"The {word} costs ${price} and is {no}in stock.",
         {"product": word, "price": price, "in_stock": flag}),
        (f"{name} from {city} ordered {count} of the {word}.",
         {"customer": {"name": name, "city": city}, "product": word, "quantity": count}),
        (f"The meeting with {name} is on {(day := rng.choice(world.DAYS))} at "
         f"{(time := world.clock_time(rng))} in {city}.",
         {"person": name, "day": day, "time": time, "place": city}),
        (f"Order {(code := world.code(rng))} has {world.listing(items)} and is {no}paid.",
         {"order": code, "items": items, "paid": flag}),
    ))  # fmt: skip


def _computed(rng: Random) -> tuple[str, str, Json]:
    """A small task, what to think, and its result as an object."""
    a, b = rng.randrange(2, 50), rng.randrange(2, 50)
    values = rng.sample(range(1, 100), rng.randrange(3, 6))
    country = rng.choice(world.COUNTRIES)
    return rng.choice((
        (f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", {"result": a + b}),
        (f"Sort {', '.join(map(str, values))}.", f"I start with {min(values)}, the smallest.",
         {"sorted": sorted(values)}),
        (f"Is {a} larger than {b}?", f"I compare {a} and {b}.", {"answer": a > b}),
        (f"What is the capital of {country.name}?", f"This is about {country.name}.",
         {"country": country.name, "capital": country.capital}),
        (f"What are the smallest and the largest of {', '.join(map(str, values))}?",
         "I look for both ends.", {"smallest": min(values), "largest": max(values)}),
    ))  # fmt: skip


def schema_for(value: Any) -> Json:
    """A JSON schema that the value meets, with every key required."""
    kind = {"type": _KIND_NAMES[type(value)]}
    if isinstance(value, list):
        return kind | {"items": schema_for(value[0])}
    if isinstance(value, dict):
        properties = {key: schema_for(item) for key, item in value.items()}
        return kind | {"properties": properties, "required": list(value)}
    return kind


def _demand(rng: Random, answer: Json) -> str:
    """How the user says which JSON is wanted: by its keys or by a schema."""
    if rng.random() < 0.3:
        schema = json.dumps(schema_for(answer))
        return one(
            rng, "Answer with JSON for this schema: {0}|Reply in JSON that matches {0}"
        ).format(schema)
    keys = world.listing(list(answer))
    plural = "keys" if len(answer) > 1 else "key"
    return one(
        rng,
        "Answer in JSON with the {1} {0}.|Reply with a JSON object with the {1} {0}.|"
        "Return JSON with {0}.|Give only JSON with the {1} {0}.|Use JSON with the {1} {0}.",
    ).format(keys, plural)


def json_exchange(rng: Random) -> Exchange:
    """One request; the answer is a valid JSON object and nothing else."""
    kind = rng.randrange(3)
    if kind == 0:
        subject, facts = _known(rng)
        keys = rng.sample(list(facts), rng.randrange(2, min(5, len(facts)) + 1))
        answer = {key: facts[key] for key in keys}
        request = one(rng, "Describe {0}.|Tell me about {0}.|Give me the data of {0}.")
        request, thought = request.format(subject), f"I need {world.listing(keys)} of {subject}."
    elif kind == 1:
        request, answer = _told(rng)
        keys = rng.sample(list(answer), len(answer))
        answer = {key: answer[key] for key in keys}
        request = one(rng, "{0}|Extract the data: {0}|Read this: {0}").format(request)
        thought = f"I take {world.listing(keys)} from the sentence."
    else:
        request, thought, answer = _computed(rng)
    demand = _demand(rng, answer)
    indent = 2 if rng.random() < 0.15 else None
    if indent:
        demand += " Indent it."
    text = json.dumps(answer, ensure_ascii=False, indent=indent)
    user = f"{request} {demand}" if rng.random() < 0.8 else f"{demand} {request}"
    return Exchange(user, thought, text)
