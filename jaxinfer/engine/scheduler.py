"""Which sequence runs when, and in which pages.

Nothing here touches the device or waits for it. A call is planned while the results of the one
before are unread, so pages are handed out for the most tokens that a sequence can have by then.
The device does what it is given in order: a page that is freed here may be given away at once.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import replace
from itertools import chain, islice

from jaxinfer.engine.pool import SCRATCH, Pool
from jaxinfer.engine.prefix_cache import Node, PrefixCache
from jaxinfer.engine.sequence import Phase, Piece, Schedule, Sequence
from jaxinfer.qwen.config import CHUNK as PAGE

LOOKAHEAD = 64
"""How many of the waiting sequences one plan looks at: it bounds the time that planning takes."""


class Scheduler:
    """Admits, advances, preempts and ends sequences.

    Attributes:
        running: sequences that have a slot, oldest first.
        cache: the prefix cache, or None.
        preemptions: how many sequences lost their slot before their end.
        prompt_tokens: tokens of the prompts that were admitted.
        hit_tokens: those of them that were skipped.
    """

    def __init__(
        self,
        slots: int,
        pages: Pool,
        cache: PrefixCache | None = None,
        snapshot_interval: int = 512,
        width: int | None = None,
    ) -> None:
        """Start idle.

        Args:
            slots: how many sequences run at most.
            pages: the pool of pages, without `SCRATCH`.
            cache: over the same pool.
            snapshot_interval: distance of snapshots in a long prompt; a multiple of the page.
            width: the most pages of one sequence; None for all. Rows of drafts for which a table
                of this width has no place are to be written to `SCRATCH`.
        """
        if snapshot_interval <= 0 or snapshot_interval % PAGE:
            raise ValueError(f"snapshot_interval is {snapshot_interval}; give a multiple of {PAGE}")
        self.running: list[Sequence] = []
        self.cache = cache
        self.preemptions = self.prompt_tokens = self.hit_tokens = 0
        self._pages, self._slots = pages, Pool(slots)
        self._interval = snapshot_interval
        self._width = min(width or pages.size, pages.size)
        self._preempted: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """How many sequences wait for a slot, preempted ones included."""
        return len(self._preempted) + len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running or self.waiting)

    def table(self, sequence: Sequence) -> list[int]:
        """The numbers of a sequence's pages, first page first."""
        return list(sequence.pages)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ValueError if it can never run, or was added before."""
        if sequence.number >= 0 or sequence.phase is Phase.ENDED:
            raise ValueError("the sequence was added or ended before; make a new one")
        if not 0 < len(sequence.prompt) < sequence.limit:
            raise ValueError(
                f"the prompt has {len(sequence.prompt)} tokens and the limit is {sequence.limit}: "
                "at least one token must come before and after"
            )
        if sequence.limit > self._width * PAGE:
            raise ValueError(
                f"a sequence of {sequence.limit} tokens does not fit the {self._width} pages of "
                f"{PAGE} tokens that one may have; lower its limit or give the engine more memory"
            )
        sequence.number = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """Free all that a sequence has, in whatever phase; nothing if it has ended before."""
        if sequence.slot is not None:
            self._leave(sequence)
        for queue in (self._preempted, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        sequence.phase = Phase.ENDED

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence and put it before all that wait.

        One that decodes becomes SAVED: the engine must have kept its state. The progress of one in
        prefill is dropped. Raises ValueError if it does not run or a result is still in flight.
        """
        if sequence.slot is None:
            raise ValueError(f"only a running sequence can be preempted, not {sequence.phase}")
        if sequence.phase is Phase.DECODE:
            if sequence.flight:
                raise ValueError("commit what is in flight before the sequence is preempted")
            sequence.phase = Phase.SAVED
        else:
            sequence.phase = Phase.WAITING
        self._leave(sequence)
        insort(self._preempted, sequence, key=lambda s: s.number)
        self.preemptions += 1

    def commit(self, sequence: Sequence, tokens: int) -> None:
        """Take note of the oldest result in flight; nothing if the sequence has ended.

        Args:
            sequence: one whose prompt has been dispatched.
            tokens: how many the result brought: the first token of a prefill counts as a result of
                its own, and each decode call as one of at most its reach.

        Raises:
            ValueError: no result is in flight, or it cannot have brought so many.
        """
        if sequence.phase is Phase.ENDED:
            return
        flight = sequence.flight if sequence.phase is Phase.DECODE else None
        if not flight or not 0 <= tokens <= min(flight[0], sequence.limit - sequence.length):
            raise ValueError(f"{tokens} tokens committed, in flight: {list(flight or [])}")
        flight.popleft()
        sequence.length += tokens

    def plan(self, budget: int, reach: int, overhang: int = 0) -> Schedule:
        """Decide what is dispatched next; what is planned is taken to be dispatched.

        If the plan names victims, read all that is in flight and plan again; if it still does, save
        and `preempt` each, and plan once more. The oldest running sequence is never a victim.

        Args:
            budget: the most tokens of prompts to prefill; each piece counts as a whole page.
            reach: the most tokens that the decode call commits to a sequence.
            overhang: rows that the decode call may write behind those.
        """
        missing = {s: self._size(s, reach, overhang) - len(s.pages) for s in self.running}
        missing = {s: max(0, count) for s, count in missing.items()}
        if victims := self._victims(missing):
            return Schedule(victims=victims)
        for sequence, count in missing.items():
            sequence.pages += self._take(count)
        admitted, resumed = self._admit(reach, overhang)
        pieces = self._prefill(budget // PAGE)
        # What is in flight brings a token each, at least, to those who have not ended.
        decode = [
            s
            for s in self.running
            if s.phase is Phase.DECODE and s.length + len(s.flight) < s.limit
        ]
        for sequence in decode:
            sequence.flight.append(reach)
        return Schedule(admitted, resumed, pieces, decode)

    def _size(self, sequence: Sequence, reach: int, overhang: int) -> int:
        """Pages for a sequence once a decode call has run."""
        tokens = min(sequence.limit, sequence.bound + reach) + overhang
        return min(-(-tokens // PAGE), self._width)

    def _available(self) -> int:
        return self._pages.free + (self.cache.evictable if self.cache else 0)

    def _take(self, count: int) -> list[int]:
        if self.cache:
            self.cache.evict(count - self._pages.free)
        return [self._pages.take() for _ in range(count)]

    def _victims(self, missing: dict[Sequence, int]) -> list[Sequence]:
        """The youngest sequences without which the others have the pages that they miss."""
        short = sum(missing.values()) - self._available()
        victims: list[Sequence] = []
        users: Counter[Node] = Counter()
        for sequence in reversed(self.running[1:]):
            if short <= 0:
                break
            victims.append(sequence)
            users.update(sequence.nodes)
            own = len(sequence.pages) - len(sequence.nodes)
            let_go = sum(users[node] == node.references for node in sequence.nodes)
            short -= missing[sequence] + own + let_go
        return victims

    def _admit(self, reach: int, overhang: int) -> tuple[list[Sequence], list[Sequence]]:
        admitted: list[Sequence] = []
        resumed: list[Sequence] = []
        for sequence in list(islice(chain(self._preempted, self._waiting), LOOKAHEAD)):
            if not self._slots.free:
                break
            fresh = sequence.phase is Phase.WAITING
            nodes: list[Node] = []
            if fresh and self.cache and sequence.cached and sequence.reuse:
                nodes = self.cache.match(sequence.keys, sequence.longest)
                if self._soon_shared(sequence, len(nodes) * PAGE):
                    continue
            size = self._size(sequence, reach, overhang)
            unused = sum(not node.references for node in nodes)
            headroom = len(self.running)
            if size - len(nodes) + unused + headroom > self._available():
                break
            (self._preempted if sequence in self._preempted else self._waiting).remove(sequence)
            sequence.slot = self._slots.take()
            if fresh:
                self._begin(sequence, nodes)
            sequence.phase = Phase.PREFILL if fresh else Phase.DECODE
            (admitted if fresh else resumed).append(sequence)
            sequence.pages += self._take(size - len(sequence.pages))
            insort(self.running, sequence, key=lambda s: s.number)
        return admitted, resumed

    def _soon_shared(self, sequence: Sequence, hit: int) -> bool:
        """Whether an older prompt is about to reach a snapshot that lets this one skip more."""
        for other in self.running:
            if other.phase is Phase.PREFILL and other.points and other.number < sequence.number:
                point = other.next_point(max(hit, other.done))
                shared = min(PAGE * _common(sequence.keys, other.keys), sequence.longest)
                if point is not None and point <= shared:
                    return True
        return False

    def _begin(self, sequence: Sequence, nodes: list[Node]) -> None:
        sequence.hit = sequence.done = len(nodes) * PAGE
        self.prompt_tokens += len(sequence.prompt)
        self.hit_tokens += sequence.hit
        if not (self.cache and sequence.cached):
            return
        self.cache.acquire(nodes)
        sequence.nodes = nodes
        sequence.pages = [node.page for node in nodes]
        if nodes:
            sequence.source = nodes[-1]
            self.cache.pin(sequence.source)
        if not self.cache.snapshots.size:
            return
        # Where this prompt leaves what others had, the next one like it may leave it too.
        leaves = min(self.cache.known(sequence.keys) * PAGE, sequence.longest)
        size = len(sequence.prompt)
        turns = {min(boundary, size) // PAGE * PAGE for boundary in sequence.boundaries}
        points = {*range(0, size + 1, self._interval), *turns, leaves, sequence.longest}
        sequence.points = sorted(point for point in points if point > sequence.hit)

    def _prefill(self, room: int) -> list[Piece]:
        pieces: list[Piece] = []
        wanted: list[tuple[int, Node]] = []
        sources: list[Node] = []
        for sequence in self.running:
            while sequence.phase is Phase.PREFILL and len(pieces) < room:
                if sequence.source:
                    sources.append(sequence.source)
                pieces.append(self._piece(sequence))
                if sequence.next_point(pieces[-1].start) == sequence.done:
                    wanted.append((len(pieces) - 1, sequence.nodes[-1]))
        if self.cache:
            # If entries are few, the deepest places are worth most. More than can stay must not be
            # asked for: one entry would be written twice.
            for index, node in wanted[max(0, len(wanted) - self.cache.attachable) :]:
                entry = self.cache.attach_snapshot(node)
                pieces[index] = replace(pieces[index], snapshot=entry)
            # Only now: no entry may be written by the call that starts from it.
            for node in sources:
                self.cache.unpin(node)
        return pieces

    def _piece(self, sequence: Sequence) -> Piece:
        start = sequence.done
        valid = min(PAGE, len(sequence.prompt) - start)
        page = sequence.pages[start // PAGE]
        source = sequence.source.snapshot if sequence.source else None
        sequence.source = None
        sequence.done += valid
        if self.cache and sequence.cached and valid == PAGE:
            node = self.cache.insert(sequence.keys[start // PAGE], page)
            sequence.nodes.append(node)
            if node.page != page:
                self._pages.give(page)
                sequence.pages[start // PAGE] = node.page
                page = SCRATCH
        last = sequence.done == len(sequence.prompt)
        if last:
            sequence.phase = Phase.DECODE
        return Piece(sequence, start, valid, page, source, None, last)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self._slots.give(sequence.slot)
        for page in sequence.pages[len(sequence.nodes) :]:
            self._pages.give(page)
        if self.cache:
            if sequence.source:
                self.cache.unpin(sequence.source)
            self.cache.release(sequence.nodes)
        sequence.slot = sequence.source = None
        sequence.pages, sequence.nodes, sequence.points = [], [], []


def _common(a: list[bytes], b: list[bytes]) -> int:
    """How many pages two prompts share from the start on; equal keys mean equal ones before."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])
