"""What the engine does on this device: tokens a second, drafts that hold, what the host costs.

    python -m jaxinfer.bench.engine --model tiny_qwen --out FILE
    python -m jaxinfer.bench.engine --model mid-nvidia-mix --speculation none auto --drafts 3 1-3

The tiny checkpoints answer held-out prompts. `mid` is a mid-size model drawn at random on the
device and fed random tokens: its times are those of its size, its drafts say nothing.

Everything runs twice and the second time is told, so that nothing is compiled in it. Drafts of all
lengths run in engines made for the longest of them, as they do where the engine may choose.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from checkpoints import load, resolve
from jaxinfer.bench.against_transformers import mid_size
from jaxinfer.bench.measure import compilation, measure, numbers_tokenizer, run
from jaxinfer.bench.record import append
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.llm import TURN
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.slots import SPECULATIONS, Plan
from jaxinfer.qwen.chat import ChatTemplate
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import usable_kernels
from jaxinfer.qwen.params import Params, all_dense, init, nvidia_mix

TINY = ("tiny_qwen", "tiny_qwen-nvfp4")
MID = {"mid": all_dense, "mid-nvidia-mix": nvidia_mix}
NEXT_TURN = "<|im_end|>\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = 32
SNAPSHOTS = 64

Record = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model, and what it is asked.

    Attributes:
        cfg: its configuration.
        params: its parameters.
        tokenizer: its tokenizer.
        eos: ids that end an answer.
        turn: the token with which a message begins, or None.
        prompts: token ids by kind of text, all of the same number of pages, so that few shapes are
            compiled.
        next_turn: token ids between an answer and the next one.
        prefix: token ids of a long beginning.
    """

    cfg: Config
    params: Params
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    turn: int | None
    prompts: dict[str, list[list[int]]]
    next_turn: list[int]
    prefix: list[int]


def _tiny(name: str, size: int, prefix: int) -> Subject:
    """A checkpoint that ships, and the held-out texts beside it."""
    cfg, params = load(resolve(name), vision=False)
    directory = resolve(name).parent
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    generation = json.loads((directory / "generation_config.json").read_text())
    heldout, template = directory / "heldout", ChatTemplate.from_dir(directory)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    code = ids((heldout / "code.txt").read_text(encoding="utf-8"))
    starts = range(0, len(code) - size, (len(code) - size) // PROMPTS)
    lines = (heldout / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [
        ids(
            template.render(
                chat["messages"][:-1], chat["tools"], enable_thinking=chat["enable_thinking"]
            )
        )
        for chat in map(json.loads, lines)
    ]
    prompts = {
        "code": [code[start : start + size] for start in starts],
        "chat": [chat for chat in chats if size - CHUNK < len(chat) <= size],
    }
    eos, turn = tuple(generation["eos_token_id"]), tokenizer.token_to_id(TURN)
    return Subject(cfg, params, tokenizer, eos, turn, prompts, ids(NEXT_TURN), code[:prefix])


def _mid(name: str, size: int, prefix: int) -> Subject:
    """A model of half a billion random parameters; no token ends its answers."""
    cfg = Config.from_dict(mid_size(8))
    params = jax.block_until_ready(init(cfg, jax.random.key(0), MID[name]))
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, cfg.vocab_size, (PROMPTS + 1, max(size, prefix))).tolist()
    prompts = {"random": [row[:size] for row in drawn[:-1]]}
    tokenizer = numbers_tokenizer(cfg.vocab_size)
    return Subject(cfg, params, tokenizer, (), None, prompts, drawn[0][:16], drawn[-1][:prefix])


# --- workloads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """An engine to make.

    Attributes:
        speculation: None, or one of `SPECULATIONS`.
        lengths: numbers of drafts from which it chooses.
        longest: the most drafts for which it is made.
        steps: decode steps a call.
        streams: numbers of requests for which decode calls are compiled.
        context: tokens that a request may have.
    """

    speculation: str | None
    lengths: tuple[int, ...]
    longest: int
    steps: int
    streams: tuple[int, ...]
    context: int

    def build(self, subject: Subject, lengths: tuple[int, ...] | None = None) -> Engine:
        """Make it, or the same with other lengths."""
        slots = max(self.streams)
        kernels = usable_kernels(subject.cfg, jax.default_backend())
        return build_engine(
            subject.params,
            Plan(subject.cfg, self.speculation, self.longest, kernels=kernels),
            subject.tokenizer,
            subject.eos,
            slots=slots,
            context=self.context,
            # Pools as large as what is free would make other shapes, and compile them, each time.
            pages=slots * -(-self.context // CHUNK),
            snapshots=SNAPSHOTS,
            steps=self.steps,
            lengths=lengths or self.lengths,
            batches=self.streams,
            turn=subject.turn,
        )


def measure_streams(subject: Subject, setup: Setup, tokens: int) -> Iterator[Record]:
    """Answers of at most so many tokens, by the number of prompts together and the kind of text."""
    # It may reach for another prompt's pages only where that is what is measured.
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, prefix_cache=False)
    batches = {
        (count, kind): [texts[i % len(texts)] for i in range(count)]
        for count in setup.streams
        for kind, texts in subject.prompts.items()
    }
    with compilation() as seconds:
        if len(setup.lengths) > 1:
            # Which of them it takes when is its own choice: all must have been compiled.
            for length in setup.lengths:
                engine = setup.build(subject, (length,))
                for prompts in batches.values():
                    run(engine, prompts, sampling)
                del engine  # its pools make room for the next one's
        engine = setup.build(subject)
        for (count, kind), prompts in batches.items():
            result = measure(engine, prompts, sampling)
            yield {
                "what": "streams",
                "streams": count,
                "text": kind,
                "prompt_tokens": sum(map(len, prompts)),
                **result.summary(setup.steps),
                "compile_seconds_so_far": seconds,
            }


def measure_prefixes(subject: Subject, setup: Setup, tokens: int) -> Iterator[Record]:
    """What a request skips of a prompt whose beginning was there before, and what that saves."""
    engine = setup.build(subject)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    texts = list(subject.prompts.values())[-1]

    def next_turn(prompt: list[int], answer: list[int]) -> list[int]:
        said = answer[:-1] if answer[-1] in subject.eos else answer
        return prompt + said + subject.next_turn

    def other_end(prompt: list[int], answer: list[int]) -> list[int]:
        return subject.prefix + texts[1][:CHUNK]

    cases = {
        "two turns": (texts[0], next_turn),
        "shared prefix": (subject.prefix + texts[0][:CHUNK], other_end),
    }
    for what, (prompt, follow) in cases.items():
        for _ in range(2):
            engine.reset()
            first = run(engine, [prompt], sampling)
            answer = list(first.completions[0].token_ids)
            second = run(engine, [follow(prompt, answer)], sampling)
        usages = [result.completions[0].usage for result in (first, second)]
        yield {
            "what": what,
            "prompt_tokens": [usage.prompt_tokens for usage in usages],
            "cached_tokens": [usage.cached_tokens for usage in usages],
            "first_token_milliseconds": [round(1e3 * r.first, 3) for r in (first, second)],
        }


# --- command line ---------------------------------------------------------------------------------


def draft_lengths(text: str) -> tuple[int, ...]:
    """`"3"` is three drafts, `"1-3"` a choice from one to three."""
    low, _, high = text.partition("-")
    lengths = tuple(range(int(low), int(high or low) + 1))
    if not lengths or lengths[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1 on, or a range like 1-3")
    return lengths


def _setups(a: argparse.Namespace, context: int) -> Iterator[Setup]:
    longest = max(max(lengths) for lengths in a.drafts)
    for name in a.speculation:
        speculation = None if name == "none" else name
        for lengths in a.drafts if speculation else [(0,)]:
            for steps in a.steps:
                most = longest if speculation else 0
                yield Setup(speculation, lengths, most, steps, tuple(a.streams), context)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny_qwen", choices=(*TINY, *MID))
    names = ("none", *SPECULATIONS)
    parser.add_argument("--speculation", nargs="+", default=names, choices=names)
    parser.add_argument(
        "--drafts", nargs="+", type=draft_lengths, default=[(3,)], help="each a number, or a range"
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", nargs="+", type=int, default=[4], help="decode steps a call")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, at most")
    parser.add_argument("--prefix", type=int, help="tokens that two requests share")
    parser.add_argument("--quick", action="store_true", help="a dry run of a minute or two")
    parser.add_argument("--out", type=Path, help="file to append to")
    a = parser.parse_args()
    if a.quick:
        a.speculation, a.drafts, a.streams, a.steps = ["none", "mtp"], [(2,)], [2], [1]
        a.tokens, a.prompt, a.prefix = 16, 2 * CHUNK, 4 * CHUNK
    prefix = a.prefix or (1536 if a.model in TINY else 4096)
    subject = (_tiny if a.model in TINY else _mid)(a.model, a.prompt, prefix)
    room = max(prefix + CHUNK, a.prompt + len(subject.next_turn) + a.tokens) + a.tokens
    context = min(subject.cfg.max_position_embeddings, -(-room // 256) * 256)
    for number, setup in enumerate(_setups(a, context)):
        common = asdict(setup) | {"model": a.model}
        del common["streams"]
        for record in measure_streams(subject, setup, a.tokens):
            append(a.out, **common, **record)
        if number == 0:
            for record in measure_prefixes(subject, setup, a.tokens):
                append(a.out, **common, **record)


if __name__ == "__main__":
    main()
