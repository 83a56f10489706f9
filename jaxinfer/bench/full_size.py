"""Qwen3.6-35B-A3B at full size with random weights: does it load, does it decode, how long.

    python -m jaxinfer.bench.full_size --weights nvidia-mix
    python -m jaxinfer.bench.full_size --weights bf16
    python -m jaxinfer.bench.full_size --weights DIRECTORY

The first two draw the weights on the device; the last reads a checkpoint, for example one written
by `random_checkpoint`. Random weights say nothing about text, so a run checks that every number is
finite and that speculation does not change the tokens.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import LoadReport, load, step_bytes
from jaxinfer.bench.record import append
from jaxinfer.engine.steps import Plan, decode_step, init_slots, prefill_step
from jaxinfer.qwen.config import CHUNK, Config
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


def generate(
    params: Params, plan: Plan, prompt: np.ndarray, count: int, context: int
) -> tuple[list[int], dict[str, float]]:
    """Greedy tokens after a prompt, and times in milliseconds (compilation apart)."""
    slots = init_slots(plan, 1, context)
    times: dict[str, float] = {}
    tokens: list[int] = []
    chunks = [prompt[i : i + CHUNK] for i in range(0, len(prompt), CHUNK)]
    began = time.perf_counter()
    for number, chunk in enumerate(chunks):
        following = -1 if number == len(chunks) - 1 else chunks[number + 1][0]
        padded = jnp.asarray(np.pad(chunk, (0, CHUNK - len(chunk))).astype(np.int32))
        slots, token, logprob = prefill_step(
            params,
            plan,
            slots,
            jnp.int32(0),
            padded,
            jnp.int32(len(chunk)),
            jnp.int32(following),
        )
        token.block_until_ready()
        now = time.perf_counter()
        times["first_prefill_with_compile" if number == 0 else "prefill_64"] = 1e3 * (now - began)
        began = now
    check(float(logprob))
    tokens.append(int(token))
    steps = []
    while len(tokens) < count:
        began = time.perf_counter()
        slots, out = decode_step(params, plan, slots)
        new = int(out.count[0])
        steps.append(1e3 * (time.perf_counter() - began))
        tokens += out.tokens[0, :new].tolist()
        for logprob in out.logprobs[0, :new].tolist():
            check(logprob)
    times["first_step_with_compile"] = steps[0]
    times["step"] = float(np.median(steps[1:]))
    return tokens[:count], times


def check(logprob: float) -> None:
    """Stop if a token's log probability is not a finite number of at most 0."""
    if not (math.isfinite(logprob) and logprob <= 0):
        raise SystemExit(f"a token has log probability {logprob}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default="nvidia-mix", help="nvidia-mix, bf16, or a directory")
    parser.add_argument("--prompt", type=int, default=150, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=0, help="also run with so many MTP drafts")
    parser.add_argument("--out", type=Path, help="file to append to")
    a = parser.parse_args()

    cfg, params, seconds = obtain(a.weights)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    append(
        a.out,
        what="load",
        weights=a.weights,
        bytes_on_device=held,
        seconds={stage: round(s, 2) for stage, s in seconds.items()},
    )
    prompt = np.random.default_rng(0).integers(0, 248000, a.prompt)
    plans = [Plan(cfg, None, 0)] + ([Plan(cfg, "mtp", a.drafts)] if a.drafts else [])
    found = []
    for plan in plans:
        tokens, times = generate(params, plan, prompt, a.tokens, a.context)
        found.append(tokens)
        append(
            a.out,
            what="decode",
            weights=a.weights,
            drafts=plan.drafts,
            prompt=a.prompt,
            tokens=tokens,
            weight_bytes_a_token=step_bytes(cfg, params, 1),
            milliseconds={name: round(t, 2) for name, t in times.items()},
            peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        )
    if any(tokens != found[0] for tokens in found):
        raise SystemExit("speculation changed the tokens")


if __name__ == "__main__":
    main()
