"""What single tokens stand for."""

from functools import cache

from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The UTF-8 that a token of a byte-level vocabulary stands for, often part of a character."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    table = _bytes_by_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


@cache
def _bytes_by_character() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves, and the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}
