"""One token's result depends on its own sequence alone, whatever the circumstances.

Every job is run alone, in an engine of one slot that neither speculates nor caches. Then all are
run in each of the circumstances below, and tokens, text and the bits of the log probabilities must
be the same.

In company all of them ask for the likeliest tokens, alone (and of the first model) only one does:
so calls that tell of none need not be compiled for every circumstance.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from random import Random

import pytest

from jaxinfer import Completion, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.sequence import Schedule
from tests.engine.conftest import Build, Job
from tests.engine.helpers import ALONE, SMALL, bits, run

pytestmark = pytest.mark.also_gpu
MODELS = ("tiny_qwen", "tiny_qwen-nvfp4")
DRAFTS = 4
OTHERS = SamplingParams(logprobs=True, top_logprobs=1)


@pytest.fixture(scope="module")
def jobs(code: list[int], question: list[int]) -> list[Job]:
    """Prompts around the borders of a page, and all that sampling can do."""
    greedy = SamplingParams(temperature=0, max_tokens=20, logprobs=True, ignore_eos=True)
    sampled = replace(greedy, temperature=1, top_k=20, top_p=0.95)
    return [
        (code[:1], replace(sampled, seed=1)),
        (code[: DRAFTS + 1], replace(sampled, seed=5, frequency_penalty=0.5, top_logprobs=3)),
        (code[:63], greedy),
        (code[:64], replace(sampled, seed=2, repetition_penalty=1.3)),
        (code[:65], replace(greedy, presence_penalty=0.7, bad_words=("self", "return None"))),
        (code[:128], replace(sampled, seed=3, min_p=0.05, logit_bias={13: 2.0, 40: -3.0})),
        (code[:200], replace(greedy, max_tokens=40)),
        (question, replace(greedy, max_tokens=70, ignore_eos=False)),
        (
            question,
            replace(
                sampled, seed=4, temperature=0.6, min_tokens=30, max_tokens=50, ignore_eos=False
            ),
        ),
    ]


def with_likeliest(jobs: Sequence[Job]) -> list[Job]:
    return [(prompt, replace(params, top_logprobs=3)) for prompt, params in jobs]


def together(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    return run(engine, [engine.submit(*job) for job in jobs])


def one_by_one(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    return [run(engine, [engine.submit(*job)])[0] for job in jobs]


def by_sevens(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """Never more at a time than fill the smaller batch."""
    return together(engine, jobs[:7]) + together(engine, jobs[-7:])[7 - len(jobs) :]


def among_others(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """Among more requests than there are slots, which come and go at their own times."""
    requests = []
    for number, job in enumerate(jobs):
        for other in range(5):
            prompt = job[0][: 7 + number + other]
            engine.submit(prompt, replace(OTHERS, max_tokens=4 + 3 * other, seed=other))
        requests.append(engine.submit(*job))
    return run(engine, requests)


def twice(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """The second time with a warm cache."""
    together(engine, jobs)
    before = engine.stats().cached_tokens
    completions = together(engine, jobs)
    assert engine.stats().cached_tokens > before
    assert max(c.usage.cached_tokens for c in completions) == 192
    return completions


def after_eviction(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """Once more after others have used the memory."""
    together(engine, jobs)
    long = [(list(range(100 * n, 100 * n + 300)), replace(OTHERS, max_tokens=2)) for n in range(16)]
    together(engine, long)
    assert engine.stats().evicted_pages > 0
    return together(engine, jobs)


def preempted(engine: Engine, jobs: Sequence[Job]) -> list[Completion]:
    """While memory seems short at every other step, so that everybody has to go now and then."""
    scheduler, random, calls = engine._scheduler, Random(0), count()
    plan = scheduler.plan

    def short(*args: int) -> Schedule:
        running = scheduler.running
        if next(calls) % 4 < 2 and len(running) > 1:
            return Schedule(victims=random.sample(running, len(running) // 2))
        return plan(*args)

    scheduler.plan = short
    completions = together(engine, jobs)
    scheduler.plan = plan
    assert engine.stats().preemptions >= 8
    return completions


Way = Callable[[Engine, Sequence[Job]], list[Completion]]
ONE = {"lengths": (1,), "prefix_cache": False, "steps": 4}
CIRCUMSTANCES: list[tuple[str, str | None, int, dict, Way]] = [
    ("in a batch of 7", None, 0, {"slots": 32, "batches": (7, 32), "steps": 1}, by_sevens),
    ("in a batch of 32", None, 0, {"slots": 32, "batches": (32,), "steps": 4}, among_others),
    ("n-gram drafts", "ngram", 3, {"prefill_budget": 256}, twice),
    ("2 MTP drafts", "mtp", DRAFTS, {"lengths": (2,)}, together),
    ("3 MTP drafts", "mtp", DRAFTS, {"lengths": (3,)}, together),
    ("4 MTP drafts", "mtp", DRAFTS, {"steps": 4}, twice),
    ("either kind of draft", "auto", 2, {"lengths": (1, 2), "steps": 3}, after_eviction),
    ("1 MTP draft and no cache", "mtp", DRAFTS, ONE, among_others),
    ("preempted", "mtp", DRAFTS, {"lengths": (4,), "steps": 4}, preempted),
]
BRIEFLY = ("3 MTP drafts",)
"""What the second model is put through: the rest depends on its format in no other way."""
ON_A_GPU = ("1 MTP draft and no cache", "2 MTP drafts")
"""Left out elsewhere, to save the time of compiling: `either kind of draft` has as many."""


@pytest.fixture(scope="module")
def references(build: Build, jobs: list[Job]) -> Callable[[str], list[Completion]]:
    """What each model answers to each job alone."""

    @cache
    def alone(model: str) -> list[Completion]:
        asked = jobs if model == MODELS[0] else with_likeliest(jobs)
        return one_by_one(build(model, None, 0, **ALONE), asked)

    return alone


@pytest.mark.parametrize(
    ("model", "speculation", "drafts", "options", "way"),
    [
        pytest.param(
            model,
            *rest,
            id=f"{model} {name}".replace(" ", "-"),
            marks=[pytest.mark.gpu] if name in ON_A_GPU else [],
        )
        for model in MODELS
        for name, *rest in CIRCUMSTANCES
        if model == MODELS[0] or name in BRIEFLY
    ],
)
def test_the_answer_is_the_same(
    build: Build,
    jobs: list[Job],
    references: Callable[[str], list[Completion]],
    model: str,
    speculation: str | None,
    drafts: int,
    options: dict,
    way: Way,
) -> None:
    engine = build(model, speculation, drafts, **SMALL | options)
    completions = way(engine, with_likeliest(jobs))
    if model == MODELS[0]:
        completions = [
            c if params.top_logprobs else replace(c, top_logprobs=None)
            for c, (_, params) in zip(completions, jobs, strict=True)
        ]
    assert bits(completions) == bits(references(model))
    counters = engine.stats().counters
    # Drafts were taken and drafts were refused, else little would have been shown.
    assert 0 < counters.accepted < counters.drafted if speculation else counters.drafted == 0
