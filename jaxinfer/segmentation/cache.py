"""A memory of what was computed, bounded by bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a cache: how often it had what was asked for, and what it holds."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class Cache[K: Hashable, V]:
    """Keeps pytrees of arrays, the least recently used of which go first.

    Args:
        budget: bytes of arrays to keep at most; an entry that is larger alone is not kept.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._hits = self._misses = self._evictions = self._bytes = 0

    def get(self, key: K) -> V | None:
        """The entry, which becomes the most recently used; counts a hit or a miss."""
        if key not in self._entries:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V) -> None:
        """Add an entry; others may go."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(value))
        if key in self._entries:
            self._bytes -= self._entries.pop(key)[1]
        if size > self.budget:
            return
        self._entries[key] = (value, size)
        self._bytes += size
        while self._bytes > self.budget:
            _, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed
            self._evictions += 1

    def clear(self) -> None:
        """Let go of everything; what was counted stays."""
        self._entries.clear()
        self._bytes = 0

    def stats(self) -> CacheStats:
        """Counts and sizes now."""
        return CacheStats(
            self._hits, self._misses, self._evictions, len(self._entries), self._bytes
        )
