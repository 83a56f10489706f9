"""One token's result depends on its own sequence alone: not on company, slot or speculation."""

from collections.abc import Sequence

import pytest

from jaxinfer import Completion, SamplingParams
from jaxinfer.engine.engine import Engine
from tests.engine.conftest import Build, Job
from tests.engine.helpers import bits, run


def alone(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    return [run(engine, [engine.submit(*job)])[0] for job in jobs]


def in_company(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """All at once, more than there are slots, among others that come and go at their own times."""
    requests = []
    for number, job in enumerate(jobs):
        if number % 3 == 0:
            engine.submit(job[0][: 7 + number], SamplingParams(max_tokens=4 + number))
        requests.append(engine.submit(*job))
    return run(engine, requests)


@pytest.fixture(scope="session")
def reference(build: Build, jobs: list[Job]) -> list[Completion]:
    """Every job alone, in an engine of one slot that does not speculate."""
    return alone(build("tiny_qwen", None, 0, 1), jobs)


@pytest.mark.parametrize(
    ("speculation", "drafts"), [(None, 0), ("ngram", 3), ("mtp", 1), ("auto", 3)]
)
def test_company_and_speculation_change_no_bit(
    build: Build, jobs: list[Job], reference: list[Completion], speculation: str, drafts: int
) -> None:
    completions = in_company(build("tiny_qwen", speculation, drafts, 4), jobs)
    assert bits(completions) == bits(reference)
    accepted = sum(c.usage.accepted for c in completions)
    drafted = sum(c.usage.drafted for c in completions)
    # Drafts were taken and drafts were refused, else little would have been shown.
    assert 0 < accepted < drafted if speculation else drafted == 0


@pytest.mark.parametrize("slot", [0, 3])
def test_the_slot_changes_no_bit(
    build: Build, jobs: list[Job], reference: list[Completion], slot: int
) -> None:
    engine = build("tiny_qwen", "auto", 3, 4)
    neighbours = [engine.submit([5], SamplingParams(ignore_eos=True)) for _ in range(slot)]
    assert bits(run(engine, [engine.submit(*jobs[3])])) == bits([reference[3]])
    for neighbour in neighbours:
        engine.cancel(neighbour)


def test_nvfp4_keeps_its_bits_up_to_the_end_of_the_context(build: Build, jobs: list[Job]) -> None:
    # The first of these has room for 11 tokens, and for drafts that reach beyond.
    some = [jobs[3], jobs[6]]
    plain = build("tiny_qwen-nvfp4", None, 0, 1, 65 + 11)
    speculating = build("tiny_qwen-nvfp4", "mtp", 3, 4, 65 + 11)
    reference = alone(plain, some)
    assert [len(c.token_ids) for c in reference] == [11, 16]
    assert bits(in_company(speculating, some)) == bits(reference)


def test_a_seed_settles_the_output_and_another_one_changes_it(
    build: Build, code: list[int]
) -> None:
    engine = build("tiny_qwen", "auto", 3, 4)
    seeds = [SamplingParams(max_tokens=16, seed=seed) for seed in (1, 1, 2)]
    first, second, third = run(engine, [engine.submit(code[:9], params) for params in seeds])
    assert first.token_ids == second.token_ids != third.token_ids
