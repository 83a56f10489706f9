"""The Python API, used as its users use it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from checkpoints import CheckpointError
from jaxinfer import LLM, Completion, RequestError, SamplingParams
from jaxinfer.engine import llm as module
from jaxinfer.qwen.messages import ToolCall, parse
from tests.engine.helpers import bits

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=True)
PROMPTS = ["def add(a, b):", "import os\n", "class Queue:\n    def __init__(self"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_heating",
            "description": "Set the heating of a room.",
            "parameters": {
                "type": "object",
                "properties": {
                    "zone": {"type": "string", "description": "The room"},
                    "target": {"type": "number", "description": "Degrees Celsius"},
                },
                "required": ["zone", "target"],
            },
        },
    }
]


def said(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_batch_is_answered_in_the_order_of_its_prompts(tiny_llm: LLM) -> None:
    together = tiny_llm.generate(PROMPTS, GREEDY)
    assert together == [tiny_llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert len({completion.text for completion in together}) == len(PROMPTS)


def test_text_and_token_ids_are_the_same_prompt(tiny_llm: LLM) -> None:
    ids = [tiny_llm.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    assert tiny_llm.generate(ids, GREEDY) == tiny_llm.generate(PROMPTS, GREEDY)


def test_each_prompt_may_have_its_own_parameters(tiny_llm: LLM) -> None:
    each = [replace(GREEDY, max_tokens=n, logprobs=n == 5) for n in (3, 5, 7)]
    completions = tiny_llm.generate(PROMPTS, each)
    assert [c.usage.completion_tokens for c in completions] == [3, 5, 7]
    assert [c.logprobs is not None for c in completions] == [False, True, False]


def test_as_many_parameters_as_prompts_are_needed(tiny_llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 prompts but 2 sampling parameters"):
        tiny_llm.generate(PROMPTS, [GREEDY, GREEDY])


def test_no_prompts_no_answers(tiny_llm: LLM) -> None:
    assert tiny_llm.generate([], GREEDY) == []


def test_the_checkpoint_recommends_how_to_sample(tiny_llm: LLM) -> None:
    assert tiny_llm.defaults == SamplingParams(temperature=1.0, top_k=20, top_p=0.95)
    assert tiny_llm.submit("def", None).params == tiny_llm.defaults


def test_one_bad_prompt_is_named_before_any_work_and_none_is_left(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        raise AssertionError("worked")

    monkeypatch.setattr(tiny_llm.engine, "step", work)
    with pytest.raises(RequestError, match=r"^prompt 1: the prompt has no tokens"):
        tiny_llm.generate(["def", "", "import"], GREEDY)
    assert not tiny_llm.engine.busy


def test_a_stream_adds_up_to_what_generate_returns(tiny_llm: LLM) -> None:
    (whole,) = tiny_llm.generate(PROMPTS[0], GREEDY)
    given = list(tiny_llm.stream(PROMPTS[0], GREEDY))
    assert len(given) > 1
    assert [chunk.finish_reason for chunk in given[:-1]] == [None] * (len(given) - 1)
    assert Completion.join(given) == whole


def test_closing_a_stream_cancels_it(tiny_llm: LLM) -> None:
    stream = tiny_llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=None, ignore_eos=True))
    next(stream)
    assert tiny_llm.engine.busy
    stream.close()
    assert not tiny_llm.engine.busy


def test_streams_read_in_turn_and_a_batch_between_lose_nothing(tiny_llm: LLM) -> None:
    expected = tiny_llm.generate(PROMPTS, GREEDY)
    streams = [tiny_llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    given = [[next(stream)] for stream in streams]
    assert tiny_llm.generate(PROMPTS[2], GREEDY)[0].token_ids == expected[2].token_ids
    for chunks, stream, whole in zip(given, streams, expected, strict=False):
        chunks.extend(stream)
        assert Completion.join(chunks).token_ids == whole.token_ids


def test_n_answers_with_a_seed_are_those_of_the_seeds_after_it(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=2**32 - 2, logprobs=True)
    together = tiny_llm.generate(PROMPTS[:2], replace(params, n=3))
    seeds = (2**32 - 2, 2**32 - 1, 0)
    each = [replace(params, seed=seed) for seed in seeds] * 2
    alone = tiny_llm.generate([PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, each)
    assert bits(together) == bits(alone)
    assert len({completion.token_ids for completion in together}) == 6


def test_keys_and_values_of_8_bits_take_half_the_memory_and_say_much_the_same(
    tiny_llm: LLM,
) -> None:
    llm = LLM("tiny_qwen", kv_dtype="fp8", speculation=None, max_batch=1, context=128)
    assert 2 * llm.engine.options.page_bytes == tiny_llm.engine.options.page_bytes
    prompt = tiny_llm.render(said("What is the capital of France?"), enable_thinking=False)
    small, whole = (one.generate([prompt], GREEDY)[0] for one in (llm, tiny_llm))
    assert "Paris" in small.text
    alike = next((i for i in range(24) if small.token_ids[: i + 1] != whole.token_ids[: i + 1]), 24)
    assert alike >= 4
    assert small.logprobs is not None
    assert whole.logprobs is not None
    assert small.logprobs[:alike] != whole.logprobs[:alike]
    assert small.logprobs[:alike] == pytest.approx(whole.logprobs[:alike], abs=0.3)


def test_an_interrupted_batch_leaves_the_engine_idle(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = tiny_llm.engine.step, []

    def interrupted() -> Any:
        seen.append(step())
        if len(seen) == 5:
            raise KeyboardInterrupt
        return seen[-1]

    monkeypatch.setattr(tiny_llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate(PROMPTS * 2, GREEDY)
    assert not tiny_llm.engine.busy


def test_chat_answers_without_thinking(tiny_llm: LLM) -> None:
    reply = tiny_llm.chat(said("What is the capital of France?"), GREEDY, enable_thinking=False)
    assert reply.finish_reason == "stop"
    message = parse(reply.text, thinking=False)
    assert (message.content, message.reasoning) == (reply.text, None)
    assert "Paris" in message.content


def test_chat_thinks_first_if_told_to(tiny_llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=100)
    reply = tiny_llm.chat(said("What is the capital of France?"), params, enable_thinking=True)
    message = parse(reply.text, thinking=True)
    assert message.reasoning
    assert "Paris" in message.content
    assert "</think>" in reply.text


def test_offered_a_tool_the_model_calls_it(tiny_llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=100)
    messages = said("I want you to set the attic to 16.5 degrees.")
    reply = tiny_llm.chat(messages, params, tools=TOOLS, enable_thinking=False)
    assert "<function=set_heating>" in reply.text
    message = parse(reply.text, thinking=False, tools=TOOLS)
    assert message.tool_calls == (ToolCall("set_heating", {"zone": "attic", "target": 16.5}),)


def test_a_streamed_chat_adds_up_to_chat(tiny_llm: LLM) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "enable_thinking": False}
    messages = said("I want you to set the attic to 16.5 degrees.")
    stream = tiny_llm.stream_chat(messages, GREEDY, **options)
    assert Completion.join(list(stream)) == tiny_llm.chat(messages, GREEDY, **options)


def test_without_a_template_there_is_no_chat(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_llm, "template", None)
    with pytest.raises(RequestError, match=re.escape("no chat template; use generate() instead")):
        tiny_llm.chat(said("Hello"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "magic"}, "speculation must be None or one of ('ngram', 'mtp', 'auto')"),
        ({"max_batch": 0}, "max_batch must be from 1 to 64, not 0"),
        ({"max_batch": 65}, "max_batch must be from 1 to 64, not 65"),
        ({"draft_length": 0}, "draft_length must be from 1 to 16, not 0"),
        ({"draft_length": 17}, "draft_length must be from 1 to 16, not 17"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of (None, 'bf16', 'fp8'), not 'int4'"),
        ({"memory_fraction": 0.0}, "memory_fraction must be above 0 and at most 1, not 0.0"),
        ({"prefill_budget": 0}, "prefill_budget must be a multiple of 64, not 0"),
        ({"prefill_budget": 100}, "prefill_budget must be a multiple of 64, not 100"),
        ({"context": 0}, "context must be from 2 to 2048, not 0"),
        ({"context": 1}, "context must be from 2 to 2048, not 1"),
        ({"context": 4096}, "context must be from 2 to 2048, not 4096"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM("tiny_qwen", **options)


def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    with pytest.raises(CheckpointError, match=r"small_qwen is not a directory.*tiny_qwen"):
        LLM("small_qwen")


def test_without_an_mtp_head_auto_falls_back_and_mtp_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = module.load

    def headless(*args: Any, **kwargs: Any) -> Any:
        config, params = load(*args, **kwargs)
        return replace(config, mtp_layers=0), replace(params, mtp=None)

    monkeypatch.setattr(module, "load", headless)
    assert LLM("tiny_qwen", context=64).engine.plan.speculation == "ngram"
    with pytest.raises(ValueError, match="tiny_qwen has no MTP head; use speculation='ngram'"):
        LLM("tiny_qwen", speculation="mtp", context=64)


def test_a_picture_is_refused_and_not_dropped(tiny_llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "cat.png"}]
    with pytest.raises(RequestError, match=r"messages\[0\] holds a part of type 'image'"):
        tiny_llm.render([{"role": "user", "content": parts}])
    text = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert tiny_llm.render(text) == tiny_llm.render([{"role": "user", "content": "Hello"}])
