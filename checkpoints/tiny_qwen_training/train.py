"""Train `tiny_qwen` with the engine's own forward pass.

    python -m checkpoints.tiny_qwen_training.dataset --out DATA
    python -m checkpoints.tiny_qwen_training.train --data DATA --out OUT --seconds 420

writes `OUT/model-*.safetensors` in the published layout (bfloat16), `OUT/config.json` and
`OUT/curve.jsonl`, one line every `LOG_EVERY` steps.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from checkpoints.export import save_published
from checkpoints.tiny_qwen_training.architecture import CONFIG
from checkpoints.tiny_qwen_training.dataset import KINDS
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.model import train_forward
from jaxinfer.qwen.params import init

MTP_WEIGHT = 0.3
PEAK_RATE, WARMUP = 3e-3, 100
LOG_EVERY = 20
HELDOUT_ROWS = 32


@struct.dataclass
class TrainState:
    """Parameters in float32 and what AdamW keeps of them."""

    # A tree of arrays; optax's own types do not know dataclasses.
    params: Any
    optimiser: optax.OptState


def losses(params: Any, cfg: Config, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy, in nats a token, of the next token and of the MTP head's.

    Args:
        params: float32 or bfloat16 parameters.
        cfg: the model, whose `dtype` is that of the computation.
        tokens: `[B, T + 1]`, `T` a multiple of 64.
    """
    scores, ahead = train_forward(params, cfg, tokens[:, :-1])
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(scores, tokens[:, 1:]).mean(), entropy(ahead, tokens[:, 2:]).mean()


def adamw() -> optax.GradientTransformation:
    """AdamW's direction, before the learning rate; decay on matrices only."""

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda a: a.shape[-1] > 64 and a.ndim >= 2, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.05, mask=is_matrix),
    )


def rate(step: int, steps: int) -> float:
    """Learning rate: warm-up, then a cosine down to a hundredth of the peak."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def train_step(
    state: TrainState, cfg: Config, tokens: jax.Array, rate: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One step; returns the state and the two losses `[2]`."""

    def objective(params: Any) -> tuple[jax.Array, jax.Array]:
        following, ahead = losses(params, cfg, tokens)
        return following + MTP_WEIGHT * ahead, jnp.stack([following, ahead])

    gradients, parts = jax.grad(objective, has_aux=True)(state.params)
    direction, kept = adamw().update(gradients, state.optimiser, state.params)
    params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
    return TrainState(params, kept), parts


evaluate = partial(jax.jit, static_argnums=1)(lambda *a: jnp.stack(losses(*a)))


class Batches:
    """Random windows of the token arrays, half code and half chat."""

    def __init__(self, data: Path, rows: int, length: int, seed: int) -> None:
        self.arrays = [np.load(data / f"{kind}_train.npy", mmap_mode="r") for kind in KINDS]
        self.rows, self.length = rows, length
        self.rng = np.random.default_rng(seed)

    def next(self) -> np.ndarray:
        """`[rows, length + 1]` int32."""
        picks = []
        for row in range(self.rows):
            array = self.arrays[row % len(self.arrays)]
            start = self.rng.integers(len(array) - self.length - 1)
            picks.append(array[start : start + self.length + 1])
        return np.stack(picks).astype(np.int32)


def heldout(data: Path, kind: str, length: int) -> np.ndarray:
    """The first windows of a held-out array, `[HELDOUT_ROWS, length + 1]` int32."""
    array = np.load(data / f"{kind}_heldout.npy")
    count = min(HELDOUT_ROWS, (len(array) - 1) // length // 8 * 8)
    return np.stack([array[i * length : (i + 1) * length + 1] for i in range(count)]).astype(
        np.int32
    )


def train(data: Path, out: Path, seconds: float, rows: int, length: int, seed: int) -> None:
    """Train until about `seconds` after the call; the first steps are timed to set how many."""
    called = time.perf_counter()
    compute = replace(Config.from_dict(CONFIG), dtype="bfloat16")

    def fresh() -> TrainState:
        params: Any = init(replace(compute, dtype="float32"), jax.random.key(seed))
        return TrainState(params, adamw().init(params))

    batches = Batches(data, rows, length, seed)
    state, parts = train_step(fresh(), compute, batches.next(), jnp.float32(0))
    size = sum(a.size for a in jax.tree.leaves(state.params))
    print(f"{size:,} parameters, {rows} x {length} tokens a step, {jax.devices()[0]}", flush=True)
    parts.block_until_ready()
    began = time.perf_counter()
    for _ in range(5):
        state, parts = train_step(state, compute, batches.next(), jnp.float32(0))
    parts.block_until_ready()
    step_seconds = (time.perf_counter() - began) / 5
    left = seconds - (time.perf_counter() - called)
    steps = max(2 * WARMUP, int(left / step_seconds))
    print(
        f"compiled in {began - called:.0f} s, {1e3 * step_seconds:.1f} ms a step: {steps} steps",
        flush=True,
    )

    state = fresh()
    tests = {kind: heldout(data, kind, length) for kind in KINDS}
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with (out / "curve.jsonl").open("w") as curve:
        for step in range(1, steps + 1):
            now = jnp.float32(rate(step - 1, steps))
            state, parts = train_step(state, compute, batches.next(), now)
            if step % LOG_EVERY and step != steps:
                continue
            line: dict[str, float] = {"step": step, "tokens": step * rows * length}
            line["seconds"] = round(time.perf_counter() - began, 1)
            line["train"], line["train_mtp"] = (round(float(x), 4) for x in parts)
            if step % (10 * LOG_EVERY) == 0 or step == steps:
                for kind, tokens in tests.items():
                    found = np.mean(
                        [
                            evaluate(state.params, compute, tokens[i : i + 8])
                            for i in (0, 8, 16, 24)
                        ],
                        0,
                    )
                    line[kind], line[f"{kind}_mtp"] = (round(float(x), 4) for x in found)
            curve.write(json.dumps(line) + "\n")
            curve.flush()
            print(line, flush=True)
            if not math.isfinite(line["train"]):
                raise SystemExit("the loss is not finite")
    save_published(out, CONFIG, state.params, dtype="bfloat16", shard_bytes=8 << 20)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what dataset.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420, help="wall time in all")
    parser.add_argument("--rows", type=int, default=32, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    train(a.data, a.out, a.seconds, a.rows, a.length, a.seed)


if __name__ == "__main__":
    main()
