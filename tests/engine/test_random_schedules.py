"""Whatever is asked, in whatever order: each reads what is its own, and nothing is left behind."""

from collections import Counter, deque
from random import Random

from jaxinfer.engine.pool import SCRATCH, Pool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Phase, Schedule, Sequence
from jaxinfer.qwen.config import CHUNK as PAGE
from tests.engine.scheduling import prompt


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
