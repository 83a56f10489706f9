import json
import re
from types import MappingProxyType
from typing import Any

import pytest

from jaxinfer.engine import Chunk, Completion, SamplingParams, Usage
from jaxinfer.engine.request import TOP_LOGPROBS, StructuredOutput

NAN, INF = float("nan"), float("inf")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("field", "range_", "bad"),
    [
        ("max_tokens", "at least 1", [0]),
        ("min_tokens", "at least 0", [-1]),
        ("n", "from 1 to 128", [0, 129]),
        ("temperature", "from 0 to 100", [-0.1, 101, NAN, INF]),
        ("top_k", "at least 0", [-1]),
        ("top_p", "above 0 and at most 1", [0.0, 1.5, NAN]),
        ("min_p", "from 0 to 1", [-0.1, 1.1, NAN]),
        ("presence_penalty", "from -2 to 2", [-2.1, 2.1, NAN]),
        ("frequency_penalty", "from -2 to 2", [-2.1, 2.1, NAN]),
        ("repetition_penalty", "above 0 and at most 10", [0.0, 10.5, NAN]),
        ("logit_bias", "from -100 to 100", [{3: 101.0}, {3: 0.0, 4: -101.0}, {3: NAN}]),
        ("bad_words", "strings that are not empty", ["", ("a", "")]),
        ("allowed_token_ids", "None, or at least one id", [(), []]),
        ("seed", "from 0 to 2**32 - 1", [-1, 2**32]),
        ("stop", "strings that are not empty", ["", ("a", "")]),
        ("top_logprobs", f"from 0 to {TOP_LOGPROBS}", [-1, TOP_LOGPROBS + 1]),
        ("prompt_logprobs", f"None, or from 0 to {TOP_LOGPROBS}", [-1, TOP_LOGPROBS + 1]),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(
    field: str, range_: str, bad: list[Any]
) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=re.escape(f"{field} must be {range_}, not ")):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "ends",
    [
        {"max_tokens": 1, "min_tokens": 1, "n": 1, "temperature": 0, "top_p": 1, "min_p": 0},
        {"n": 128, "temperature": 100, "top_p": 1e-6, "min_p": 1, "seed": 2**32 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 10, "seed": 0},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1e-3},
        {"logit_bias": {0: -100, 1: 100}, "allowed_token_ids": (0,)},
        {"logprobs": True, "top_logprobs": TOP_LOGPROBS, "prompt_logprobs": 0},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(ends: dict[str, Any]) -> None:
    params = SamplingParams(**ends)
    assert {name: getattr(params, name) for name in ends} == ends | {
        name: tuple(value.items()) for name, value in ends.items() if isinstance(value, dict)
    }


def test_parameters_that_contradict_each_other_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="top_logprobs needs logprobs=True"):
        SamplingParams(top_logprobs=1)
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, not 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="ignore_eos cannot go with structured output"):
        SamplingParams(ignore_eos=True, structured=StructuredOutput(json_object=True))


def test_one_string_may_be_given_bare_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="end", bad_words="bad") == SamplingParams(
        stop=("end",), bad_words=("bad",)
    )
    assert SamplingParams(
        stop=["a", "b"], stop_token_ids=[1, 2], bad_words=["c"], allowed_token_ids=[3, 4]
    ) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(1, 2), bad_words=("c",), allowed_token_ids=(3, 4)
    )


@pytest.mark.parametrize("bias", [{7: 1.5, 8: -2.0}, [[7, 1.5], [8, -2.0]]])
def test_biases_in_any_form_become_pairs_that_hash(bias: Any) -> None:
    params = SamplingParams(logit_bias=bias)
    same = SamplingParams(logit_bias=((7, 1.5), (8, -2.0)))
    assert (params, hash(params)) == (same, hash(same))


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": json.dumps(SCHEMA)},
        {"json_object": True},
        {"regex": "[a-z]+"},
        {"lark": 'start: "a"'},
        {"choice": ("yes", "no")},
    ],
)
def test_any_one_constraint_is_taken_and_no_second_one(constraint: dict[str, Any]) -> None:
    taken = StructuredOutput(**constraint, after="</think>")
    (name,) = constraint
    assert getattr(taken, name) == constraint[name]
    other = {"regex": "a"} if name != "regex" else {"choice": ("a",)}
    with pytest.raises(ValueError, match=f"exactly one of .*; .*{name}.* given"):
        StructuredOutput(**constraint, **other)


@pytest.mark.parametrize("nothing", [{}, {"after": "</think>"}, {"choice": ()}])
def test_structured_output_without_a_constraint_is_refused(nothing: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one of .*; none given"):
        StructuredOutput(**nothing)


@pytest.mark.parametrize("schema", [SCHEMA, MappingProxyType(SCHEMA)])
def test_a_schema_given_as_a_mapping_becomes_text_that_hashes(schema: Any) -> None:
    output = StructuredOutput(json_schema=schema)
    assert isinstance(output.json_schema, str)
    assert json.loads(output.json_schema) == SCHEMA
    params = SamplingParams(structured=output)
    assert hash(params) == hash(SamplingParams(structured=StructuredOutput(json_schema=SCHEMA)))


def test_one_choice_given_bare_is_not_taken_for_its_letters() -> None:
    assert StructuredOutput(choice="yes").choice == ("yes",)
    assert StructuredOutput(choice=["yes", "no"]).choice == ("yes", "no")


def test_usage_adds_up() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=7, drafted=8, accepted=2)
    assert usage.total_tokens == 12
    assert usage.acceptance == 0.25
    assert Usage().acceptance == 0.0


def chunk(
    text: str, tokens: tuple[int, ...], reason: str | None, logprobs: tuple[float, ...] | None
) -> Chunk:
    return Chunk(text, tokens, logprobs, reason, Usage(1, len(tokens)))


def test_chunks_join_to_a_completion() -> None:
    chunks = [
        chunk("He", (1,), None, (-0.5,)),
        chunk("", (), None, ()),
        chunk("llo", (2, 3), "stop", (-0.25, -1.0)),
    ]
    joined = Completion.join(chunks)
    assert joined == Completion("Hello", (1, 2, 3), (-0.5, -0.25, -1.0), "stop", Usage(1, 2))


def test_chunks_join_with_all_that_was_asked_for() -> None:
    first = Chunk(
        *("He", (1,), (-0.5,), None, Usage(2, completion_tokens=1)),
        top_logprobs=(((1, -0.5), (9, -1.5)),),
        prompt_logprobs=(None, -2.0),
        prompt_top_logprobs=(None, ((4, -2.0),)),
    )
    last = Chunk(
        *("y", (2,), (-0.25,), "stop", Usage(2, completion_tokens=2)),
        top_logprobs=(((2, -0.25), (8, -3.0)),),
        stop_reason="!",
    )
    assert Completion.join([first, last]) == Completion(
        *("Hey", (1, 2), (-0.5, -0.25), "stop", Usage(2, completion_tokens=2)),
        top_logprobs=(((1, -0.5), (9, -1.5)), ((2, -0.25), (8, -3.0))),
        prompt_logprobs=(None, -2.0),
        prompt_top_logprobs=(None, ((4, -2.0),)),
        stop_reason="!",
    )


def test_without_logprobs_a_completion_has_none() -> None:
    assert Completion.join([chunk("a", (1,), "length", None)]).logprobs is None


def test_a_stream_that_has_not_finished_does_not_join() -> None:
    with pytest.raises(ValueError, match="has not finished"):
        Completion.join([chunk("a", (1,), None, None)])
