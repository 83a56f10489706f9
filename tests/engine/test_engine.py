"""When a request ends, what it leaves behind, and what is refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxinfer import LLM, Completion, RequestError, SamplingParams
from jaxinfer.engine.engine import Engine, Request
from tests.engine.conftest import Build
from tests.engine.helpers import EOS, bits, chunks, run

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=True, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture
def engine(tiny_llm: LLM) -> Engine:
    return tiny_llm.engine


def complete(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Completion:
    return run(engine, [engine.submit(prompt, params)])[0]


@pytest.fixture(scope="module")
def prompts(code: list[int]) -> list[list[int]]:
    """More than there are slots."""
    return [code[20 : 30 + size] for size in range(6)]


@pytest.fixture(scope="module")
def expected(tiny_llm: LLM, prompts: list[list[int]]) -> list[Completion]:
    """What each of them gives alone."""
    return [complete(tiny_llm.engine, prompt, GREEDY) for prompt in prompts]


def test_more_prompts_than_slots_are_all_served_in_order(
    engine: Engine, prompts: list[list[int]], expected: list[Completion]
) -> None:
    together = run(engine, [engine.submit(prompt, GREEDY) for prompt in prompts])
    assert bits(together) == bits(expected)
    assert not engine.busy


def cancelled_while_queued(engine: Engine, code: list[int]) -> Request:
    for size in range(1, 5):
        engine.submit(code[:size], GREEDY)
    victim = engine.submit(code[:70], ENDLESS)
    for _ in range(6):
        assert victim not in dict(engine.step())
    assert engine.stats().waiting == 1
    return victim


def cancelled_in_prefill(engine: Engine, code: list[int]) -> Request:
    victim = engine.submit(code[:150], ENDLESS)
    assert engine.step() == []
    return victim


def cancelled_in_decode(engine: Engine, code: list[int]) -> Request:
    victim = engine.submit(code[:70], ENDLESS)
    for _ in range(8):
        engine.step()
    assert victim.usage.completion_tokens > 4
    return victim


@pytest.mark.parametrize(
    "begin", [cancelled_while_queued, cancelled_in_prefill, cancelled_in_decode]
)
def test_a_cancelled_request_leaves_no_trace(
    engine: Engine,
    code: list[int],
    prompts: list[list[int]],
    expected: list[Completion],
    begin: Callable[[Engine, list[int]], Request],
) -> None:
    victim = begin(engine, code)
    engine.cancel(victim)
    assert victim.ended
    given = chunks(engine, [victim, *(engine.submit(prompt, GREEDY) for prompt in prompts)])
    assert given.pop(victim) == []
    assert bits(map(Completion.join, given.values())) == bits(expected)
    assert not engine.busy


def test_cancelling_twice_or_too_late_is_harmless(engine: Engine, code: list[int]) -> None:
    done = engine.submit(code[:5], GREEDY)
    run(engine, [done])
    neighbour = engine.submit(code[:6], GREEDY)
    engine.step()
    engine.cancel(done)
    engine.cancel(done)
    assert run(engine, [neighbour])[0].finish_reason == "length"


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_call_that_fails_loses_its_requests_but_not_the_engine(
    engine: Engine,
    prompts: list[list[int]],
    expected: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    def fail(params: Any, slots: Any, *args: Any, **static: Any) -> None:
        jax.tree.map(lambda a: a.delete(), slots)
        raise RuntimeError("out of memory")

    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(engine._calls, call, fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(engine, requests)
    assert all(request.ended for request in requests)
    assert not engine.busy
    assert bits([complete(engine, prompts[1], GREEDY)]) == bits([expected[1]])


def test_the_engine_can_be_used_again_after_an_interruption(
    engine: Engine, prompts: list[list[int]], expected: list[Completion]
) -> None:
    request = engine.submit(prompts[0], ENDLESS)
    for _ in range(4):
        engine.step()
    engine.reset()
    assert request.ended
    engine.cancel(request)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
    assert bits([complete(engine, prompts[1], GREEDY)]) == bits([expected[1]])


def test_usage_counts_tokens_and_drafts(engine: Engine, question: list[int]) -> None:
    request = engine.submit(question, GREEDY)
    given = chunks(engine, [request])[request]
    usage, count = Completion.join(given).usage, 0
    for chunk in given:
        count += len(chunk.token_ids)
        assert chunk.usage.completion_tokens == count
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(question), 16)
    assert 0 < usage.accepted <= usage.drafted


def test_log_probabilities_come_only_if_asked_for(
    engine: Engine, prompts: list[list[int]], expected: list[Completion]
) -> None:
    plain = complete(engine, prompts[0], replace(GREEDY, logprobs=False))
    assert plain == replace(expected[0], logprobs=None)
    assert expected[0].logprobs is not None
    assert len(expected[0].logprobs) == len(expected[0].token_ids)
    assert all(logprob <= 0 for logprob in expected[0].logprobs)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens; give at least one"),
        ([1, 2, 4096], "token id 4096 is not in the vocabulary of 4096"),
        ([-1], "token id -1 is not in the vocabulary of 4096"),
        (
            [1] * 2048,
            "the prompt has 2048 tokens and the context holds 2048, one of them for the answer: "
            "shorten the prompt or load the model with a larger context",
        ),
    ],
    ids=["empty", "too large", "negative", "too long"],
)
def test_a_prompt_that_can_never_be_served_is_refused(
    engine: Engine, prompt: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.submit(prompt, GREEDY)
    assert not engine.busy


def test_a_seed_settles_the_output_and_another_one_changes_it(
    engine: Engine, code: list[int]
) -> None:
    seeds = [SamplingParams(max_tokens=16, seed=seed) for seed in (1, 1, 2)]
    first, second, third = run(engine, [engine.submit(code[:9], params) for params in seeds])
    assert first.token_ids == second.token_ids != third.token_ids


def test_without_a_seed_answers_differ(engine: Engine, code: list[int]) -> None:
    params = SamplingParams(max_tokens=16, temperature=2)
    first, second = run(engine, [engine.submit(code[:9], params) for _ in range(2)])
    assert first.token_ids != second.token_ids


def test_ids_that_only_pad_the_logits_are_never_chosen(
    tiny_llm: LLM, build: Build, code: list[int]
) -> None:
    like = build("tiny_qwen", None, 0, 1, 128, prefill_budget=64)
    plan = replace(like.plan, vocabulary=300)
    engine = Engine(like._params, plan, tiny_llm.tokenizer, EOS, like.options)
    params = SamplingParams(max_tokens=12, temperature=3, seed=1, ignore_eos=True)
    completion = complete(engine, code[:9], params)
    assert max(completion.token_ids) < 300
