import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jaxinfer.engine.grammar import Constraint, GrammarError
from jaxinfer.engine.request import StructuredOutput
from tests.engine.grammar_model import EOS, GRAMMARS, answer, encode, plan, speculate, text_of


def bounds(low: str, high: str, values: st.SearchStrategy[int]) -> st.SearchStrategy[dict]:
    """Either bound, both, or none."""
    pairs = st.tuples(values, values).map(sorted)
    keys = st.sets(st.sampled_from([low, high]))
    return st.tuples(pairs, keys).map(
        lambda drawn: {k: v for k, v in zip((low, high), drawn[0], strict=True) if k in drawn[1]}
    )


def schema_of(kind: str, *parts: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    return st.tuples(*parts).map(lambda ps: {"type": kind} | {k: p[k] for p in ps for k in p})


NAMES = ("a", "b", "full name", "é🙂", "e\u0301", 'q"\\', "</think>", "line\nline", "")
PATTERNS = ("^a{3}$", "^[a-f0-9]{2}(-[a-f0-9]{2})+$", "x|yz", "^é+$", r"^\S+ \S+$")
FORMATS = ("date", "time", "uuid", "ipv4")

small = st.integers(0, 4)
keyword = st.just({})
values = st.recursive(
    st.sampled_from(NAMES)
    | st.text(max_size=4)
    | st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.sampled_from([0.5, -2.25]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    ),
    max_leaves=3,
)
scalars = (
    st.sampled_from(["null", "boolean", "string", "number"]).map(lambda kind: {"type": kind})
    | st.sets(st.sampled_from(["null", "string", "integer", "boolean"]), min_size=1).map(
        lambda kinds: {"type": sorted(kinds)}
    )
    | schema_of("string", bounds("minLength", "maxLength", small))
    | st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p})
    | st.sampled_from(FORMATS).map(lambda f: {"type": "string", "format": f})
    | schema_of("integer", bounds("minimum", "maximum", st.integers(-120, 120)))
    | schema_of("number", bounds("minimum", "maximum", st.integers(-3, 30)))
    | st.integers(2, 30).map(lambda n: {"type": "integer", "multipleOf": n})
    | values.map(lambda value: {"const": value})
    | st.lists(values, min_size=1, max_size=3).map(lambda values: {"enum": values})
)


def compound(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3).flatmap(
        lambda members: st.sets(st.sampled_from(sorted(members) or ["a"])).map(
            lambda required: {"properties": members, "required": sorted(required & {*members})}
        )
    )
    others = (st.booleans() | inner).map(lambda schema: {"additionalProperties": schema})
    items = inner.map(lambda schema: {"items": schema})
    firsts = st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"prefixItems": schemas})
    return (
        schema_of("object", properties, others)
        | schema_of("object", inner.map(lambda schema: {"patternProperties": {"^k": schema}}))
        | schema_of("array", items, bounds("minItems", "maxItems", small))
        | schema_of("array", items, firsts)
        | st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
        | st.just({"$ref": "#/$defs/shared"})
    )


nested = st.recursive(scalars, compound, max_leaves=6)
schemas = st.tuples(nested, scalars).map(lambda pair: pair[0] | {"$defs": {"shared": pair[1]}})


def json_for(schema: dict) -> Constraint:
    return GRAMMARS.compile(StructuredOutput(json_schema=schema))


@settings(max_examples=500, deadline=None)
@given(schema=schemas, seed=st.integers(0, 10**6))
def test_every_answer_conforms_to_its_schema(schema: dict, seed: int) -> None:
    document = json.loads(text_of(answer(json_for(schema), seed)))
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=checker).validate(document)


@settings(max_examples=250, deadline=None)
@given(schema=schemas, seed=st.integers(0, 10**6))
def test_speculation_does_not_change_an_answer(schema: dict, seed: int) -> None:
    tokens = answer(json_for(schema), seed)
    assert speculate(json_for(schema), seed, tokens) == tokens


def test_a_json_object_is_one() -> None:
    constraints = [GRAMMARS.compile(StructuredOutput(json_object=True)) for _ in range(30)]
    documents = [json.loads(text_of(answer(c, seed))) for seed, c in enumerate(constraints)]
    assert {type(document) for document in documents} == {dict}
    assert any(documents)


def test_json_has_no_white_space_unless_the_schema_asks_for_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    loose = schema | {"x-guidance": {"whitespace_flexible": True}}
    text = '{ "a" : 1 }'
    with pytest.raises(GrammarError):
        json_for(schema).advance(encode(text))
    json_for(loose).advance([*encode(text), EOS[0]])


def test_forced_tokens_are_committed_in_groups() -> None:
    schema = {"enum": [{"first key": "some text", "second key": n} for n in range(3)]}
    tokens = answer(json_for(schema), seed=0)
    constraint, at, steps = json_for(schema), 0, 0
    while not constraint.ended:
        verified, _ = plan(constraint, [], rows=8)
        new = [*verified, tokens[at + len(verified)]]
        constraint.advance(new)
        at, steps = at + len(new), steps + 1
    assert at == len(tokens)
    assert steps <= len(tokens) / 5
