"""What prompts share: who waits for whose pages, who skips what, and where snapshots are taken."""

from jaxinfer.engine.pool import SCRATCH, Pool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Phase, Sequence
from jaxinfer.qwen.config import CHUNK as PAGE
from tests.engine.scheduling import make, pieces, prompt, run, sequence, snapshots


def test_identical_prompts_at_once_are_prefilled_once() -> None:
    scheduler = make()
    first, *others = [sequence(1, 2, 3) for _ in range(4)]
    plans = run(scheduler, first, *others, budget=1)
    assert pieces(plans, first) == [0, 1, 2, 3]
    assert [pieces(plans, other) for other in others] == [[3], [3], [3]]
    assert scheduler.hit_tokens == 9 * PAGE


def test_sequences_of_one_prefix_share_its_pages_while_they_run() -> None:
    scheduler = make()
    a, b = sequence(1, 2, 3), sequence(1, 2, 3)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.plan(4 * PAGE, 4)
    scheduler.plan(4 * PAGE, 4)
    assert scheduler.table(a)[:3] == scheduler.table(b)[:3]
    assert not set(scheduler.table(a)[3:]) & set(scheduler.table(b)[3:])


def test_who_is_held_back_for_a_prefix_blocks_nobody_behind() -> None:
    scheduler = make()
    first, same, other = sequence(1, 2, 3), sequence(1, 2, 3), sequence(4)
    for new in (first, same, other):
        scheduler.add(new)
    assert scheduler.plan(PAGE, 4).admitted == [first, other]
    assert same.phase is Phase.WAITING


def test_who_is_held_back_runs_when_the_one_before_is_cancelled() -> None:
    scheduler = make()
    first, same = sequence(1, 2, 3), sequence(1, 2, 3)
    scheduler.add(first)
    scheduler.add(same)
    scheduler.plan(PAGE, 4)
    scheduler.end(first)
    assert scheduler.plan(PAGE, 4).admitted == [same]


def test_nobody_is_held_back_for_a_snapshot_that_is_gone() -> None:
    scheduler = make(snapshots=1, interval=PAGE)
    first, second = sequence(1, 2, 3, 4, 5), sequence(1, 6)
    scheduler.add(first)
    for _ in range(3):
        scheduler.plan(PAGE, 4)
    scheduler.add(second)
    assert scheduler.plan(PAGE, 4).admitted == [second]


def test_nobody_is_held_back_where_no_snapshots_are_kept() -> None:
    scheduler = make(snapshots=0)
    same = [sequence(1, 2, 3), sequence(1, 2, 3)]
    for new in same:
        scheduler.add(new)
    assert scheduler.plan(PAGE, 4).admitted == same


def test_nobody_is_held_back_for_one_who_came_later() -> None:
    scheduler = make()
    first, second, third = sequence(1, 2), sequence(1, 2), sequence(1, 2, reuse=False)
    for new in (first, second, third):
        scheduler.add(new)
    assert scheduler.plan(PAGE, 4).admitted == [first, third]
    scheduler.end(first)
    assert scheduler.plan(PAGE, 4).admitted == [second]


def test_the_next_turn_of_a_conversation_skips_the_turns_before() -> None:
    scheduler = make()
    run(scheduler, sequence(1, 2, 3))
    second = sequence(1, 2, 3, 4, 5)
    assert pieces(run(scheduler, second), second) == [3, 4, 5]
    assert second.hit == 3 * PAGE
    third = sequence(1, 2, 3, 4, 5, 6)
    assert pieces(run(scheduler, third), third) == [5, 6]


def test_the_last_token_of_a_prompt_is_never_skipped() -> None:
    scheduler = make(interval=PAGE)
    run(scheduler, sequence(1, 2, rest=0))
    again = sequence(1, 2, rest=0)
    assert pieces(run(scheduler, again), again) == [1]


def test_prompts_under_different_salts_share_nothing() -> None:
    scheduler = make()
    run(scheduler, sequence(1, 2, 3, salt="a"))
    other = sequence(1, 2, 3, salt="b")
    assert pieces(run(scheduler, other), other) == [0, 1, 2, 3]


def test_who_may_not_skip_computes_all_and_still_feeds_the_cache() -> None:
    scheduler = make()
    first, second, third = (sequence(1, 2, reuse=reuse) for reuse in (False, False, True))
    run(scheduler, first)
    assert pieces(run(scheduler, second), second) == [0, 1, 2]
    assert pieces(run(scheduler, third), third) == [2]


def test_who_stays_out_of_the_cache_neither_uses_nor_leaves_anything() -> None:
    scheduler = make()
    assert scheduler.cache
    run(scheduler, sequence(1, 2, cached=False))
    assert scheduler.cache.cached == 0
    run(scheduler, sequence(1, 2))
    again = sequence(1, 2, cached=False)
    assert pieces(run(scheduler, again), again) == [0, 1, 2]


def test_answers_never_enter_the_cache() -> None:
    scheduler = make()
    assert scheduler.cache
    run(scheduler, sequence(1, answer=5 * PAGE))
    assert scheduler.cache.cached == 1


def test_snapshots_are_taken_at_intervals_turns_and_the_end() -> None:
    scheduler = make(interval=4 * PAGE)
    tokens = prompt(*range(1, 11), rest=5)
    new = Sequence(tokens, len(tokens) + 1, boundaries=(2 * PAGE, 7 * PAGE + 63, 3))
    assert snapshots(run(scheduler, new), new) == [2, 4, 7, 8, 10]


def test_the_deepest_snapshots_of_a_call_are_taken_if_entries_are_few() -> None:
    scheduler = make(snapshots=2, interval=PAGE)
    first = sequence(*range(1, 7))
    assert snapshots(run(scheduler, first, budget=9), first) == [5, 6]
    second = sequence(*range(11, 17))
    assert snapshots(run(scheduler, second, budget=3), second) == [2, 3, 5, 6]
    longer = sequence(*range(11, 19))
    plans = run(scheduler, longer)
    assert (pieces(plans, longer), snapshots(plans, longer)) == ([6, 7, 8], [8])


def test_the_deepest_snapshots_of_a_call_are_taken_if_the_budget_is_small() -> None:
    pool = Pool(40, first=1)
    scheduler = Scheduler(4, pool, PrefixCache(pool, Pool(8), 0, 1, budget=2), PAGE)
    first = sequence(*range(1, 7))
    assert snapshots(run(scheduler, first, budget=9), first) == [5, 6]


def test_the_third_prompt_skips_to_where_the_second_left_the_first() -> None:
    scheduler = make()
    first, second, third = sequence(1, 2, 3, 4), sequence(1, 2, 5, 6), sequence(1, 2, 7)
    run(scheduler, first)
    plans = run(scheduler, second)
    assert (pieces(plans, second), snapshots(plans, second)) == ([0, 1, 2, 3, 4], [2, 4])
    assert pieces(run(scheduler, third), third) == [2, 3]


def test_a_page_that_another_sequence_wrote_is_not_written_again() -> None:
    scheduler = make()
    run(scheduler, sequence(1, 2, 3, 4))
    plans = run(scheduler, other := sequence(1, 2, 5))
    written = [p.page for plan in plans for p in plan.pieces if p.sequence is other]
    assert [page == SCRATCH for page in written] == [True, True, False, False]


def test_a_prefix_that_was_found_is_not_evicted_for_the_pages_behind_it() -> None:
    scheduler = make(pages=8)
    run(scheduler, sequence(1, 2))
    run(scheduler, sequence(3, 4, 5))
    # Three pages are free; the rest of this prompt takes them and those of the other.
    new = sequence(1, 2, 6, 7, 8, 9)
    assert pieces(run(scheduler, new), new) == [2, 3, 4, 5, 6]


def test_a_snapshot_stays_until_the_sequence_that_found_it_has_read_it() -> None:
    scheduler = make(slots=2, snapshots=1, interval=PAGE)
    run(scheduler, sequence(1, 2))
    busy, new = sequence(3, 4, 5), sequence(1, 2, 6)
    scheduler.add(busy)
    scheduler.add(new)
    first = scheduler.plan(2 * PAGE, 4)
    assert [p.sequence for p in first.pieces] == [busy, busy]
    assert [p.snapshot for p in first.pieces] == [None, None]
    second = scheduler.plan(8 * PAGE, 4)
    assert next(p.source for p in second.pieces if p.sequence is new) is not None


def test_a_sequence_cancelled_before_its_first_piece_lets_go_of_its_snapshot() -> None:
    scheduler = make(slots=2, snapshots=1)
    run(scheduler, sequence(1, 2))
    new = sequence(1, 2, 3)
    scheduler.add(new)
    scheduler.plan(0, 4)
    assert new.source is not None
    scheduler.end(new)
    after = sequence(4, 5)
    assert snapshots(run(scheduler, after), after) == [2]
