"""What a grammar needs to know of the tokens: their bytes, and which are no text."""

import json
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer


class Vocabulary:
    """The tokens of a model as llguidance wants to know them, and masks of some of them.

    Attributes:
        special: ids of the tokens that are not text, by name.
        eos: tokens that end an answer.
        words: `W`, of a mask.
        all: `[W]`, a mask that allows every token there is.
        ends: `[W]`, a mask that allows those that end an answer.
        tokens: the bytes of each token; none where there is no token.
        eos_token_id: read by llguidance, as are the next two.
        bos_token_id: there is none.
        special_token_ids: of `special`.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> None:
        """Learn the tokens of a model.

        Args:
            tokenizer: a byte-level BPE.
            size: the model's logits at a place.
            eos: tokens that end an answer.

        Raises:
            ValueError: the tokenizer is of another kind or larger than that, or `eos` is empty.
        """
        if not eos:
            raise ValueError("structured output needs a model with an end token")
        ids = tokenizer.get_vocab()
        if max(ids.values()) >= size:
            raise ValueError(f"token {max(ids.values())} is beyond the vocabulary of {size}")
        self.special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
        self.words = -(-size // 32)
        self.eos = frozenset(eos)
        self.all, self.ends = self.only(list(ids.values())), self.only(list(eos))
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.special_token_ids = list(self.special.values())
        self.tokens = [b""] * size
        letters = _bytes_of_letters()
        try:
            for piece, token in ids.items():
                named = piece in self.special
                self.tokens[token] = piece.encode() if named else bytes(letters[c] for c in piece)
        except KeyError as error:
            raise ValueError(f"the tokenizer is not a byte-level BPE: it has {error}") from None
        # Text is spelt by ordinary tokens, byte for byte, also where it looks like a special one.
        plain = json.loads(tokenizer.to_str()) | {"added_tokens": [], "normalizer": None}
        self._plain = Tokenizer.from_str(json.dumps(plain))

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def only(self, tokens: Sequence[int]) -> np.ndarray:
        """`[W]`, a mask that allows these tokens."""
        mask = np.zeros(self.words, np.uint32)
        ids = np.asarray(tokens, np.uint32)
        np.bitwise_or.at(mask, ids // 32, np.uint32(1) << ids % 32)
        return mask


def _bytes_of_letters() -> dict[str, int]:
    """The letters of a byte-level BPE: printable bytes as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
