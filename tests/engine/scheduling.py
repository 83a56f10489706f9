"""A scheduler driven by hand, without a device."""

from jaxinfer.engine.pool import Pool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Phase, Schedule, Sequence
from jaxinfer.qwen.config import CHUNK as PAGE


def prompt(*pages: int, rest: int = 1) -> tuple[int, ...]:
    """A prompt with one number a page, and a few tokens more."""
    return (*(number for number in pages for _ in range(PAGE)), *([0] * rest))


def sequence(*pages: int, rest: int = 1, answer: int = 16, **fields) -> Sequence:
    tokens = prompt(*pages, rest=rest)
    return Sequence(tokens, len(tokens) + answer, **fields)


def make(
    slots: int = 4, pages: int = 40, snapshots: int = 8, interval: int = 512, **fields
) -> Scheduler:
    pool = Pool(pages, first=1)
    return Scheduler(slots, pool, PrefixCache(pool, Pool(snapshots)), interval, **fields)


def free_pages(scheduler: Scheduler) -> int:
    """Pages that nobody has once the cache is emptied."""
    assert scheduler.cache
    scheduler.cache.clear()
    return scheduler.cache.pages.free


def settle(scheduler: Scheduler) -> None:
    """Read all that is in flight, with as many tokens as there can be, and end who is done."""
    for s in [s for s in scheduler.running if s.phase is Phase.DECODE]:
        while s.flight:
            scheduler.commit(s, min(s.flight[0], s.limit - s.length))
        if s.length == s.limit:
            scheduler.end(s)


def run(scheduler: Scheduler, *sequences: Sequence, budget: int = 4) -> list[Schedule]:
    """Add sequences and run them, and all that were there, to their ends."""
    for new in sequences:
        scheduler.add(new)
    plans = []
    while scheduler.busy:
        plans.append(plan := scheduler.plan(budget * PAGE, 4))
        settle(scheduler)
        for victim in plan.victims:
            scheduler.preempt(victim)
    return plans


def pieces(plans: list[Schedule], of: Sequence) -> list[int]:
    """The page numbers, counted in the prompt, that were prefilled for a sequence."""
    return [p.start // PAGE for plan in plans for p in plan.pieces if p.sequence is of]


def snapshots(plans: list[Schedule], of: Sequence) -> list[int]:
    """After how many pages of a sequence a snapshot was taken."""
    found = [p for plan in plans for p in plan.pieces if p.sequence is of]
    return [p.start // PAGE + 1 for p in found if p.snapshot is not None]
