"""Pages of keys and values, and snapshots of the recurrent state, shared by equal prefixes.

A page is known by a hash of all tokens up to its end, so a page that is cached under its key has
the right tokens before it too. Two rules keep the pages a tree without any links between them: who
uses a page uses all pages before it, and lets go of the last one first. The pages that nobody uses,
in the order in which they were let go of, therefore have every page before those that it follows,
and the oldest of them can always be dropped.

Attention needs all pages of a prefix, the recurrence only its state at the end: a prefix can be
skipped up to a page that has a snapshot.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from jaxinfer.engine.pool import Pool
from jaxinfer.qwen.config import CHUNK as PAGE

_DIGEST = 32


def page_keys(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """The key of each whole page: a hash of the salt and all tokens up to the end of the page.

    Args:
        tokens: whole numbers of at most 64 bits with sign. They need not be the vocabulary's: a
            place that stands for a part of a picture must have a number that tells the picture.
        salt: keys are equal only under equal salts.
    """
    key, keys = blake2b(salt.encode(), digest_size=_DIGEST).digest(), []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = array("q", tokens[start : start + PAGE]).tobytes()
        key = blake2b(key + page, digest_size=_DIGEST).digest()
        keys.append(key)
    return keys


@dataclass(eq=False)
class Node:
    """One cached page.

    Attributes:
        key: see `page_keys`.
        page: the page's number; the cache owns it.
        references: running sequences that use it.
        snapshot: the entry with the recurrent state at the page's end, or None.
        pins: while positive, the snapshot is yet to be read and must stay.
    """

    key: bytes
    page: int
    references: int = 0
    snapshot: int | None = None
    pins: int = 0


class PrefixCache:
    """Which pages and snapshots are kept for later, and which go first.

    Attributes:
        pages: where dropped pages go; full pages come from their sequences.
        snapshots: the entries that snapshots are taken from.
        evictions: pages dropped so far.
        snapshot_evictions: snapshots dropped so far whose page was kept.
    """

    def __init__(
        self,
        pages: Pool,
        snapshots: Pool,
        page_bytes: int = 0,
        snapshot_bytes: int = 0,
        budget: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            pages: the pool that all pages are from.
            snapshots: the pool of snapshot entries.
            page_bytes: size of a page.
            snapshot_bytes: size of a snapshot.
            budget: most bytes of unused pages and of snapshots to keep; None for what fits.
        """
        self.pages, self.snapshots = pages, snapshots
        self.evictions = self.snapshot_evictions = 0
        self._page_bytes, self._snapshot_bytes, self._budget = page_bytes, snapshot_bytes, budget
        self._nodes: dict[bytes, Node] = {}
        # Both with the time of last use, oldest first.
        self._unused: OrderedDict[Node, int] = OrderedDict()
        self._held: OrderedDict[Node, int] = OrderedDict()
        self._clock = count()

    @property
    def cached(self) -> int:
        """Pages in the cache, used or not."""
        return len(self._nodes)

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free now."""
        return len(self._unused)

    @property
    def held(self) -> int:
        """Snapshots in the cache."""
        return len(self._held)

    @property
    def attachable(self) -> int:
        """How many nodes `attach_snapshot` could serve one after the other, and all stay."""
        room = self.snapshots.size
        if self._budget is not None and self._snapshot_bytes:
            room = min(room, self._budget // self._snapshot_bytes)
        return max(0, room - sum(node.pins > 0 for node in self._held))

    @property
    def spent(self) -> int:
        """Bytes that count against the budget: pages nobody uses, and all snapshots."""
        return self.evictable * self._page_bytes + self.held * self._snapshot_bytes

    def known(self, keys: Sequence[bytes]) -> int:
        """How many pages of a prompt with these keys are cached, with or without snapshots."""
        return bisect_left(keys, True, key=lambda key: key not in self._nodes)

    def match(self, keys: Sequence[bytes], longest: int) -> list[Node]:
        """The pages, from the first on, that a prompt can skip; changes nothing.

        Args:
            keys: of the prompt.
            longest: the most tokens that may be skipped.

        Returns:
            Nodes of which the last has a snapshot; empty if nothing can be skipped.
        """
        depth = self.known(keys[: longest // PAGE])
        while depth and self._nodes[keys[depth - 1]].snapshot is None:
            depth -= 1
        return [self._nodes[key] for key in keys[:depth]]

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Use what `match` returned. Of the snapshots, the last one is what is used."""
        for node in nodes:
            node.references += 1
            self._unused.pop(node, None)
        if nodes:
            self._touch(nodes[-1])

    def release(self, nodes: Sequence[Node]) -> None:
        """Let go of all the pages that one sequence uses, given from its first to its last.

        Raises ValueError if nobody uses one of them.
        """
        for node in reversed(nodes):
            if not node.references:
                raise ValueError(f"page {node.page} is released more often than it was acquired")
            node.references -= 1
            if not node.references:
                self._unused[node] = next(self._clock)
        self._trim()

    def insert(self, key: bytes, page: int) -> Node:
        """Cache the page that follows those the caller uses; the caller uses it from now on.

        Args:
            key: the page's.
            page: the caller's page with these rows, or one on which they will be written before
                anything else that is dispatched from now on.

        Returns:
            The page's node. If `node.page == page`, the cache has taken the page over. Otherwise
            these tokens were cached before, and `page` is still the caller's.
        """
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, page)
        node.references += 1
        self._unused.pop(node, None)
        self._trim()
        return node

    def attach_snapshot(self, node: Node) -> int | None:
        """Find a node without a snapshot a place for one.

        Returns:
            The entry to write the state to: a free one, or that of the least recently used
            snapshot that is not pinned. None if there is none, or the node has a snapshot.
        """
        if node.snapshot is not None:
            self._touch(node)
            return None
        oldest = self._oldest_snapshot()
        if not self.snapshots.free and oldest is not None:
            self._drop_snapshot(oldest)
        if not self.snapshots.free:
            return None
        node.snapshot = self.snapshots.take()
        self._held[node] = next(self._clock)
        self._trim()
        return node.snapshot

    def pin(self, node: Node) -> None:
        """Keep the snapshot of a node that the caller uses until `unpin`."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        node.pins -= 1

    def evict(self, pages: int) -> int:
        """Free pages, least recently used first, with their snapshots.

        Returns:
            How many were freed: `pages` if positive, or all that nobody uses if those are fewer.
        """
        pages = max(0, min(pages, self.evictable))
        for _ in range(pages):
            node, _ = self._unused.popitem(last=False)
            del self._nodes[node.key]
            if node.snapshot is not None:
                self._free_snapshot(node)
            self.pages.give(node.page)
        self.evictions += pages
        return pages

    def clear(self) -> None:
        """Drop all pages that nobody uses and all snapshots that are not pinned."""
        self.evict(self.evictable)
        while (node := self._oldest_snapshot()) is not None:
            self._drop_snapshot(node)

    def _touch(self, node: Node) -> None:
        if node in self._held:
            self._held[node] = next(self._clock)
            self._held.move_to_end(node)

    def _oldest_snapshot(self) -> Node | None:
        return next((node for node in self._held if not node.pins), None)

    def _drop_snapshot(self, node: Node) -> None:
        self._free_snapshot(node)
        self.snapshot_evictions += 1

    def _free_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        self.snapshots.give(node.snapshot)
        node.snapshot = None
        del self._held[node]

    def _trim(self) -> None:
        """Keep to the budget: of the oldest page and the oldest snapshot, the older one goes."""
        while self._budget is not None and self.spent > self._budget:
            page, snapshot = next(iter(self._unused), None), self._oldest_snapshot()
            if page is None and snapshot is None:
                return
            if snapshot is None or (page and self._unused[page] < self._held[snapshot]):
                self.evict(1)
            else:
                self._drop_snapshot(snapshot)
