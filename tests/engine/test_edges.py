"""The least and the most that one can ask for, and where exactly an answer ends."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LLM, Completion, SamplingParams
from jaxinfer.engine import Chunk
from jaxinfer.engine.engine import Engine, Request
from jaxinfer.engine.sampling_settings import STOPS
from tests.engine.helpers import EOS, chunks, run
from tests.engine.plain_model import CLOSE, plain_logprobs

DRAFTS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=True, ignore_eos=True)
ENDING = replace(GREEDY, max_tokens=100, ignore_eos=False)


@pytest.fixture
def engine(tiny_llm: LLM) -> Engine:
    return tiny_llm.engine


def complete(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Completion:
    return run(engine, [engine.submit(prompt, params)])[0]


@pytest.mark.parametrize("size", [1, DRAFTS + 1, 63, 64, 65, 128])
def test_a_prompt_of_any_length_is_continued_as_the_plain_model_would(
    engine: Engine, code: list[int], size: int
) -> None:
    completion = complete(engine, code[:size], GREEDY)
    places = plain_logprobs([*code[:size], *completion.token_ids])[size - 1 : -1]
    own = places[np.arange(16), completion.token_ids]
    np.testing.assert_allclose(completion.logprobs or (), own, atol=CLOSE)
    assert np.all(own >= places.max(axis=1) - CLOSE)


@pytest.mark.parametrize("room", [1, 3])
def test_generation_ends_where_the_context_does(engine: Engine, code: list[int], room: int) -> None:
    context = engine.options.context
    completion = complete(engine, code[: context - room], replace(GREEDY, max_tokens=None))
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == room
    assert completion.usage.total_tokens == context


def test_one_token_needs_no_decoding(engine: Engine, code: list[int]) -> None:
    before = engine.stats().counters.decode_calls
    whole = complete(engine, code[:9], replace(GREEDY, max_tokens=4))
    between = engine.stats().counters.decode_calls
    one = complete(engine, code[:9], replace(GREEDY, max_tokens=1))
    assert one.token_ids == whole.token_ids[:1]
    assert (one.finish_reason, one.usage.completion_tokens) == ("length", 1)
    assert engine.stats().counters.decode_calls == between > before


def test_sixty_four_requests_share_four_slots(engine: Engine, code: list[int]) -> None:
    prompts = [code[start : start + 6 + start % 5] for start in range(8)]
    alone = [complete(engine, prompt, replace(GREEDY, max_tokens=8)) for prompt in prompts]
    lengths = (1, 2, 3, 4, 5, 6, 7, 8)
    jobs = [(prompt, replace(GREEDY, max_tokens=n)) for n in lengths for prompt in prompts]
    together = run(engine, [engine.submit(*job) for job in jobs])
    for number, completion in enumerate(together):
        length, whole = lengths[number // 8], alone[number % 8]
        assert completion.token_ids == whole.token_ids[:length]
        assert completion.logprobs == (whole.logprobs or ())[:length]


@pytest.fixture
def accepted(engine: Engine, question: list[int]) -> tuple[Completion, int]:
    """An answer, and an index in it whose token is new and inside what one step added.

    Tokens stand before and after it that came with the same step.
    """
    request = engine.submit(question, replace(GREEDY, max_tokens=60))
    given = chunks(engine, [request])[request]
    whole, start = Completion.join(given), 0
    for chunk in given:
        for index in range(start + 1, start + len(chunk.token_ids) - 1):
            if whole.token_ids[index] not in whole.token_ids[:index] and index > 5:
                return whole, index
        start += len(chunk.token_ids)
    raise AssertionError("no step added three tokens")


def test_max_tokens_may_fall_inside_an_accepted_draft(
    engine: Engine, question: list[int], accepted: tuple[Completion, int]
) -> None:
    whole, index = accepted
    part = complete(engine, question, replace(GREEDY, max_tokens=index + 1))
    assert part.token_ids == whole.token_ids[: index + 1]
    assert part.logprobs == (whole.logprobs or ())[: index + 1]
    assert whole.text.startswith(part.text)
    assert (part.finish_reason, part.usage.completion_tokens) == ("length", index + 1)


def test_a_stop_string_inside_an_accepted_draft_does_not_leak(
    engine: Engine, question: list[int], accepted: tuple[Completion, int], tiny_llm: LLM
) -> None:
    whole, index = accepted
    until = tiny_llm.tokenizer.decode(list(whole.token_ids[: index + 1]))
    stop = next(
        s for size in range(1, 99) if whole.text.find(s := until[-size:]) == len(until) - size
    )
    part = complete(engine, question, replace(GREEDY, stop=(stop,)))
    assert part.text == until.removesuffix(stop) != ""
    assert part.token_ids == whole.token_ids[: index + 1]
    assert (part.finish_reason, part.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("others", [0, STOPS + 3])
def test_a_stop_token_inside_an_accepted_draft_ends_the_answer(
    engine: Engine, question: list[int], accepted: tuple[Completion, int], others: int
) -> None:
    # Those that the device does not know are found by the host.
    whole, index = accepted
    stop = whole.token_ids[index]
    unused = [token for token in range(200, 1000) if token not in whole.token_ids][:others]
    stopping = replace(GREEDY, max_tokens=60, stop_token_ids=(*unused, stop))
    neighbour = replace(GREEDY, max_tokens=60)
    part, beside = run(engine, [engine.submit(question, p) for p in (stopping, neighbour)])
    assert part.token_ids == whole.token_ids[: index + 1]
    assert part.logprobs == (whole.logprobs or ())[: index + 1]
    assert (part.finish_reason, part.stop_reason) == ("stop", stop)
    assert beside.token_ids == whole.token_ids
    assert not engine.busy


def test_the_end_token_ends_the_answer_unless_it_is_ignored(
    engine: Engine, question: list[int]
) -> None:
    short, long = run(
        engine, [engine.submit(question, replace(ENDING, ignore_eos=i)) for i in (False, True)]
    )
    assert (short.finish_reason, short.stop_reason) == ("stop", None)
    assert short.token_ids[-1] in EOS
    assert not set(short.token_ids[:-1]) & {*EOS}
    assert "<|" not in short.text
    assert (long.finish_reason, len(long.token_ids)) == ("length", 100)
    assert long.token_ids[: len(short.token_ids)] == short.token_ids


def test_an_answer_does_not_end_before_min_tokens(engine: Engine, question: list[int]) -> None:
    natural = complete(engine, question, ENDING)
    end = len(natural.token_ids)
    just, longer = (
        complete(engine, question, replace(ENDING, min_tokens=least)) for least in (end, end + 5)
    )
    assert just.token_ids == natural.token_ids
    assert longer.token_ids[: end - 1] == natural.token_ids[:-1]
    assert len(longer.token_ids) >= end + 5
    assert not set(longer.token_ids[: end + 4]) & {*EOS}


def test_a_stop_string_before_min_tokens_is_text(engine: Engine, question: list[int]) -> None:
    natural = complete(engine, question, ENDING)
    letter = natural.text[4]
    stopping = replace(ENDING, stop=(letter,))
    assert letter not in complete(engine, question, stopping).text
    later = complete(engine, question, replace(stopping, min_tokens=10))
    assert later.usage.completion_tokens >= 10
    assert later.token_ids[:10] == natural.token_ids[:10]
    assert later.text.startswith(natural.text[:5])


def test_prompts_that_are_the_same_are_computed_once_and_share_pages(
    engine: Engine, code: list[int]
) -> None:
    engine.reset()
    before = engine.stats().counters.prefilled_tokens
    params = replace(GREEDY, max_tokens=40)
    requests = [engine.submit(code[:320], params) for _ in range(4)]
    answers: dict[Request, list[Chunk]] = {request: [] for request in requests}
    used = set()
    while engine.busy:
        for request, chunk in engine.step():
            answers[request].append(chunk)
        stats = engine.stats()
        if all(answers.values()) and stats.running == 4:
            used.add(stats.pages - stats.free_pages)
    # Five pages are common to all, and the last piece of the prompt is computed by each.
    assert used == {5 + 4}
    assert engine.stats().counters.prefilled_tokens - before == 320 + 3 * 64
    completions = [Completion.join(given) for given in answers.values()]
    assert len({(c.token_ids, c.logprobs) for c in completions}) == 1
    assert [c.usage.cached_tokens for c in completions] == [0, 256, 256, 256]
