"""Who runs when, who gives way, and what is refused."""

import pytest

from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Phase, Schedule, Sequence
from jaxinfer.qwen.config import CHUNK as PAGE
from tests.engine.scheduling import free_pages, make, pieces, run, sequence, settle


def test_sequences_are_admitted_in_order_of_arrival() -> None:
    scheduler = make(slots=2)
    waiting = [sequence(n) for n in range(1, 6)]
    plans = run(scheduler, *waiting)
    assert [s for plan in plans for s in plan.admitted] == waiting


def test_a_large_sequence_at_the_head_is_not_overtaken() -> None:
    scheduler = make(pages=8)
    first, large, small = sequence(1, 2), sequence(1, 3, 4, 5, 6, 7), sequence(8)
    for new in (first, large, small):
        scheduler.add(new)
    assert scheduler.plan(PAGE, 4).admitted == [first]
    scheduler.end(first)
    assert scheduler.plan(PAGE, 4).admitted == [large]


def test_prompts_are_prefilled_oldest_first_within_the_budget() -> None:
    scheduler = make()
    a, b = sequence(1, 2, 3, rest=7), sequence(4, 5)
    scheduler.add(a)
    scheduler.add(b)
    calls = [scheduler.plan(3 * PAGE, 4) for _ in range(3)]
    assert [[p.sequence for p in plan.pieces] for plan in calls] == [[a, a, a], [a, b, b], [b]]
    assert [[p.last for p in plan.pieces] for plan in calls][1:] == [[True, False, False], [True]]
    assert [(p.start, p.valid) for p in calls[1].pieces] == [(192, 7), (0, 64), (64, 64)]
    assert [plan.decode for plan in calls] == [[], [a], [a, b]]


def test_the_bound_follows_what_is_in_flight() -> None:
    scheduler = make()
    a = sequence(1, answer=20)
    scheduler.add(a)
    scheduler.plan(2 * PAGE, 8)
    assert a.bound == 65 + 1 + 8
    scheduler.plan(PAGE, 8)
    assert a.bound == 65 + 1 + 8 + 8
    scheduler.plan(PAGE, 8)
    assert a.bound == a.limit == 85
    for tokens, bound in ((1, 85), (2, 84), (1, 77), (8, 77)):
        scheduler.commit(a, tokens)
        assert a.bound == bound
    assert (a.length, list(a.flight)) == (77, [])


def test_drafts_have_room_behind_the_limit() -> None:
    scheduler = make()
    a = sequence(1, 2, rest=0, answer=PAGE)
    scheduler.add(a)
    scheduler.plan(2 * PAGE, PAGE, overhang=1)
    assert len(scheduler.table(a)) == 4


def test_a_table_never_grows_beyond_its_width() -> None:
    scheduler = make(width=3)
    a = sequence(1, 2, rest=0, answer=PAGE)
    scheduler.add(a)
    scheduler.plan(2 * PAGE, PAGE, overhang=8)
    assert len(scheduler.table(a)) == 3


def fill(scheduler: Scheduler, *waiting: Sequence) -> None:
    """Run sequences to the point where memory is lacking, with all results read."""
    for new in waiting:
        scheduler.add(new)
    while not scheduler.plan(8 * PAGE, PAGE).victims:
        settle(scheduler)


def test_the_youngest_give_way_and_nothing_changes_until_they_have() -> None:
    scheduler = make(pages=14)
    a, b, c = (sequence(n, n, answer=6 * PAGE) for n in (1, 2, 3))
    fill(scheduler, a, b, c)
    tables = [scheduler.table(s) for s in (a, b, c)]
    plan = scheduler.plan(8 * PAGE, PAGE)
    assert plan == Schedule(victims=[c])
    assert [scheduler.table(s) for s in (a, b, c)] == tables
    assert not any(s.flight for s in (a, b, c))
    scheduler.preempt(c)
    assert c.phase is Phase.SAVED
    plan = scheduler.plan(8 * PAGE, PAGE)
    assert (plan.victims, plan.resumed, plan.decode) == ([], [], [a, b])


def crowd(pages: int, *prompts: int) -> tuple[Scheduler, list[Sequence]]:
    """Running sequences with prompts of three pages and a table of four, all results read."""
    scheduler = make(pages=pages)
    running = [sequence(n, n, n, answer=4 * PAGE) for n in prompts]
    for new in running:
        scheduler.add(new)
        scheduler.plan(8 * PAGE, 1)
        settle(scheduler)
    assert [len(scheduler.table(s)) for s in running] == [4] * len(running)
    return scheduler, running


def test_a_victim_does_not_free_the_pages_that_another_goes_on_using() -> None:
    scheduler, (_, b, c) = crowd(8, 1, 1, 1)
    # Two pages are free; two sequences would need four, and the third has but one of its own.
    assert scheduler.plan(0, 2 * PAGE).victims == [c, b]


def test_victims_free_the_pages_that_only_they_share() -> None:
    scheduler, (_, _, c, d) = crowd(16, 1, 2, 3, 3)
    # Three pages are free; two sequences need six, and the others have five, three of them shared.
    assert scheduler.plan(0, 3 * PAGE).victims == [d, c]


def test_a_page_is_left_for_each_that_runs_before_another_is_admitted() -> None:
    scheduler = make(pages=6)
    a, b, c = (sequence(n, answer=10) for n in (1, 2, 3))
    for new in (a, b, c):
        scheduler.add(new)
    assert scheduler.plan(8 * PAGE, 1).admitted == [a, b]
    scheduler.end(a)
    assert scheduler.plan(8 * PAGE, 1).admitted == [c]


def test_a_preempted_sequence_comes_back_before_those_that_wait() -> None:
    scheduler = make(slots=3, pages=14)
    a, b, c, d = (sequence(n, n, answer=6 * PAGE) for n in (1, 2, 3, 4))
    fill(scheduler, a, b, c)
    scheduler.preempt(c)
    scheduler.add(d)
    assert scheduler.plan(8 * PAGE, PAGE).resumed == []
    scheduler.end(b)
    plan = scheduler.plan(8 * PAGE, PAGE)
    assert (plan.resumed, plan.admitted, plan.decode) == ([c], [], [a, c])
    assert len(scheduler.table(c)) * PAGE >= c.length + PAGE


def test_a_sequence_preempted_in_prefill_starts_again_from_what_is_cached() -> None:
    scheduler = make(interval=PAGE)
    new = sequence(1, 2, 3, 4)
    scheduler.add(new)
    scheduler.plan(2 * PAGE, 4)
    scheduler.preempt(new)
    assert new.phase is Phase.WAITING
    plan = scheduler.plan(8 * PAGE, 4)
    assert (plan.admitted, pieces([plan], new)) == ([new], [2, 3, 4])


def test_the_oldest_sequence_always_goes_on() -> None:
    scheduler = make(slots=4, pages=9)
    waiting = [sequence(n, n, answer=7 * PAGE - 1) for n in range(1, 9)]
    run(scheduler, *waiting)
    assert scheduler.preemptions
    assert [s.phase for s in waiting] == [Phase.ENDED] * 8
    assert free_pages(scheduler) == 9


def cancel_in(phase: Phase, scheduler: Scheduler) -> Sequence:
    new = sequence(1, 2, 3)
    scheduler.add(new)
    if phase is not Phase.WAITING:
        scheduler.plan(PAGE if phase is Phase.PREFILL else 8 * PAGE, 4)
        if phase is Phase.SAVED:
            settle(scheduler)
            scheduler.preempt(new)
    assert new.phase is phase
    scheduler.end(new)
    return new


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.SAVED])
def test_a_cancelled_sequence_leaves_no_trace(phase: Phase) -> None:
    scheduler = make()
    new = cancel_in(phase, scheduler)
    scheduler.end(new)
    scheduler.commit(new, 1)
    assert not scheduler.busy
    assert free_pages(scheduler) == 40
    assert scheduler.plan(8 * PAGE, 4) == Schedule()


def test_a_sequence_that_can_never_fit_is_refused_by_name() -> None:
    scheduler = make(pages=3)
    with pytest.raises(ValueError, match="193 tokens does not fit the 3 pages"):
        scheduler.add(Sequence((1,), 3 * PAGE + 1))
    with pytest.raises(ValueError, match="0 tokens"):
        scheduler.add(Sequence((), 4))
    with pytest.raises(ValueError, match="limit is 2"):
        scheduler.add(Sequence((1, 2), 2))
    new = Sequence((1,), 3 * PAGE)
    scheduler.add(new)
    with pytest.raises(ValueError, match="added or ended before"):
        scheduler.add(new)


def test_results_that_cannot_be_are_refused() -> None:
    scheduler = make()
    new = sequence(1)
    scheduler.add(new)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.commit(new, 1)
    with pytest.raises(ValueError, match="only a running sequence"):
        scheduler.preempt(new)
    scheduler.plan(8 * PAGE, 4)
    with pytest.raises(ValueError, match="2 tokens committed"):
        scheduler.commit(new, 2)
    with pytest.raises(ValueError, match="commit what is in flight"):
        scheduler.preempt(new)


def test_an_interval_off_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="snapshot_interval is 100; give a multiple of 64"):
        make(interval=100)
