"""From tokens to text, piece by piece: characters that span tokens, and stop strings."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Turns one request's tokens into text that never has to be taken back.

    Text that may still become a stop string, and bytes that are not yet a character, are held until
    they are settled. The stop string that is complete first ends the text, whatever the order in
    which they are listed; of several that end with the same character, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = ""
        self._given = 0

    def feed(self, token: int) -> tuple[str, bool]:
        """Add a token: the text that is now certain, and whether a stop string was completed."""
        self._ids.append(token)
        self._decoded += self._stream.step(self._tokenizer, token) or ""
        stop = self._find_stop()
        if stop is not None:
            return self._give(stop), True
        return self._give(len(self._decoded) - self._possible_stop()), False

    def finish(self) -> str:
        """What is left when generation ends; an incomplete character becomes U+FFFD."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if whole.startswith(self._decoded):
            self._decoded = whole
        # A stop string may have waited for a character that was never completed.
        stop = self._find_stop()
        return self._give(len(self._decoded) if stop is None else stop)

    def _give(self, end: int) -> str:
        text, self._given = self._decoded[self._given : end], max(end, self._given)
        return text

    def _find_stop(self) -> int | None:
        """Where the stop string begins that is complete first."""
        # It can begin in text that was held back, never in text already given.
        found = [(self._decoded.find(stop, self._given), len(stop)) for stop in self._stop]
        return min(((at + size, at) for at, size in found if at >= 0), default=(0, None))[1]

    def _possible_stop(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        tail = self._decoded[self._given :]
        sizes = (
            size
            for stop in self._stop
            for size in range(min(len(stop) - 1, len(tail)), 0, -1)
            if tail.endswith(stop[:size])
        )
        return max(sizes, default=0)
