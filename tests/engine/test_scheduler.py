from collections import Counter, deque
from random import Random

import pytest

from jaxinfer.engine.pool import SCRATCH, Pool
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


class Device:
    """Does what plans say, with each page and state remembering what it stands for.

    A call runs when it is dispatched; its results are read later, oldest first. All that a real
    device would read is checked before it is read.
    """

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self.scheduler, self.random = scheduler, random
        self.rows: dict[
            int, object
        ] = {}  # of a page: all tokens up to its end, or its owner's name
        self.snapshots: dict[int, int] = {}
        self.states: dict[int, int] = {}
        self.lengths: dict[Sequence, int] = {}
        self.saved: dict[Sequence, tuple[int, int]] = {}
        self.unread: deque[list[tuple[Sequence, int]]] = deque()
        self.prefixes: dict[tuple[str, tuple[int, ...]], int] = {}
        self.seen: Counter[str] = Counter()

    def prefix(self, sequence: Sequence, length: int) -> int:
        """A number that stands for the first tokens of a prompt, under its salt."""
        salt = sequence.salt if sequence.cached else f"alone {sequence.number}"
        key = (salt, sequence.prompt[:length])
        return self.prefixes.setdefault(key, len(self.prefixes))

    def row(self, sequence: Sequence, page: int) -> object:
        """What a page of a sequence must hold, its prompt done."""
        if (page + 1) * PAGE <= len(sequence.prompt):
            return self.prefix(sequence, (page + 1) * PAGE)
        return (sequence.number, page)

    def turn(self, budget: int, reach: int, overhang: int, read: int = 1) -> Schedule:
        """Schedule and dispatch; then read all but the newest `read` calls, as an engine does."""
        plan = self.scheduler.plan(budget, reach, overhang)
        if plan.victims:
            assert plan == Schedule(victims=plan.victims)
            self.read(0)
            plan = self.scheduler.plan(budget, reach, overhang)
            for victim in plan.victims:
                self.preempt(victim)
            if plan.victims:
                plan = self.scheduler.plan(budget, reach, overhang)
            assert not plan.victims
        self.dispatch(plan, reach, overhang)
        self.check()
        self.read(read)
        return plan

    def preempt(self, sequence: Sequence) -> None:
        self.seen[f"preempted in {sequence.phase.name}"] += 1
        if sequence.phase is Phase.DECODE:
            assert sequence.slot is not None
            assert sequence.length == self.lengths[sequence]
            self.saved[sequence] = self.states[sequence.slot], sequence.length
        self.scheduler.preempt(sequence)

    def dispatch(self, plan: Schedule, reach: int, overhang: int) -> None:
        self.restore(plan)
        self.prefill(plan)
        self.decode(plan, reach, overhang)

    def restore(self, plan: Schedule) -> None:
        for sequence in plan.resumed:
            assert sequence.slot is not None
            self.states[sequence.slot], length = self.saved.pop(sequence)
            assert length == self.lengths[sequence]
            for index, page in enumerate(sequence.pages[: -(-length // PAGE)]):
                self.rows[page] = self.row(sequence, index)
        for sequence in plan.admitted:
            assert sequence.slot is not None
            self.states[sequence.slot] = self.prefix(sequence, 0)

    def prefill(self, plan: Schedule) -> None:
        written = [p.snapshot for p in plan.pieces if p.snapshot is not None]
        assert len(written) == len(set(written))
        assert not set(written) & {p.source for p in plan.pieces}
        for piece in plan.pieces:
            who, end = piece.sequence, piece.start + piece.valid
            assert who.slot is not None
            assert piece.last == (end == len(who.prompt))
            assert piece.start % PAGE == 0
            assert piece.valid == min(PAGE, len(who.prompt) - piece.start)
            if piece.source is not None:
                assert piece.start == who.hit > 0
                self.states[who.slot] = self.snapshots[piece.source]
                self.seen["hit"] += 1
            assert self.states[who.slot] == self.prefix(who, piece.start)
            index = piece.start // PAGE
            assert piece.page in (who.pages[index], SCRATCH)
            self.rows[piece.page] = (
                self.prefix(who, end) if piece.valid == PAGE else (who.number, index)
            )
            for place, page in enumerate(who.pages[: index + 1]):
                assert self.rows[page] == self.row(who, place)
            self.states[who.slot] = self.prefix(who, end)
            if piece.snapshot is not None:
                self.snapshots[piece.snapshot] = self.prefix(who, end)
        for piece in plan.pieces:
            if piece.last:
                self.lengths[piece.sequence] = len(piece.sequence.prompt) + 1
        self.unread.append([(p.sequence, 1) for p in plan.pieces if p.last])

    def decode(self, plan: Schedule, reach: int, overhang: int) -> None:
        results = []
        for who in plan.decode:
            assert who.slot is not None
            old = self.lengths[who]
            tokens = min(self.random.randint(0, reach), who.limit - old)
            assert old + tokens <= who.bound
            # What was asked for is the most the call could have needed, not what it happened to.
            needed = min(who.limit, old + reach) + overhang
            width = self.scheduler._width
            assert len(who.pages) >= min(width, -(-needed // PAGE))
            assert self.states[who.slot] == self.prefix(who, len(who.prompt))
            for index, page in enumerate(who.pages):
                if index * PAGE < old - 1:
                    assert self.rows[page] == self.row(who, index)
                if (index + 1) * PAGE > old - 1:
                    assert index >= len(who.nodes)
                    self.rows[page] = (who.number, index)
            self.lengths[who] = old + tokens
            results.append((who, tokens))
        self.unread.append(results)

    def read(self, newest: int) -> None:
        """Read results until those of the `newest` last calls are left."""
        while len(self.unread) > 2 * newest:
            for who, tokens in self.unread.popleft():
                self.scheduler.commit(who, tokens)
                over = who.length == who.limit or self.random.random() < 0.02
                if who.phase is Phase.DECODE and over:
                    self.scheduler.end(who)
                    self.seen["finished"] += 1

    def check(self) -> None:
        """Each page has one owner: the free list, the cache or one sequence."""
        scheduler, pages = self.scheduler, self.scheduler._pages
        own = [p for s in scheduler.running for p in s.pages[len(s.nodes) :]]
        used = {n for s in scheduler.running for n in s.nodes}
        shared = [n.page for n in used]
        for s in scheduler.running:
            assert s.pages[: len(s.nodes)] == [n.page for n in s.nodes]
        assert len(set(own + shared)) == len(own + shared)
        assert SCRATCH not in own + shared
        cache, evictable = scheduler.cache, 0
        if cache:
            evictable = cache.evictable
            sources = Counter(s.source for s in scheduler.running if s.source)
            assert sources == Counter({node: node.pins for node in cache._held if node.pins})
        assert len(own) + len(shared) + evictable + pages.free == pages.size
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots)


def random_sequence(random: Random, most: int, earlier: list[Sequence]) -> Sequence:
    """Of few distinct pages, so that prompts share; often a longer or shorter form of another."""
    if earlier and random.random() < 0.4:
        known = random.choice(earlier).prompt
        tokens = known[: random.randint(1, len(known))]
    else:
        tokens = prompt(*(random.randint(1, 2) for _ in range(random.randint(0, 4))), rest=0)
    tokens = (*tokens, *([random.randint(1, 3)] * random.randint(0, 2 * PAGE)))[: most - 1] or (1,)
    return Sequence(
        tokens,
        min(most, len(tokens) + random.randint(1, 250)),
        salt=random.choice(("", "", "", "salt")),
        cached=random.random() < 0.9,
        reuse=random.random() < 0.9,
        boundaries=tuple(random.randint(0, len(tokens)) for _ in range(random.randint(0, 2))),
    )


def run_at_random(seed: int) -> Counter[str]:
    """A thousand requests through a small pool.

    Returns:
        How often which thing happened.
    """
    random = Random(seed)
    width = random.randint(6, 9)
    pages = Pool(random.randint(width, 3 * width), first=1)
    snapshots = Pool(random.choice((0, 3, 6, 6)))
    cache = PrefixCache(pages, snapshots, 1, 3, random.choice((None, None, 9, 30)))
    scheduler = Scheduler(
        random.randint(2, 6), pages, cache if seed else None, PAGE * random.randint(1, 4), width
    )
    device = Device(scheduler, random)
    sequences: list[Sequence] = []
    live: list[Sequence] = []
    overhang = random.randint(0, 9)
    while len(sequences) < 1000 or scheduler.busy:
        for _ in range(random.randint(0, 3) if len(sequences) < 1000 and len(live) < 10 else 0):
            new = random_sequence(random, PAGE * width, sequences[-20:])
            scheduler.add(new)
            sequences.append(new)
            live.append(new)
        device.turn(PAGE * random.randint(0, 4), random.choice((1, 8, 48)), overhang)
        live = [s for s in live if s.phase is not Phase.ENDED]
        if live and random.random() < 0.1:
            phase = random.choice(sorted({s.phase.name for s in live}))
            cancelled = random.choice([s for s in live if s.phase.name == phase])
            device.seen[f"cancelled in {cancelled.phase.name}"] += 1
            scheduler.end(cancelled)
            device.check()
    assert all(s.phase is Phase.ENDED for s in sequences)
    cache.clear()
    for pool in (pages, snapshots, scheduler._slots):
        assert pool.free == pool.size
    return device.seen


def test_ten_thousand_random_requests_read_what_is_theirs_and_leave_nothing() -> None:
    seen = sum((run_at_random(seed) for seed in range(10)), Counter())
    phases = ("WAITING", "PREFILL", "DECODE", "SAVED")
    assert min(seen[f"cancelled in {phase}"] for phase in phases) > 10
    assert min(seen[f"preempted in {phase}"] for phase in ("PREFILL", "DECODE")) > 10
    assert seen["hit"] > 500


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
