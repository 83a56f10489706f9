"""What a request may ask for, when it ends, and what it leaves behind."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxinfer import LLM, Completion, RequestError, SamplingParams
from jaxinfer.engine import engine as module
from jaxinfer.engine.engine import Engine, Request
from jaxinfer.engine.steps import Slots, init_slots
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


def test_a_step_that_fails_loses_its_requests_but_not_the_engine(
    engine: Engine,
    prompts: list[list[int]],
    expected: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(params: Any, plan: Any, slots: Any) -> None:
        jax.tree.map(lambda a: a.delete(), slots)
        raise RuntimeError("out of memory")

    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(module, "decode_step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(engine, requests)
    assert all(request.ended for request in requests)
    assert not engine.busy
    assert bits([complete(engine, prompts[1], GREEDY)]) == bits([expected[1]])


def test_one_token_is_the_least_one_can_ask_for(
    engine: Engine, prompts: list[list[int]], expected: list[Completion]
) -> None:
    one = complete(engine, prompts[0], replace(GREEDY, max_tokens=1))
    assert one.token_ids == expected[0].token_ids[:1]
    assert (one.finish_reason, one.usage.completion_tokens) == ("length", 1)


@pytest.fixture
def accepted(engine: Engine, question: list[int]) -> tuple[Completion, int]:
    """An answer, and how many of its tokens were there before a step that added three or more."""
    request = engine.submit(question, replace(GREEDY, max_tokens=48))
    given = chunks(engine, [request])[request]
    step = next(i for i, chunk in enumerate(given) if i > 3 and len(chunk.token_ids) >= 3)
    return Completion.join(given), sum(len(chunk.token_ids) for chunk in given[:step])


def test_max_tokens_may_fall_inside_an_accepted_draft(
    engine: Engine, question: list[int], accepted: tuple[Completion, int]
) -> None:
    whole, before = accepted
    part = complete(engine, question, replace(GREEDY, max_tokens=before + 2))
    assert part.token_ids == whole.token_ids[: before + 2]
    assert part.logprobs == (whole.logprobs or ())[: before + 2]
    assert whole.text.startswith(part.text)
    assert (part.finish_reason, part.usage.completion_tokens) == ("length", before + 2)


def test_a_stop_string_inside_an_accepted_draft_does_not_leak(
    engine: Engine, question: list[int], accepted: tuple[Completion, int], tiny_llm: LLM
) -> None:
    whole, before = accepted
    until = tiny_llm.tokenizer.decode(list(whole.token_ids[: before + 2]))
    stop = next(
        s for size in range(1, 99) if whole.text.find(s := until[-size:]) == len(until) - size
    )
    part = complete(engine, question, replace(GREEDY, stop=(stop,)))
    assert part.text == until.removesuffix(stop) != ""
    assert part.token_ids == whole.token_ids[: before + 2]
    assert part.finish_reason == "stop"


def test_the_end_token_ends_the_answer_unless_it_is_ignored(
    engine: Engine, question: list[int]
) -> None:
    ending = replace(GREEDY, max_tokens=100, ignore_eos=False)
    short, long = run(
        engine, [engine.submit(question, replace(ending, ignore_eos=i)) for i in (False, True)]
    )
    assert short.finish_reason == "stop"
    assert short.token_ids[-1] in EOS
    assert not set(short.token_ids[:-1]) & {*EOS}
    assert "<|" not in short.text
    assert (long.finish_reason, len(long.token_ids)) == ("length", 100)
    assert long.token_ids[: len(short.token_ids)] == short.token_ids


def test_a_stop_token_of_ones_own_ends_the_answer(engine: Engine, question: list[int]) -> None:
    whole = complete(engine, question, GREEDY)
    stop = whole.token_ids[12]
    first = whole.token_ids.index(stop)
    part = complete(engine, question, replace(GREEDY, stop_token_ids=(stop,)))
    assert part.token_ids == whole.token_ids[: first + 1]
    assert part.finish_reason == "stop"


@pytest.mark.parametrize("room", [1, 3])
def test_generation_ends_where_the_context_does(build: Build, code: list[int], room: int) -> None:
    engine = build("tiny_qwen-nvfp4", "mtp", 3, 4, 76)
    completion = complete(engine, code[: 76 - room], ENDLESS)
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == room
    assert completion.usage.total_tokens == 76


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


@pytest.mark.parametrize(
    ("speculation", "drafts"), [(None, 0), ("ngram", 3), ("mtp", 1), ("auto", 3)]
)
def test_steps_return_slots_of_the_type_they_took(
    build: Build, code: list[int], speculation: str | None, drafts: int
) -> None:
    # Else every step would be compiled twice.
    engine = build("tiny_qwen", speculation, drafts, 4)
    complete(engine, code[:5], replace(GREEDY, max_tokens=4))
    new = init_slots(engine.plan, 4, engine.context)
    assert jax.tree.map(jax.typeof, engine._slots) == jax.tree.map(jax.typeof, new)
    assert weak_types(engine._slots) == weak_types(new)


def weak_types(slots: Slots) -> list[bool]:
    return [a.weak_type for a in jax.tree.leaves(slots)]


def test_ids_that_only_pad_the_logits_are_never_chosen(
    tiny_llm: LLM, build: Build, code: list[int]
) -> None:
    like = build("tiny_qwen", "mtp", 1, 4)
    plan = replace(like.plan, vocabulary=300)
    engine = Engine(like._params, plan, tiny_llm.tokenizer, EOS, 4, like.context)
    completion = complete(engine, code[:9], SamplingParams(max_tokens=12, temperature=3, seed=1))
    assert max(completion.token_ids) < 300
