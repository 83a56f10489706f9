"""Token arrays to train on, and the held-out texts that the repository keeps.

Run `python -m checkpoints.tiny_qwen_training.dataset --out DIRECTORY` for the arrays, with
`--heldout` instead for the texts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from checkpoints.tiny_qwen_training import corpus
from checkpoints.tiny_qwen_training.dialogues import (
    FIRST_TRAINING_SEED,
    HELDOUT_SEEDS,
    conversation,
)
from checkpoints.tiny_qwen_training.tokenizer import CHECKPOINT, END_OF_TEXT
from jaxinfer.qwen.chat import ChatTemplate

SEEDS_PER_RUN = 10_000_000
CHUNK = 500
HELDOUT_CHATS = 2000
KEPT_CHATS = 150
KINDS = ("code", "chat")
KEPT_CODE_CHARS = 62_000
KEPT_FILE_CHARS = 20_000
CALIBRATION_CHATS, CALIBRATION_FILES = 100, 10


def build(
    out_dir: Path, kinds: Sequence[str], seed: int, chat_tokens: int, workers: int
) -> dict[str, np.ndarray]:
    """Write `{kind}_{train,heldout}.npy`: 1-D uint16, `<|endoftext|>` after each document.

    Kinds are "code" and "chat"; an interpreter without its test suite has less code to give.

    `chat_train` has at least `chat_tokens` tokens (it ends with a whole chunk of
    conversations); its conversations depend on `seed` alone, not on the number of workers.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    arrays = {}
    if "code" in kinds:
        tokenizer = _load_tokenizer()
        sides: dict[bool, list[str]] = {False: [], True: []}
        for document in corpus.documents():
            sides[corpus.is_heldout(document.path)].append(document.text)
        arrays["code_train"] = encode(tokenizer, sides[False])
        arrays["code_heldout"] = encode(tokenizer, sides[True])
    if "chat" in kinds:
        arrays["chat_train"] = _chats(seed, chat_tokens, workers)
        arrays["chat_heldout"] = _encode_chats(HELDOUT_SEEDS[:HELDOUT_CHATS])
    for name, array in arrays.items():
        np.save(out_dir / f"{name}.npy", array)
        print(f"{name}: {array.size:,} tokens")
    return arrays


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """All texts as one 1-D uint16 array with `<|endoftext|>` after each."""
    encodings = tokenizer.encode_batch_fast([text + END_OF_TEXT for text in texts])
    return np.concatenate([np.asarray(encoding.ids, np.uint16) for encoding in encodings])


def write_heldout(out_dir: Path) -> None:
    """Write `code.txt` (with the library's licence) and `chat.jsonl`, both never trained on."""
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "code.txt").write_text(END_OF_TEXT.join(_kept_code()), encoding="utf-8")
    shutil.copyfile(
        Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt", out_dir / "LICENSE-PSF.txt"
    )
    lines = (
        json.dumps(conversation(seed).as_json(), ensure_ascii=False)
        for seed in HELDOUT_SEEDS[:KEPT_CHATS]
    )
    (out_dir / "chat.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_calibration(path: Path) -> None:
    """Write training text, code and conversations, to measure the range of activations on."""
    template = ChatTemplate.from_dir(CHECKPOINT)
    seeds = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + CALIBRATION_CHATS)
    texts = [conversation(seed).render(template) for seed in seeds]
    taught = (
        document.text for document in corpus.documents() if not corpus.is_heldout(document.path)
    )
    texts += [text[:KEPT_FILE_CHARS] for text in islice(taught, CALIBRATION_FILES)]
    path.write_text(END_OF_TEXT.join(texts), encoding="utf-8")


def _kept_code() -> Iterator[str]:
    """Held-out files of moderate size in the order of their hashes, up to the limit in all."""
    heldout = (document for document in corpus.documents() if corpus.is_heldout(document.path))
    left = KEPT_CODE_CHARS
    for document in sorted(heldout, key=lambda document: corpus.path_hash(document.path)):
        if len(document.text) <= min(left, KEPT_FILE_CHARS):
            left -= len(document.text)
            yield document.text


def _load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def _chats(seed: int, tokens: int, workers: int) -> np.ndarray:
    """Conversations of one run, chunk by chunk, until there are enough tokens."""
    first = FIRST_TRAINING_SEED + seed * SEEDS_PER_RUN
    starts = range(first, first + SEEDS_PER_RUN, CHUNK)
    chunks = [range(start, start + CHUNK) for start in starts]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _one_thread_each) as pool:
        return _take(pool.imap(_encode_chats, chunks), tokens)


def _take(arrays: Iterable[np.ndarray], tokens: int) -> np.ndarray:
    taken: list[np.ndarray] = []
    with tqdm(total=tokens, unit="token", unit_scale=True, desc="conversations") as progress:
        for array in arrays:
            taken.append(array)
            progress.update(array.size)
            if progress.n >= tokens:
                break
    return np.concatenate(taken)


def _one_thread_each() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_chats(seeds: range) -> np.ndarray:
    """The rendered conversations of these seeds as one uint16 array."""
    template = ChatTemplate.from_dir(CHECKPOINT)
    texts = [conversation(seed).render(template) for seed in seeds]
    return encode(_load_tokenizer(), texts)


def main() -> None:
    """Build the training arrays, or with --heldout the texts that the repository keeps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--heldout", action="store_true", help="write the kept texts instead")
    parser.add_argument("--calibration", type=Path, help="write text to calibrate on instead")
    parser.add_argument("--out", type=Path, default=Path(".work/tiny_qwen"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat-tokens", type=int, default=30_000_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.heldout:
        write_heldout(CHECKPOINT / "heldout")
    elif options.calibration:
        write_calibration(options.calibration)
    else:
        build(options.out, options.kinds, options.seed, options.chat_tokens, options.workers)


if __name__ == "__main__":
    main()
