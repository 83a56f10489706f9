"""Answers that must conform: whatever the model would have liked to say, they do."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest

from jaxinfer import LLM, RequestError, SamplingParams, StructuredOutput
from tests.engine.conftest import Build
from tests.engine.helpers import ALONE, bits, run

SCHEMA = {
    "type": "object",
    "properties": {
        "measured_temperature": {"type": "integer", "minimum": -50, "maximum": 50},
        "where": {"enum": ["attic", "cellar", "garden"]},
        "open_windows": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["measured_temperature", "where", "open_windows"],
    "additionalProperties": False,
}
REGEX = r"(The|A) [a-z]{2,5} is \d{1,3}(\.\d)?!"
LARK = r"""
start: sum "=" NUMBER
sum: NUMBER ("+" NUMBER){1,3}
NUMBER: /[1-9][0-9]{0,2}/
"""
CHOICE = ("red", "green", "blue, but darker")
SAMPLED = SamplingParams(max_tokens=120, temperature=1, top_k=40, logprobs=True)


def wanted(**constraint: object) -> StructuredOutput:
    return StructuredOutput(**constraint)  # pyright: ignore[reportArgumentType]


def is_json_of_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def is_an_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def is_a_sum(text: str) -> None:
    assert re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}=[1-9]\d{0,2}", text)


def matches(text: str) -> None:
    assert re.fullmatch(REGEX, text)


def is_a_choice(text: str) -> None:
    assert text in CHOICE


CASES = {
    "schema": (wanted(json_schema=SCHEMA), is_json_of_schema),
    "regex": (wanted(regex=REGEX), matches),
    "lark": (wanted(lark=LARK), is_a_sum),
    "choice": (wanted(choice=CHOICE), is_a_choice),
}
"""Constraints under which every answer comes to an end."""


def all_cases(temperature: float = 1.0) -> list[SamplingParams]:
    params = replace(SAMPLED, temperature=temperature)
    return [
        replace(params, structured=structured, seed=seed)
        for seed, (structured, _) in enumerate(CASES.values())
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_answers_conform(tiny_llm: LLM, code: list[int], temperature: float) -> None:
    completions = tiny_llm.generate([code[:30]] * 4, all_cases(temperature))
    for (_, check), completion in zip(CASES.values(), completions, strict=True):
        assert completion.finish_reason == "stop"
        check(completion.text)


def test_a_json_object_is_one(tiny_llm: LLM, code: list[int]) -> None:
    # A model that likes to close brackets, else an object may go on for ever.
    closing = {tiny_llm.tokenizer.token_to_id(piece): 20.0 for piece in ('"', "}", ",")}
    params = replace(SAMPLED, logit_bias=closing, structured=wanted(json_object=True))
    seeds = [replace(params, seed=seed, max_tokens=200) for seed in range(8)]
    completions = tiny_llm.generate([code[:30]] * 8, seeds)
    ended = [c.text for c in completions if c.finish_reason == "stop"]
    assert len(ended) >= 4
    for text in ended:
        is_an_object(text)


def test_an_answer_cut_by_max_tokens_could_still_conform(tiny_llm: LLM, code: list[int]) -> None:
    whole, cut = tiny_llm.generate(
        [code[:30]] * 2, [replace(all_cases()[0], max_tokens=n) for n in (120, 10)]
    )
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 10)
    assert cut.token_ids == whole.token_ids[:10]
    assert whole.text.startswith(cut.text)


@pytest.mark.parametrize("name", CASES)
def test_after_thoughts_the_answer_conforms(tiny_llm: LLM, name: str) -> None:
    structured, check = CASES[name]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=200, structured=structured)
    reply = tiny_llm.chat(messages, params, enable_thinking=True)
    thoughts, found, text = reply.text.partition("</think>")
    assert thoughts.strip()
    assert found
    assert reply.finish_reason == "stop"
    check(text)
    # Without thoughts the constraint holds from the first token on.
    check(tiny_llm.chat(messages, params, enable_thinking=False).text)


def test_free_requests_beside_constrained_ones_keep_their_bits(
    tiny_llm: LLM, code: list[int]
) -> None:
    free = [SamplingParams(max_tokens=40, seed=s, logprobs=True, ignore_eos=True) for s in (1, 2)]
    prompts = [code[:70], code[70:75]]
    alone = tiny_llm.generate(prompts, free)
    constrained = all_cases()
    mixed = tiny_llm.generate(
        [prompts[0], *[code[:30]] * 4, prompts[1]], [free[0], *constrained, free[1]]
    )
    assert bits([mixed[0], mixed[-1]]) == bits(alone)
    assert bits(mixed[1:-1]) == bits(tiny_llm.generate([code[:30]] * 4, constrained))


def test_a_request_without_drafts_says_the_same(tiny_llm: LLM, code: list[int]) -> None:
    drafting = [*all_cases(), *all_cases(0.0)]
    without = [replace(params, speculation=False) for params in drafting]
    prompts = [code[:30]] * len(drafting)
    assert bits(tiny_llm.generate(prompts, without)) == bits(tiny_llm.generate(prompts, drafting))


def test_an_engine_that_never_drafts_takes_fewer_steps_than_tokens(
    build: Build, code: list[int]
) -> None:
    plain = build("tiny_qwen", None, 0, **ALONE)
    (answer,) = run(plain, [plain.submit(code[:30], all_cases()[0])])
    # Names and punctuation of the schema leave no choice.
    assert plain.stats().counters.decode_steps < 0.7 * answer.usage.completion_tokens
    assert answer.usage.accepted > 0


def test_a_bad_grammar_is_refused_and_nothing_is_lost(tiny_llm: LLM, code: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=True, ignore_eos=True)
    (expected,) = tiny_llm.generate([code[:9]], params)
    engine = tiny_llm.engine
    running = engine.submit(code[:9], params)
    engine.step()
    for bad in (
        wanted(json_schema={"type": "nonsense"}),
        wanted(json_schema="{"),
        wanted(regex="("),
        wanted(lark="start: missing"),
        wanted(regex="a", after="<nowhere>"),
    ):
        with pytest.raises(RequestError, match="structured output cannot"):
            engine.submit(code[:9], SamplingParams(structured=bad))
    assert bits(run(engine, [running])) == bits([expected])
    assert not engine.busy
