"""What each choice is worth: plain XLA, then one family of kernels after another, then the rest.

Each variant is a decode benchmark in a process of its own, since some are flags that XLA reads when
it starts, and since memory must be free again. A variant differs from the one before in one thing.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.bench.decode import Record
from jaxinfer.qwen.mode import FAMILIES


@dataclass(frozen=True)
class Variant:
    """A way to decode.

    Attributes:
        name: what is new in it.
        kernels: families that use kernels.
        command_buffers: whether XLA makes CUDA graphs.
        steps: decode steps a call.
    """

    name: str
    kernels: tuple[str, ...]
    command_buffers: bool
    steps: int


def variants(families: Sequence[str] = FAMILIES, steps: int = 4) -> list[Variant]:
    """From plain XLA to all that the engine does."""
    made = [Variant("plain XLA", (), False, 1)]
    for count, family in enumerate(families, 1):
        made.append(Variant(f"+ {family} kernels", tuple(families[:count]), False, 1))
    made.append(Variant("+ command buffers", tuple(families), True, 1))
    made.append(Variant(f"+ {steps} steps a call", tuple(families), True, steps))
    return made


def measure_ablation(
    chosen: Sequence[Variant],
    model: str,
    points: Sequence[str],
    *,
    calls: int,
    timeout: float,
) -> Iterator[Record]:
    """Run the decode benchmark in each variant; one that fails becomes a line that says so.

    Args:
        chosen: variants.
        model: as `jaxinfer bench decode --model`.
        points: as its `--at`.
        calls: decode calls that are timed.
        timeout: seconds that a variant may take.
    """
    for variant in chosen:
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "decode.jsonl"
            command = [sys.executable, "-m", "jaxinfer", "bench", "decode", "--model", model]
            command += [argument for point in points for argument in ("--at", point)]
            command += ["--kernels", ",".join(variant.kernels) or "none"]
            command += ["--steps", str(variant.steps), "--calls", str(calls), "--out", str(out)]
            command += [] if variant.command_buffers else ["--no-command-buffers"]
            failure = _run(command, timeout)
            lines = out.read_text().splitlines() if out.is_file() else []
        for line in lines:
            # It ran as the other benchmark; this is the one that is told of.
            own = {key: v for key, v in json.loads(line).items() if key not in ("bench", "command")}
            yield {"variant": variant.name, **own}
        if failure:
            yield {"variant": variant.name, "model": model, "failure": failure}


def _run(command: Sequence[str], timeout: float) -> str | None:
    """Why a command failed; None if it did not."""
    try:
        done = subprocess.run(
            command, env=os.environ, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"took more than {timeout:g} s"
    return done.stderr[-500:].strip() or f"status {done.returncode}" if done.returncode else None
