"""From tokens to text, piece by piece: characters that span tokens, and stop strings."""

import codecs
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The UTF-8 that a token of a byte-level vocabulary stands for, often part of a character.

    Empty for an id that the vocabulary does not have.
    """
    piece = tokenizer.id_to_token(token)
    if piece is None:
        return b""
    table = _bytes_by_character()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()  # an added token is written as it is


@cache
def _bytes_by_character() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves, and the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


class TextStream:
    """Turns one answer's tokens into text that never has to be taken back.

    Text that may still become a stop string, and bytes that are not yet a character, are held until
    they are settled. The stop string that is complete first ends the text, whatever the order in
    which they are listed; of several that end with the same character, the longest. Special tokens
    are not text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, description in added.items() if description.special}
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int, last: bool = False, stops: bool = True) -> tuple[str, str | None]:
        """Add a token.

        Args:
            token: its id.
            last: nothing comes after it, so nothing is held; an incomplete character becomes
                U+FFFD.
            stops: whether a stop string that this token completes ends the text. One that does not
                is text like any other.

        Returns:
            The text that is now certain, and the stop string that ended it, or None.
        """
        known = len(self._held)
        piece = b"" if token in self._special else token_bytes(self._tokenizer, token)
        self._held += self._characters.decode(piece, last)
        if stops and (found := self._completed(known)):
            start, stop = found
            return self._give(start), stop
        return self._give(len(self._held) - (0 if last else self._possible_stop())), None

    def _give(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _completed(self, known: int) -> tuple[int, str] | None:
        """Where the stop string begins, and which, that is the first to end behind `known`."""
        found = []
        for stop in self._stop:
            start = self._held.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _possible_stop(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        sizes = (
            size
            for stop in self._stop
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(sizes, default=0)
