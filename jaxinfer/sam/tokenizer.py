"""CLIP's tokeniser, as the SAM 3 text encoder wants it: cleaning, fixed length, mask by id."""

import gzip
import html
import re
from collections.abc import Sequence
from pathlib import Path

import ftfy
import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

CONTEXT = 32
"""Tokens that SAM 3 reads of a prompt, the start and end tokens among them."""

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
"""The list of merges that Meta's code reads, under the name it has there."""

_PAD = 0
_START = ("<start_of_text>", "<|startoftext|>")
_END = ("<end_of_text>", "<|endoftext|>")
_SPECIAL = re.compile("|".join(re.escape(token) for token in (*_START, *_END)))
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_MERGES = 49152 - 256 - 2
"""Merges that the vocabulary is made of; the file has more."""


class PromptError(ValueError):
    """A prompt that cannot be used; the message says why and what would help."""


class Tokenizer:
    """Turns phrases into the ids that the text encoder reads.

    Args:
        bpe: CLIP's byte-pair encoding, with tokens for start and end.
        context: ids a prompt is padded to.

    Raises ValueError if `bpe` has no start or end token.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, context: int = CONTEXT) -> None:
        self.context = context
        self._bpe = bpe
        self._start, self._end = (_special_id(bpe, names) for names in (_START, _END))

    @classmethod
    def read(cls, directory: str | Path, context: int = CONTEXT) -> "Tokenizer":
        """From `tokenizer.json`, or else `bpe_simple_vocab_16e6.txt.gz`, in a directory.

        Raises FileNotFoundError if it has neither.
        """
        directory = Path(directory)
        if (path := directory / "tokenizer.json").is_file():
            return cls(tokenizers.Tokenizer.from_file(str(path)), context)
        if (path := directory / VOCABULARY).is_file():
            lines = gzip.decompress(path.read_bytes()).decode().split("\n")
            return cls(from_merges(lines[1 : _MERGES + 1]), context)
        raise FileNotFoundError(
            f"{directory} has no tokeniser: put the tokenizer.json of SAM 3's or CLIP's "
            f"checkpoint, or {VOCABULARY} from Meta's code, beside the weights"
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that there are; their ids are smaller."""
        return self._bpe.get_vocab_size()

    def encode(self, prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int32 `[P, context]`, padded with 0, and which of them count, bool `[P, context]`.

        As in Meta's code an id counts if it is not 0, wherever it stands.

        Raises PromptError for a prompt of nothing but space or special tokens, and for one that is
        too long: what does not fit would be lost without a word.
        """
        ids = np.full((len(prompts), self.context), _PAD, np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            tokens = self._tokens(prompt)
            row[: len(tokens)] = tokens
        return ids, ids != _PAD

    def _tokens(self, prompt: str) -> list[int]:
        text = clean(prompt)
        if not text:
            raise PromptError(f"prompt {prompt!r} is empty; name what to look for, as 'red car'")
        inner = self._bpe.encode(text, add_special_tokens=False).ids
        room = self.context - 2
        if len(inner) > room:
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            raise PromptError(
                f"prompt {shown!r} has {len(inner)} tokens, and the model reads {room}: say it in "
                "a short noun phrase, or in several prompts"
            )
        return [self._start, *inner, self._end]


def clean(prompt: str) -> str:
    """A prompt as CLIP sees it, without the special tokens that somebody may have typed.

    Broken Unicode is repaired, HTML entities are resolved (twice), white space is collapsed, and
    capitals are lowered: prompts that come out alike are one prompt.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).lower()
    while _SPECIAL.search(text):  # what is left may close up to another one
        text = _SPECIAL.sub("", text)
    return " ".join(text.split())


def from_merges(merges: Sequence[str]) -> tokenizers.Tokenizer:
    """CLIP's byte-pair encoding from its merges, each two symbols with a space between."""
    # The vocabulary's order: printable bytes first, as they are written, then the others.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = [chr(byte) for byte in printable]
    symbols += [chr(0x100 + number) for number in range(256 - len(printable))]
    pairs = [tuple(merge.split()) for merge in merges]
    words = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *map("".join, pairs)]
    words += [_START[0], _END[0]]
    bpe = tokenizers.Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            pairs,
            end_of_word_suffix="</w>",
        )
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([_START[0], _END[0]])
    return bpe


def _special_id(bpe: tokenizers.Tokenizer, names: Sequence[str]) -> int:
    for name in names:
        if (found := bpe.token_to_id(name)) is not None:
            return found
    raise ValueError(f"the tokeniser has no token {' or '.join(names)}: it is not CLIP's")
