"""Qwen3.6-35B-A3B at full size with random weights: does it load, does it decode, how long.

    python -m jaxinfer.bench.full_size --weights nvidia-mix
    python -m jaxinfer.bench.full_size --weights bf16 --drafts 3 --batch 8
    python -m jaxinfer.bench.full_size --weights DIRECTORY

The first two draw the weights on the device; the last reads a checkpoint, for example one written
by `random_checkpoint`. Random weights say nothing about text, so a run checks that every number is
finite and that neither company nor speculation changes the tokens.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from checkpoints import LoadReport, load, step_bytes
from jaxinfer.bench.measure import Run, compilation, measure, numbers_tokenizer
from jaxinfer.bench.record import append
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.slots import Plan
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import usable_kernels
from jaxinfer.qwen.params import Params, all_dense, init, nvidia_mix
from jaxinfer.qwen.published import RAW

FORMATS = {"nvidia-mix": nvidia_mix, "bf16": all_dense}


def obtain(weights: str) -> tuple[Config, Params, dict[str, float]]:
    """Configuration, parameters, and the seconds that each stage took."""
    if weights in FORMATS:
        cfg = replace(Config.from_dict(RAW), vision=None)
        began = time.perf_counter()
        params = jax.block_until_ready(init(cfg, jax.random.key(0), FORMATS[weights]))
        return cfg, params, {"drawing": time.perf_counter() - began}
    report = LoadReport()
    cfg, params = load(weights, vision=False, report=report)
    return cfg, params, report.seconds


def build(params: Params, plan: Plan, slots: int, context: int) -> Engine:
    """An engine as a user gets it, but that drafts as many tokens as it can in every step."""
    tokenizer = numbers_tokenizer(plan.cfg.vocab_size)
    lengths = (plan.drafts,)
    return build_engine(params, plan, tokenizer, (), slots=slots, context=context, lengths=lengths)


def prefill_64(run: Run) -> float:
    """Milliseconds for 64 tokens of the prompt of a lone request."""
    # Results are read in the order of the calls, and those of its prompt come first.
    seconds = run.reads[run.stats.counters.prefill_calls - 1]
    return 1e3 * seconds / -(-run.completions[0].usage.prompt_tokens // CHUNK)


def check(run: Run) -> None:
    """Stop if a token's log probability is not a finite number of at most 0."""
    for completion in run.completions:
        for logprob in completion.logprobs or ():
            if not (math.isfinite(logprob) and logprob <= 0):
                raise SystemExit(f"a token has log probability {logprob}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="nvidia-mix", help="nvidia-mix, bf16, or a directory")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--drafts", type=int, default=0, help="also run with so many MTP drafts")
    parser.add_argument("--batch", type=int, default=1, help="also run so many prompts together")
    parser.add_argument("--out", type=Path, help="file to append to")
    a = parser.parse_args()
    if a.prompt + a.tokens > a.context:
        parser.error(f"{a.prompt} + {a.tokens} tokens need --context {a.prompt + a.tokens}")

    cfg, params, seconds = obtain(a.weights)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    append(
        a.out,
        what="load",
        weights=a.weights,
        bytes_on_device=held,
        seconds={stage: round(s, 2) for stage, s in seconds.items()},
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, cfg.vocab_size, (a.batch, a.prompt)).tolist()
    sampling = SamplingParams(
        max_tokens=a.tokens, temperature=0.0, logprobs=True, prefix_cache=False
    )
    first: dict[int, tuple[int, ...]] = {}
    changed = []
    plain = Plan(cfg, None, 0, kernels=usable_kernels(cfg, jax.default_backend()))
    drafting = [replace(plain, speculation="mtp", drafts=a.drafts)] if a.drafts else []
    for plan in [plain, *drafting]:
        with compilation() as compiled:
            engine = build(params, plan, a.batch, a.context)
            for rows in dict.fromkeys((1, a.batch)):
                run = measure(engine, prompts[:rows], sampling)
                check(run)
                tokens = [completion.token_ids for completion in run.completions]
                same = all(first.setdefault(i, own) == own for i, own in enumerate(tokens))
                changed += [] if same else [f"{plan.drafts} drafts, {rows} rows"]
                append(
                    a.out,
                    what="decode",
                    weights=a.weights,
                    drafts=plan.drafts,
                    rows=rows,
                    steps_per_call=engine.options.steps,
                    prompt=a.prompt,
                    context=a.context,
                    tokens=tokens[0],
                    same_tokens=same,
                    weight_bytes_a_token=step_bytes(cfg, params, 1),
                    prefill_64_milliseconds=round(prefill_64(run), 3) if rows == 1 else None,
                    **run.summary(engine.options.steps),
                    compile_seconds_so_far=compiled,
                    pages=engine.options.pages,
                    peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
                )
        del engine  # its pools make room for the next one's
    if changed:
        raise SystemExit(f"other tokens than the first run of the same prompts: {changed}")


if __name__ == "__main__":
    main()
