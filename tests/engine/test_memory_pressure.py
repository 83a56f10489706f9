"""When there is less memory than requests would like, all are served, and nothing leaks."""

import random
from dataclasses import replace

import pytest

from jaxinfer import Completion, SamplingParams
from jaxinfer.engine import Chunk
from jaxinfer.engine.engine import Engine, Request
from jaxinfer.engine.sequence import Phase
from tests.engine.conftest import Build, Job
from tests.engine.helpers import TIGHT, bits, run

GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=True, ignore_eos=True)


@pytest.fixture
def engine(build: Build) -> Engine:
    return build("tiny_qwen", "mtp", 1, **TIGHT)


@pytest.fixture(scope="module")
def jobs(code: list[int]) -> list[Job]:
    """Each begins on one page and ends on two."""
    sampled = replace(GREEDY, temperature=1, top_k=30, presence_penalty=0.3)
    return [
        (code[20 * n : 20 * n + 50 - n], replace(sampled if n % 2 else GREEDY, seed=n))
        for n in range(7)
    ]


@pytest.fixture
def expected(engine: Engine, jobs: list[Job]) -> list[Completion]:
    """What each gives alone."""
    completions = [run(engine, [engine.submit(*job)])[0] for job in jobs]
    assert engine.stats().preemptions == 0
    return completions


def assert_all_free(engine: Engine) -> None:
    """Idle, and every page is free or at the cache's disposal."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, engine.busy) == (0, 0, False)
    assert stats.free_pages + stats.cached_pages == stats.pages
    assert engine._cache is not None
    assert engine._cache.evictable == stats.cached_pages
    assert engine._scheduler._slots.free == stats.slots


def test_those_who_were_preempted_go_on_as_if_nothing_had_been(
    engine: Engine, jobs: list[Job], expected: list[Completion]
) -> None:
    completions = run(engine, [engine.submit(*job) for job in jobs])
    assert engine.stats().preemptions > 0
    assert bits(completions) == bits(expected)
    assert_all_free(engine)


def test_the_oldest_request_is_never_preempted(engine: Engine, jobs: list[Job]) -> None:
    requests = [engine.submit(*job) for job in jobs]
    seen = set()
    while alive := [request for request in requests if not request.ended]:
        oldest = alive[0]
        # It may have had to go while others were older, who have ended since.
        gone = oldest.sequence.phase is Phase.SAVED
        engine.step()
        seen |= {r for r in requests if not r.ended and r.sequence.phase is Phase.SAVED}
        assert gone or oldest.sequence.phase is not Phase.SAVED
    assert seen


def test_a_preempted_request_can_be_cancelled(
    engine: Engine, jobs: list[Job], expected: list[Completion]
) -> None:
    requests = [engine.submit(*job) for job in jobs]
    given: dict[Request, list[Chunk]] = {request: [] for request in requests}
    victim = None
    while engine.busy:
        for request, chunk in engine.step():
            given[request].append(chunk)
        saved = [r for r in requests if r.sequence.phase is Phase.SAVED]
        if saved and victim is None:
            victim = saved[0]
            engine.cancel(victim)
    assert victim is not None
    assert victim.ended
    assert victim.saved is None
    others = [n for n, request in enumerate(requests) if request is not victim]
    completions = [Completion.join(given[requests[n]]) for n in others]
    assert bits(completions) == bits([expected[n] for n in others])
    assert engine.stats().counters.cancelled == 1
    assert_all_free(engine)


def test_requests_that_come_and_go_at_random_leave_everything_free(
    engine: Engine, code: list[int]
) -> None:
    expected = bits(run(engine, [engine.submit(code[:200], GREEDY)]))
    chance = random.Random(0)
    prefixes = [[], [], [], code[:64], code[:150]]
    alive: list[Request] = []
    seen: set[Phase] = set()
    submitted = cancelled = finished = 0
    while submitted < 150 or alive:
        # In crowds that grow together, else none would have to make room.
        for _ in range(chance.randrange(4, 12) if submitted < 150 and len(alive) < 3 else 0):
            start = chance.randrange(500)
            size = chance.choice((1, 28, 32, 36, 40))
            prompt = chance.choice(prefixes) + code[start : start + size]
            params = SamplingParams(
                max_tokens=chance.choice((1, 2, 45, 50, 60)),
                seed=submitted,
                prefix_cache=chance.random() < 0.8,
                speculation=chance.random() < 0.8,
                cache_salt=chance.choice(("", "", "other")),
            )
            alive.append(engine.submit(prompt, params))
            submitted += 1
        brief = [r for r in alive if r.sequence.phase in (Phase.PREFILL, Phase.SAVED)]
        if alive and chance.random() < (0.3 if brief else 0.05):
            victim = chance.choice(brief or alive)
            seen.add(victim.sequence.phase)
            engine.cancel(victim)
            alive.remove(victim)
            cancelled += 1
        for request, chunk in engine.step():
            if chunk.finish_reason:
                alive.remove(request)
                finished += 1
    assert engine.stats().preemptions > 0
    assert {Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.SAVED} <= seen
    counters = engine.stats().counters
    assert (counters.finished - 1, counters.cancelled) == (finished, cancelled)
    assert finished + cancelled == submitted
    assert engine._requests == {}
    assert_all_free(engine)
    assert bits(run(engine, [engine.submit(code[:200], GREEDY)])) == expected
