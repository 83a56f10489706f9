"""A random model that answers under a constraint, one token at a time or with drafts."""

import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from checkpoints import find, resolve
from jaxinfer.engine.grammar import Constraint, Grammars

TOKENIZER = Tokenizer.from_file(str(find(resolve("tiny_qwen"), "tokenizer.json")))
IDS = TOKENIZER.get_vocab()
EVERYTHING = sorted(IDS.values())
SPECIAL = {*TOKENIZER.get_added_tokens_decoder()}
EOS = (IDS["<|endoftext|>"], IDS["<|im_end|>"])
THINK_END = IDS["</think>"]
VOCABULARY = 4100  # a few more than there are tokens, and no multiple of 32
GRAMMARS = Grammars(TOKENIZER, VOCABULARY, EOS)

# The bytes of each token that is text; the first tokens are single bytes in this order.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*PRINTABLE, *sorted(set(range(256)) - set(PRINTABLE))]
PIECES = sorted(set(IDS) - {*map(TOKENIZER.id_to_token, SPECIAL)}, key=IDS.__getitem__)
LETTERS = dict(zip(PIECES, BYTES, strict=False))
ORDINARY = [bytes(LETTERS[letter] for letter in piece) for piece in PIECES]

CLOSING = [IDS[piece] for piece in ("}", "]", '"', ",")]
PATIENCE = 20
LONGEST = 400


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def ids(mask: np.ndarray) -> list[int]:
    """The tokens that a row of masks allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def choose(mask: np.ndarray, place: int, seed: int) -> int:
    """A model: a function of what is allowed and where; it tires and ends JSON where it can."""
    allowed = ids(mask)
    draw = random.Random(seed * 1000 + place)
    if place > PATIENCE or draw.random() < 0.3:
        inside_string = len(allowed) > 1000
        for token in (*EOS, *(CLOSING[2:3] if inside_string else CLOSING)):
            if token in allowed:
                return token
    return draw.choice(allowed)


def plan(constraint: Constraint, drafts: Sequence[int], rows: int) -> tuple[list[int], np.ndarray]:
    """What the engine asks for in a step: tokens to verify, and masks."""
    verified = constraint.propose(drafts, rows)
    return verified, constraint.masks(verified)


def answer(constraint: Constraint, seed: int) -> list[int]:
    """An answer one token at a time, with its end token if that came."""
    tokens: list[int] = []
    while not constraint.ended and len(tokens) < LONGEST:
        drafts, masks = plan(constraint, [], 1)
        assert (drafts, len(masks)) == ([], 1)
        tokens.append(choose(masks[0], len(tokens), seed))
        constraint.advance(tokens[-1:])
    return tokens


def speculate(constraint: Constraint, seed: int, likely: Sequence[int]) -> list[int]:
    """An answer by steps that verify drafts, mostly `likely` ones."""
    tokens: list[int] = []
    draw = random.Random(seed)
    while not constraint.ended and len(tokens) < LONGEST:
        rows = draw.randint(1, 9)
        drafts = list(likely[len(tokens) :][: draw.randint(0, 9)])
        if drafts and draw.random() < 0.3:
            drafts[draw.randrange(len(drafts))] = draw.randrange(4096)
        verified, masks = plan(constraint, drafts, rows)
        assert len(masks) == 1 + len(verified) <= rows
        new: list[int] = []
        for mask, draft in zip(masks, [*verified, None], strict=True):
            new.append(choose(mask, len(tokens) + len(new), seed))
            if new[-1] != draft:
                break
        constraint.advance(new)
        tokens += new
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    """The text of an answer that must have ended."""
    assert tokens[-1] in EOS
    assert SPECIAL.isdisjoint(tokens[:-1])
    return TOKENIZER.decode(list(tokens[:-1]), skip_special_tokens=False)
