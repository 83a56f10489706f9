"""What a prompt has in common with an earlier one is not computed again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from jaxinfer import LLM, Completion, SamplingParams
from tests.engine.conftest import Build
from tests.engine.helpers import SMALL, bits, run

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=True, ignore_eos=True)


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """With an empty cache, and empty again afterwards."""
    tiny_llm.engine.reset()
    yield tiny_llm
    tiny_llm.engine.reset()


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> Completion:
    return llm.generate([prompt], params)[0]


def computed(llm: LLM) -> int:
    return llm.engine.stats().counters.prefilled_tokens


def test_the_second_turn_of_a_chat_skips_the_first(llm: LLM) -> None:
    facts = " ".join(f"Room {n} has {n % 7} chairs." for n in range(30))
    messages = [
        {"role": "system", "content": facts},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    first = llm.chat(messages, GREEDY, enable_thinking=False)
    assert first.usage.cached_tokens == 0
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And of Italy?"},
    ]
    before = computed(llm)
    second = llm.chat(messages, GREEDY, enable_thinking=False)
    system = len(llm.render(messages[:1] + messages[1:2], enable_thinking=False))
    skipped = second.usage.cached_tokens
    assert system - 2 * 64 < skipped < second.usage.prompt_tokens
    assert computed(llm) - before == second.usage.prompt_tokens - skipped
    llm.engine.reset()
    assert bits([llm.chat(messages, GREEDY, enable_thinking=False)]) == bits([second])


def test_a_prefix_is_shared_from_the_third_prompt_on_wherever_it_ends(
    llm: LLM, code: list[int]
) -> None:
    # The first shows nothing of where others will leave it; the second leaves a snapshot there.
    prefix = code[:448]
    prompts = [[*prefix, *code[600 + 70 * n : 670 + 70 * n]] for n in range(4)]
    warm = [answer(llm, prompt) for prompt in prompts]
    assert [c.usage.cached_tokens for c in warm] == [0, 0, 448, 448]
    stats = llm.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (4 * 518, 2 * 448)
    assert computed(llm) >= 4 * 518 - 2 * 448
    llm.engine.reset()
    assert bits([answer(llm, prompts[3])]) == bits([warm[3]])


def test_a_prefix_that_fills_all_whole_pages_is_shared_at_once(llm: LLM, code: list[int]) -> None:
    prompts = [[*code[:448], *code[600 + 50 * n : 640 + 50 * n]] for n in range(2)]
    cold, warm, again = (answer(llm, prompt) for prompt in (*prompts, prompts[0]))
    assert [c.usage.cached_tokens for c in (cold, warm, again)] == [0, 448, 448]
    assert bits([cold]) == bits([again])
    llm.engine.reset()
    assert bits([answer(llm, prompts[1])]) == bits([warm])


def test_prefixes_are_not_shared_across_salts(llm: LLM, code: list[int]) -> None:
    cached = [
        answer(llm, code[:200], replace(GREEDY, cache_salt=salt)).usage.cached_tokens
        for salt in ("", "mine", "", "mine", "yours")
    ]
    assert cached == [0, 0, 192, 192, 0]


def test_a_request_without_the_cache_neither_uses_nor_leaves_anything(
    llm: LLM, code: list[int]
) -> None:
    apart = replace(GREEDY, prefix_cache=False)
    first = answer(llm, code[:200], apart)
    stats = llm.engine.stats()
    assert (stats.cached_pages, stats.held_snapshots) == (0, 0)
    assert stats.free_pages == stats.pages
    assert answer(llm, code[:200]).usage.cached_tokens == 0
    again = answer(llm, code[:200], apart)
    assert again.usage.cached_tokens == 0
    assert bits([again]) == bits([first])


def test_a_budget_of_bytes_bounds_what_is_kept(build: Build, code: list[int]) -> None:
    page, snapshot = (
        getattr(build("tiny_qwen", "mtp", 4, **SMALL).options, name)
        for name in ("page_bytes", "snapshot_bytes")
    )
    budget = 3 * page + snapshot
    # Its calls, and so what is asked for, are those of `test_one_answer`.
    engine = build("tiny_qwen", "mtp", 4, **SMALL, steps=4, cache_bytes=budget)
    params = replace(GREEDY, max_tokens=4, top_logprobs=1)
    for start in range(4):
        run(engine, [engine.submit(code[start : start + 250], params)])
        stats = engine.stats()
        kept = stats.cached_pages * page + stats.held_snapshots * snapshot
        assert 0 < kept <= budget
        assert stats.free_pages + stats.cached_pages == stats.pages
