"""A free list: pages, slots and snapshots are handed out and taken back by number."""

SCRATCH = 0
"""The page that belongs to nobody: rows that must not be kept are written to it."""


class Pool:
    """The integers `first` to `first + size - 1`, each of which is free or taken.

    Attributes:
        size: how many there are.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self._first = first
        self._free = list(reversed(range(first, first + size)))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Take one. Raises IndexError if none is free."""
        if not self._free:
            raise IndexError(f"all {self.size} of the pool are taken; give one back first")
        number = self._free.pop()
        self._taken.add(number)
        return number

    def give(self, number: int) -> None:
        """Give one back. Raises ValueError if it is free already or not of this pool."""
        if number not in self._taken:
            last = self._first + self.size - 1
            raise ValueError(f"{number} is not taken from this pool of {self._first} to {last}")
        self._taken.remove(number)
        self._free.append(number)
