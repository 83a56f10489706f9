"""Trains the tiny checkpoint's tokenizer: Qwen's scheme with a vocabulary of 4,096.

Ids 0..255 are the bytes, 256..4062 learned merges, 4063..4095 Qwen's control tokens in the
order in which the full-size vocabulary ends (there 248044..248076).
Run it as `python -m checkpoints.tiny_qwen_training.tokenizer`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
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
    trainers,
)

from checkpoints.tiny_qwen_training import corpus
from checkpoints.tiny_qwen_training.dialogues import FIRST_TRAINING_SEED, conversation
from jaxinfer.qwen.chat import ChatTemplate

CHECKPOINT = Path(__file__).parents[1] / "tiny_qwen"
VOCAB_SIZE = 4096
MAX_LENGTH = 4096
SAMPLE_CHATS = 4000

SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PLAIN_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
CONTROL_TOKENS = (
    END_OF_TEXT, IM_START, IM_END,
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>",
    "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
    "<|audio_pad|>",
)  # fmt: skip


def train(texts: Iterator[str]) -> Tokenizer:
    """Learn the merges from texts without control tokens, then append the control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    learned = VOCAB_SIZE - len(CONTROL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=learned,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != learned:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} entries, not {learned}")
    tokenizer.add_tokens([_added_token(token) for token in CONTROL_TOKENS])
    return tokenizer


def sample_texts(template: ChatTemplate, chats: int = SAMPLE_CHATS) -> Iterator[str]:
    """All training documents, and rendered conversations cut at their control tokens."""
    for document in corpus.documents():
        if not corpus.is_heldout(document.path):
            yield document.text
    control = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
    for seed in range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + chats):
        yield from filter(None, control.split(conversation(seed).render(template)))


def tokenizer_config(ids: dict[str, int]) -> dict[str, Any]:
    """The keys that Hugging Face's loaders and chat servers read beside `tokenizer.json`."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ids[token]): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token not in PLAIN_TOKENS,
            }
            for token in CONTROL_TOKENS
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """Qwen3.6's sampling defaults with this vocabulary's ids."""
    return {
        "bos_token_id": ids[END_OF_TEXT],
        "do_sample": True,
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }


def _added_token(token: str) -> AddedToken:
    return AddedToken(token, special=token not in PLAIN_TOKENS, normalized=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Train on both sources and write the three files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="the checkpoint's directory")
    out: Path = parser.parse_args().out
    tokenizer = train(sample_texts(ChatTemplate.from_dir(CHECKPOINT)))
    tokenizer.save(str(out / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    _write_json(out / "tokenizer_config.json", tokenizer_config(ids))
    _write_json(out / "generation_config.json", generation_config(ids))
    print(f"{tokenizer.get_vocab_size()} entries; {END_OF_TEXT} is {ids[END_OF_TEXT]}")


if __name__ == "__main__":
    main()
