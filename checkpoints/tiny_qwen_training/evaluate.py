"""Measure the shipped `tiny_qwen` checkpoints on their held-out texts.

    python -m checkpoints.tiny_qwen_training.evaluate --out docs/measurements/tiny_qwen

appends to `losses.jsonl` (loss of both checkpoints, as the engine serves them) and
`acceptance.jsonl` (drafted tokens that hold, by kind and length of draft), then draws the charts
from these and from `training_curve.jsonl`. `--only losses|acceptance|charts` does one part.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tqdm import tqdm

from checkpoints import load, resolve
from checkpoints.tiny_qwen_training.dataset import KINDS
from checkpoints.tiny_qwen_training.tokenizer import CHECKPOINT, END_OF_TEXT
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine, Request
from jaxinfer.engine.request import SamplingParams, Usage
from jaxinfer.engine.slots import SPECULATIONS, Plan
from jaxinfer.qwen import model
from jaxinfer.qwen.cache import Place
from jaxinfer.qwen.chat import ChatTemplate
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import PREFILL
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Pieces, State, init_state, own_pages

OUT = Path("docs/measurements/tiny_qwen")
CHECKPOINTS = {"bf16": "tiny_qwen", "nvfp4": "tiny_qwen-nvfp4"}
WINDOW, ROWS = 2048, 4
"""Tokens that the model sees at once, as in training; windows computed together."""

LENGTHS = (1, 2, 3, 4)
COLOURS = ("#4c72b0", "#dd8452", "#55a868")
PROMPTS, CODE_PROMPT, NEW_TOKENS, SLOTS = 24, 64, 96, 8
LOOP = 32
SAMPLING = {
    "greedy": SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_k=20, top_p=0.95),
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """A held-out text.

    Attributes:
        documents: token ids of each document, its end token included.
        size: bytes of UTF-8 in all tokens that are predicted, control tokens as they are written
            but without the end tokens.
        prompts: token ids to continue.
    """

    documents: list[list[int]]
    size: int
    prompts: list[list[int]]


def texts(tokenizer: Tokenizer) -> dict[str, Text]:
    """The held-out texts that ship with the checkpoints."""
    code = (CHECKPOINT / "heldout" / "code.txt").read_text(encoding="utf-8").split(END_OF_TEXT)
    chats = (CHECKPOINT / "heldout" / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    whole = [_render(json.loads(line), None, False) for line in chats]
    asked = [_render(json.loads(line), -1, True) for line in chats[:PROMPTS]]
    return {
        "code": _text(tokenizer, code, _openings(tokenizer, code)),
        "chat": _text(tokenizer, whole, [_ids(tokenizer, text) for text in asked]),
    }


def _render(chat: Mapping[str, Any], stop: int | None, prompt: bool) -> str:
    return ChatTemplate.from_dir(CHECKPOINT).render(
        chat["messages"][:stop],
        chat["tools"],
        add_generation_prompt=prompt,
        enable_thinking=chat["enable_thinking"],
        preserve_thinking=chat["preserve_thinking"],
    )


def _openings(tokenizer: Tokenizer, documents: Sequence[str]) -> list[list[int]]:
    """Prompts of code that begin at evenly spaced lines of all documents together."""
    lines = "".join(documents).splitlines(keepends=True)
    starts = [len(lines) * i // PROMPTS for i in range(PROMPTS)]
    return [_ids(tokenizer, "".join(lines[s : s + CODE_PROMPT]))[:CODE_PROMPT] for s in starts]


def _text(tokenizer: Tokenizer, documents: Sequence[str], prompts: list[list[int]]) -> Text:
    encoded = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    first = sum(len(d[: e.offsets[0][1]].encode()) for d, e in zip(documents, encoded, strict=True))
    end = _ids(tokenizer, END_OF_TEXT)
    size = sum(len(document.encode()) for document in documents) - first
    return Text([e.ids + end for e in encoded], size, prompts)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@partial(jax.jit, static_argnums=1, donate_argnums=2)
def _forward(
    params: Params, cfg: Config, state: State, tokens: jax.Array, pieces: Pieces
) -> tuple[State, jax.Array, jax.Array]:
    """Pieces of `tokens [B, CHUNK + 1]`: log probabilities `[B, CHUNK, V]` of what follows each.

    The second are the MTP head's, of the token after the one that follows.
    """
    positions = model.text_positions(pieces.start, CHUNK)
    place = Place(pieces.table, pieces.start, pieces.valid)
    x, following = (model.embed(params, cfg, t) for t in (tokens[:, :-1], tokens[:, 1:]))
    hidden, state = model.prefill(params, cfg, x, state, pieces, positions)
    ahead, state = model.draft(params, cfg, following, hidden, state, place, positions, PREFILL)
    next_, later = (jax.nn.log_softmax(model.logits(params, h, PREFILL)) for h in (hidden, ahead))
    return state, next_, later


@jax.jit
def _surprise(scores: jax.Array, targets: jax.Array, counts: jax.Array) -> jax.Array:
    """Sum of the negative log probabilities of the first `counts [B]` targets of each row."""
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked, where=jnp.arange(CHUNK) < counts[:, None])


@jax.jit
def _difference(a: jax.Array, b: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over the first `counts [B]` of each row: KL(a || b), and likeliest tokens shared."""
    real = jnp.arange(CHUNK) < counts[:, None]
    same = jnp.argmax(a, -1) == jnp.argmax(b, -1)
    return jnp.sum(jnp.sum(jnp.exp(a) * (a - b), -1), where=real), jnp.sum(same, where=real)


def measure_losses() -> Iterator[Record]:
    """Loss of each checkpoint on each text, and how far NVFP4 is from bf16."""
    models = {name: load(resolve(place), vision=False) for name, place in CHECKPOINTS.items()}
    for kind, text in texts(_tokenizer()).items():
        # A window's last token is the first of the next one, so that it is predicted once.
        windows = sorted(
            (
                ids[s : s + WINDOW + 1]
                for ids in text.documents
                for s in range(0, len(ids) - 1, WINDOW)
            ),
            key=len,
        )
        sums: defaultdict[str, float] = defaultdict(float)
        for i in tqdm(range(0, len(windows), ROWS), desc=f"loss on {kind}"):
            _add_losses(sums, models, windows[i : i + ROWS])
        for name in CHECKPOINTS:
            nats = sums[name] / sums["tokens"]
            yield {
                "checkpoint": name,
                "text": kind,
                "documents": len(text.documents),
                "tokens": int(sums["tokens"]),
                "bytes": text.size,
                "nats_per_token": round(nats, 4),
                "perplexity": round(float(np.exp(nats)), 4),
                "bits_per_byte": round(sums[name] / np.log(2) / text.size, 4),
                "mtp_tokens": int(sums["mtp_tokens"]),
                "mtp_nats_per_token": round(sums[f"{name}_mtp"] / sums["mtp_tokens"], 4),
                "kl_from_bf16": round(sums[f"{name}_kl"] / sums["tokens"], 6),
                "top1_agreement_with_bf16": round(sums[f"{name}_same"] / sums["tokens"], 5),
            }


def _add_losses(
    sums: defaultdict[str, float],
    models: Mapping[str, tuple[Config, Params]],
    windows: Sequence[Sequence[int]],
) -> None:
    """Add what up to `ROWS` windows give to the sums."""
    targets = np.array([max(0, len(w) - 1) for w in windows] + [0] * (ROWS - len(windows)))
    chunks = -(-targets.max() // CHUNK)
    tokens = np.zeros((ROWS, chunks * CHUNK + 2), np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window)] = window
    pages = 1 + ROWS * WINDOW // CHUNK
    states = {name: init_state(cfg, ROWS, pages, rows=1) for name, (cfg, _) in models.items()}
    for start in range(0, chunks * CHUNK, CHUNK):
        piece = jnp.asarray(tokens[:, start : start + CHUNK + 2])
        valid = np.clip(targets - start, 0, CHUNK)
        pieces = _pieces(start, valid)
        ahead_valid = np.clip(targets - 1 - start, 0, CHUNK)
        reference = None
        for name, (cfg, params) in models.items():
            states[name], scores, ahead = _forward(params, cfg, states[name], piece[:, :-1], pieces)
            reference = scores if reference is None else reference
            kl, same = _difference(reference, scores, valid)
            sums[name] += float(_surprise(scores, piece[:, 1:-1], valid))
            sums[f"{name}_mtp"] += float(_surprise(ahead, piece[:, 2:], ahead_valid))
            sums[f"{name}_kl"] += float(kl)
            sums[f"{name}_same"] += int(same)
        sums["tokens"] += int(valid.sum())
        sums["mtp_tokens"] += int(ahead_valid.sum())


def _pieces(start: int, valid: np.ndarray) -> Pieces:
    """The pieces of all windows that begin at `start`, each in a slot and pages of its own."""
    slot = jnp.arange(ROWS)
    return Pieces(
        table=own_pages(ROWS, WINDOW),
        slot=slot,
        start=jnp.full(ROWS, start),
        valid=jnp.asarray(valid),
        source=slot,
        snapshot=jnp.full(ROWS, ROWS),
        fresh=jnp.asarray(valid > 0),
    )


@dataclass(frozen=True)
class Step:
    """One request's share of a decode step: tokens verified, held and delivered."""

    drafted: int
    accepted: int
    tokens: int


def measure_acceptance() -> Iterator[Record]:
    """Share of drafted tokens that hold, by kind and length of draft, text and sampling."""
    cfg, params = load(resolve(CHECKPOINTS["bf16"]), vision=False)
    tokenizer = _tokenizer()
    heldout = texts(tokenizer)
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    plans = [Plan(cfg, None, 0)]
    plans += [Plan(cfg, kind, length) for kind in SPECULATIONS for length in LENGTHS]
    plain: dict[tuple[str, str], list[list[int]]] = {}
    for plan in tqdm(plans, desc="kinds and lengths of draft"):
        # One step a call and one length, so that every step's drafts are told apart.
        engine = build_engine(
            params,
            plan,
            tokenizer,
            generation["eos_token_id"],
            slots=SLOTS,
            context=WINDOW,
            steps=1,
            lengths=(plan.drafts,),
        )
        for kind, text in heldout.items():
            for mode, sampling in SAMPLING.items():
                outputs, steps = _generate(engine, text.prompts, sampling)
                expected = plain.setdefault((kind, mode), outputs)
                yield {
                    "speculation": plan.speculation,
                    "draft_length": plan.drafts,
                    "text": kind,
                    "sampling": mode,
                    "prompts": len(outputs),
                    "same_as_without": sum(a == b for a, b in zip(expected, outputs, strict=True)),
                    "completion_tokens": sum(map(len, outputs)),
                    "ending_in_a_loop": sum(map(_loops, outputs)),
                    **_counts(steps, plan.drafts),
                }


def _generate(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> tuple[list[list[int]], list[Step]]:
    """Run all prompts; their tokens, and every decode step of every request."""
    requests = [engine.submit(p, replace(sampling, seed=i)) for i, p in enumerate(prompts)]
    outputs: defaultdict[Request, list[int]] = defaultdict(list)
    before: dict[Request, Usage] = {}
    steps: list[Step] = []
    while engine.busy:
        for request, chunk in engine.step():
            # A request's first token comes from its prompt, not from a decode step.
            if request in before:
                drafted = chunk.usage.drafted - before[request].drafted
                accepted = chunk.usage.accepted - before[request].accepted
                steps.append(Step(drafted, accepted, len(chunk.token_ids)))
            before[request] = chunk.usage
            outputs[request].extend(chunk.token_ids)
    return [outputs[request] for request in requests], steps


def _loops(tokens: Sequence[int]) -> bool:
    """Whether the last `LOOP` tokens are one short piece again and again."""
    tail = tokens[-LOOP:]
    return len(tail) == LOOP and any(tail[p:] == tail[:-p] for p in range(1, LOOP // 2 + 1))


def _counts(steps: Sequence[Step], length: int) -> Record:
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    return {
        "decode_steps": len(steps),
        "tokens_per_step": round(sum(s.tokens for s in steps) / len(steps), 4),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "drafted_at": [sum(s.drafted > i for s in steps) for i in range(length)],
        "accepted_at": [sum(s.accepted > i for s in steps) for i in range(length)],
    }


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def provenance() -> Record:
    """What a reader needs to repeat a measurement."""
    module = "checkpoints.tiny_qwen_training.evaluate"
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "device": _device(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "jaxlib", "tokenizers")},
    }


def _device() -> str:
    kind, cpuinfo = jax.devices()[0].device_kind, Path("/proc/cpuinfo")
    if kind != "cpu":
        return kind
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def draw(out: Path) -> None:
    """Draw every chart whose measurements are there."""
    for name, chart in CHARTS.items():
        file = out / f"{name}.jsonl"
        if file.is_file():
            figure = chart([json.loads(line) for line in file.read_text().splitlines()])
            for axes in figure.axes:
                axes.grid(axis="y", color="0.9")
                axes.set_axisbelow(True)
                axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(out / f"{name}.png", dpi=90)
            plt.close(figure)


def _curve_chart(curve: Sequence[Record]) -> Figure:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, colour in zip(("train", "code", "chat"), COLOURS, strict=True):
        points = [(line["tokens"] / 1e6, line[key]) for line in curve if key in line]
        label = f"held-out {key}" if key in KINDS else "training batches, half of each"
        axes.plot(*zip(*points, strict=True), color=colour, label=label)
    axes.set(xlabel="tokens seen, millions", ylabel="loss, nats a token", yscale="log")
    axes.set_yticks(ticks := (0.2, 0.5, 1, 2, 5), map(str, ticks))
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure


def _loss_chart(losses: Sequence[Record]) -> Figure:
    found = {(line["checkpoint"], line["text"]): line for line in losses}
    bars = [(kind, head) for kind in KINDS for head in ("", "mtp_")]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for shift, name in enumerate(CHECKPOINTS):
        heights = [found[name, kind][f"{head}nats_per_token"] for kind, head in bars]
        places = np.arange(len(bars)) + 0.4 * (shift - 0.5)
        drawn = axes.bar(places, heights, 0.38, color=COLOURS[shift + 1], label=name)
        axes.bar_label(drawn, fmt="%.3f", padding=2)
    heads = [f"{kind},\n{'MTP head' if head else 'next token'}" for kind, head in bars]
    axes.set_xticks(range(len(bars)), heads)
    axes.set(ylabel="held-out loss, nats a token", ymargin=0.1)
    axes.legend(frameon=False)
    return figure


def _acceptance_chart(lines: Sequence[Record]) -> Figure:
    keys = ("text", "sampling", "speculation", "draft_length")
    found = {tuple(line[key] for key in keys): line for line in lines}
    names = {"acceptance": "share of drafts accepted", "tokens_per_step": "tokens a decode step"}
    figure, grid = plt.subplots(2, 2, figsize=(8, 6), layout="constrained", sharey="row")
    for axes, (value, kind) in zip(grid.flat, product(names, KINDS), strict=True):
        for (i, drafter), mode in product(enumerate(SPECULATIONS), SAMPLING):
            heights = [found[kind, mode, drafter, length][value] for length in LENGTHS]
            style = {"color": COLOURS[i], "linestyle": "-" if mode == "greedy" else ":"}
            axes.plot(LENGTHS, heights, marker="o", label=f"{drafter}, {mode}", **style)
        axes.set(title=kind, ylabel=names[value], xlabel="tokens drafted a step", xticks=LENGTHS)
        axes.label_outer()
    plt.setp(grid.flat, ylim=(0, None))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


CHARTS = {"training_curve": _curve_chart, "losses": _loss_chart, "acceptance": _acceptance_chart}
MEASUREMENTS = {"losses": measure_losses, "acceptance": measure_acceptance}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", choices=(*MEASUREMENTS, "charts"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, measure in MEASUREMENTS.items():
        if options.only in (None, name):
            with (options.out / f"{name}.jsonl").open("a") as lines:
                for record in measure():
                    print(json.dumps(record | provenance()), file=lines, flush=True)
    draw(options.out)


if __name__ == "__main__":
    main()
