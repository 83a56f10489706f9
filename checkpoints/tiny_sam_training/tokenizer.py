"""Trains the checkpoint's tokenizer: CLIP's scheme with a vocabulary of its own.

Ids 0..255 are the bytes, 256..511 the bytes that end a word, then learned merges, then
`<start_of_text>` and `<end_of_text>`. Only words of the drawn world are learned: all others come
in pieces, so that a word never seen is made of tokens that were. Run it as
`python -m checkpoints.tiny_sam_training.tokenizer`.
"""

import argparse
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from checkpoints.tiny_sam_training.architecture import CONFIG, VOCAB_SIZE
from checkpoints.tiny_sam_training.words import PLACES, VISUAL, prompt_slots

CHECKPOINT = Path(__file__).parents[1] / "tiny_sam"
SPLIT_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
START, END, WORD_END = "<start_of_text>", "<end_of_text>", "</w>"
NEVER_IN_TEXT = "ÿ"
"""Byte 255, which no UTF-8 text holds; as id 0 it can stand for padding."""


def train() -> Tokenizer:
    """Learn the merges of this world's words."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {NEVER_IN_TEXT})
    alphabet.insert(0, NEVER_IN_TEXT)
    pieces = [*alphabet, *(letter + WORD_END for letter in alphabet)]
    merges = _learned_merges()
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: i for i, piece in enumerate((*pieces, START, END))}
    if len(vocabulary) != VOCAB_SIZE:
        raise ValueError(f"{len(vocabulary)} tokens: set VOCAB_SIZE in architecture.py to that")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix=WORD_END))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (START, END)]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        sep=(END, vocabulary[END]),
        cls_token=(START, vocabulary[START]),
        trim_offsets=False,
        add_prefix_space=False,
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """The keys that Hugging Face's loaders read beside `tokenizer.json`."""
    return {
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": NEVER_IN_TEXT,
        "errors": "replace",
        "model_max_length": CONFIG.text.context,
        "tokenizer_class": "CLIPTokenizerFast",
    }


def save(directory: Path) -> Tokenizer:
    """Train the tokenizer and write its two files."""
    tokenizer = train()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return tokenizer


def _learned_merges() -> list[tuple[str, str]]:
    """The merges that make each word of the world one token, the most frequent pair first.

    `tokenizers` has a trainer too, which breaks ties as it happens.
    """
    drawn = {word for slot in prompt_slots() for word in slot if word}
    words = sorted({VISUAL, *" ".join(PLACES).split(), *drawn})
    spelt = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges = []
    while counts := Counter(pair for pieces in spelt for pair in pairwise(pieces)):
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        spelt = [_merge(pieces, best) for pieces in spelt]
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """`pieces` with every occurrence of the pair made one, from the left."""
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def main() -> None:
    """Train and write the files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="the checkpoint's directory")
    tokenizer = save(parser.parse_args().out)
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
