"""A request as the scheduler sees it, and what the scheduler decides about it."""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from jaxinfer.engine.prefix_cache import Node, page_keys
from jaxinfer.qwen.config import CHUNK as PAGE


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = "waiting for a slot, with nothing to its name"
    PREFILL = "has a slot and pages; its prompt is being worked off"
    DECODE = "has a slot and pages; its whole prompt has been dispatched"
    SAVED = "was preempted while decoding; the engine keeps its state"
    ENDED = "finished or cancelled"


@dataclass(eq=False)
class Sequence:
    """A request as the scheduler sees it. Positions and lengths are in tokens.

    Attributes:
        prompt: token ids; see `page_keys` for those of pictures.
        limit: the most tokens the sequence may ever have, prompt and answer.
        salt: pages are shared only between sequences of the same salt.
        cached: use and feed the prefix cache.
        reuse: may skip a cached prefix; False still feeds the cache.
        boundaries: places in the prompt where turns begin: another prompt may leave this one there.
        phase: the scheduler's, as is all that follows.
        number: rank of arrival; the lowest is the oldest.
        slot: while running.
        pages: the page table, first page first: those of `nodes`, then its own.
        nodes: the cached pages that it uses.
        hit: tokens of the prompt that were skipped.
        done: tokens of the prompt that were skipped or planned.
        length: tokens of the prompt and those committed.
        flight: for each result that is not yet read, oldest first, the most tokens it can bring.
        points: lengths of the prompt at which a snapshot is wanted, ascending.
        source: the node to start from, until the first piece is planned.
    """

    prompt: tuple[int, ...]
    limit: int
    salt: str = ""
    cached: bool = True
    reuse: bool = True
    boundaries: tuple[int, ...] = ()
    phase: Phase = field(default=Phase.WAITING, init=False)
    number: int = field(default=-1, init=False)
    slot: int | None = field(default=None, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    nodes: list[Node] = field(default_factory=list, init=False)
    hit: int = field(default=0, init=False)
    done: int = field(default=0, init=False)
    length: int = field(default=0, init=False)
    flight: deque[int] = field(default_factory=deque, init=False)
    points: list[int] = field(default_factory=list, init=False)
    source: Node | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt)
        self.flight.append(1)  # the prefill brings the first token

    @cached_property
    def keys(self) -> list[bytes]:
        """The keys of the prompt's whole pages; the longer ones take milliseconds to hash."""
        return page_keys(self.prompt, self.salt)

    @property
    def bound(self) -> int:
        """The most tokens it can have once all that is in flight has been read."""
        return min(self.limit, self.length + sum(self.flight))

    @property
    def longest(self) -> int:
        """The most tokens of the prompt that can be skipped: the last one must be computed."""
        return (len(self.prompt) - 1) // PAGE * PAGE

    def next_point(self, after: int) -> int | None:
        """The first place behind `after` at which a snapshot is wanted."""
        index = bisect_right(self.points, after)
        return self.points[index] if index < len(self.points) else None


@dataclass(frozen=True)
class Piece:
    """A part of a prompt, at most a page, for one prefill call.

    Attributes:
        sequence: whose prompt it is.
        start: its first position, a multiple of the page.
        valid: how many tokens it has.
        page: where its keys and values are written: `SCRATCH` if the page in the table was written
            for another sequence, by an earlier call or an earlier piece of this one.
        source: snapshot entry with the state to start from; None to go on from the slot's.
        snapshot: snapshot entry to which the state behind it is written; None for nowhere.
        last: the prompt ends in it.
    """

    sequence: Sequence
    start: int
    valid: int
    page: int
    source: int | None
    snapshot: int | None
    last: bool


@dataclass(frozen=True)
class Schedule:
    """What to dispatch next: first the slots are set up, then the pieces run, then the decode.

    A snapshot entry that one piece writes is neither source nor snapshot of any other piece.

    Attributes:
        admitted: have just got a slot, which must be set to the start of a prompt.
        resumed: have just got a slot and pages, to which their saved state must be written.
        pieces: in the order in which they run.
        decode: sequences to decode, oldest first, those included whose prompt ends in `pieces`,
            without those that what is in flight will surely end.
        victims: running sequences for which memory is lacking, youngest first; then all else is
            empty, and nothing has changed.
    """

    admitted: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    victims: list[Sequence] = field(default_factory=list)
