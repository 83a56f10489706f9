"""One token's result depends on its own sequence alone: not on company, slot or speculation."""

import pytest

from jaxinfer import Completion, SamplingParams
from jaxinfer.engine.engine import Engine
from tests.engine.conftest import Build
from tests.engine.helpers import bits, run

Jobs = list[tuple[list[int], SamplingParams]]


def alone(engine: Engine, jobs: Jobs) -> list[Completion]:
    return [run(engine, [engine.submit(*job)])[0] for job in jobs]


def in_company(engine: Engine, jobs: Jobs) -> list[Completion]:
    """All at once, more than there are slots, among others that come and go at their own times."""
    requests = []
    for number, job in enumerate(jobs):
        others, _ = jobs[-number]
        engine.submit(others[: 3 + 5 * number], SamplingParams(max_tokens=2 + number % 7))
        requests.append(engine.submit(*job))
    completions = run(engine, requests)
    engine.reset()
    return completions


@pytest.fixture(scope="session")
def reference(build: Build, jobs: Jobs) -> list[Completion]:
    """Every job alone, in an engine of one slot that does not speculate."""
    return alone(build("tiny_qwen", None, 0, 1), jobs)


@pytest.mark.parametrize(
    ("speculation", "drafts"), [(None, 0), ("ngram", 3), ("mtp", 1), ("auto", 3)]
)
def test_company_and_speculation_change_no_bit(
    build: Build, jobs: Jobs, reference: list[Completion], speculation: str | None, drafts: int
) -> None:
    completions = in_company(build("tiny_qwen", speculation, drafts, 4), jobs)
    assert bits(completions) == bits(reference)
    accepted = sum(c.usage.accepted for c in completions)
    drafted = sum(c.usage.drafted for c in completions)
    # Both kinds of draft were met, else nothing would have been shown.
    assert 0 < accepted < drafted if speculation else drafted == 0


@pytest.mark.parametrize("slot", range(4))
def test_the_slot_changes_no_bit(
    build: Build, jobs: Jobs, reference: list[Completion], slot: int
) -> None:
    engine = build("tiny_qwen", "auto", 3, 4)
    for number in range(slot):
        engine.submit(jobs[number][0], SamplingParams(ignore_eos=True))
    number = 2 * slot + 1
    assert bits(run(engine, [engine.submit(*jobs[number])])) == bits([reference[number]])
    engine.reset()


def test_nvfp4_keeps_its_bits_too(build: Build, jobs: Jobs) -> None:
    some = jobs[-4:]
    reference = alone(build("tiny_qwen-nvfp4", None, 0, 1), some)
    assert bits(in_company(build("tiny_qwen-nvfp4", "mtp", 3, 4), some)) == bits(reference)


def test_a_seed_settles_the_output_and_another_one_changes_it(build: Build, jobs: Jobs) -> None:
    engine = build("tiny_qwen", "auto", 3, 4)
    same, other = (SamplingParams(max_tokens=24, seed=seed) for seed in (1, 2))
    first, second, third = run(engine, [engine.submit(jobs[2][0], p) for p in (same, same, other)])
    assert first.token_ids == second.token_ids != third.token_ids
