"""What a device did and when, from the profiler's trace: kernels, their families, and gaps."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax

RULES: Sequence[tuple[str, str]] = (
    (r"sdpa|fmha|flash", "attention"),
    (r"fprop|convolve|winograd", "convolutions"),
    (r"gemm|gemv|nvjet|cutlass|cublas|xmma|^dot", "matrix products of libraries"),
    (r"fusion|^loop_|^input_|^wrapped_", "XLA's fusions"),
    (r"memcpy|memset|^copy", "copies"),
    (r"expert|moe|router|gate_up|weighted_sum", "experts"),
    (r"delta|gdn|conv1d|causal", "delta"),
    (r"attention|attend|rotary", "attention"),
    (r"head|logit|sampl|likeliest|argmax|top_?k|sort", "sampling"),
    (r"project|matmul|qkv|linear|norm", "projection"),
)
"""A kernel is of the family of the first pattern that its name matches, capitals ignored."""
OTHER = "other"

_NOT_KERNELS = re.compile(r"^(end: |while|Thread|Thunk|Slinky|Pjit)|::|Wait for")
"""What XLA's threads on a CPU do besides kernels, or around them."""


class Kernel(NamedTuple):
    """One run of a kernel; microseconds."""

    name: str
    start: float
    duration: float


def record(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels that the device runs while `run` is called, which must wait for them."""
    options = jax.profiler.ProfileOptions()
    # What the host does would crowd the trace, and slow it down.
    options.python_tracer_level = 0
    with TemporaryDirectory() as name:
        jax.profiler.start_trace(name, profiler_options=options)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(name).rglob("*.trace.json.gz"))
        if not files:
            raise ValueError("the profiler wrote no trace; is another one at work on this device?")
        return kernels(json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"])


def kernels(events: Sequence[dict[str, Any]]) -> list[Kernel]:
    """Kernels of a trace in Chrome's format, in order of their start.

    On a GPU those in its streams; on a CPU, where there is no such thing, what XLA's threads did.
    """
    processes = _names(events, "process_name", ("pid",))
    threads = _names(events, "thread_name", ("pid", "tid"))
    gpu = {key for key, name in processes.items() if "/device:GPU" in name}
    lanes = {
        key
        for key, name in threads.items()
        if (name.startswith("Stream #") if gpu else name.startswith("tf_XLA"))
        and (not gpu or key[:1] in gpu)
    }
    found = [
        Kernel(event["name"], float(event["ts"]), float(event.get("dur", 0.0)))
        for event in events
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in lanes
    ]
    if not gpu:
        found = [kernel for kernel in found if not _NOT_KERNELS.search(kernel.name)]
    return sorted(found, key=lambda kernel: kernel.start)


def family(name: str) -> str:
    """What a kernel is for, by its name; see `RULES`."""
    return next((kind for rule, kind in RULES if re.search(rule, name, re.IGNORECASE)), OTHER)


@dataclass(frozen=True)
class Breakdown:
    """Where the time of some steps went; microseconds a step.

    Attributes:
        families: time of each family of kernels, longest first.
        names: time of each kernel with that name, and how often it ran, longest first.
        busy: at least one kernel ran.
        gaps: none did, between the first and the last.
    """

    families: dict[str, float]
    names: dict[str, tuple[float, float]]
    busy: float
    gaps: float

    def told(self, shown: int | None = None) -> dict[str, Any]:
        """Families, gaps, and so many of the kernels that take longest; None for all of them."""
        return {
            "families_microseconds": {name: round(time, 2) for name, time in self.families.items()},
            "gaps_microseconds": round(self.gaps, 2),
            "busy_microseconds": round(self.busy, 2),
            "kernels_a_step": round(sum(runs for _, runs in self.names.values()), 1),
            "longest_kernels": {
                name: {"microseconds": round(time, 2), "runs": round(runs, 2)}
                for name, (time, runs) in list(self.names.items())[:shown]
            },
        }


def break_down(found: Sequence[Kernel], steps: int) -> Breakdown:
    """Add up kernels of so many steps. Raises ValueError if there are none."""
    if not found:
        raise ValueError("the trace has no kernels: this build of JAX cannot profile this device")
    families: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, found[0].start
    for kernel in found:
        families[family(kernel.name)] += kernel.duration / steps
        names[_unnumbered(kernel.name)].append(kernel.duration)
        stop = kernel.start + kernel.duration
        busy += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    span = end - found[0].start
    each = {name: (sum(times) / steps, len(times) / steps) for name, times in names.items()}
    return Breakdown(
        families=dict(sorted(families.items(), key=lambda item: -item[1])),
        names=dict(sorted(each.items(), key=lambda item: -item[1][0])),
        busy=busy / steps,
        gaps=(span - busy) / steps,
    )


def _unnumbered(name: str) -> str:
    """`fusion_12` and `fusion.7` as one: the same kernel of different layers."""
    return re.sub(r"([._]+\d+)+$", "", name)


def _names(
    events: Sequence[dict[str, Any]], what: str, keys: tuple[str, ...]
) -> dict[tuple[Any, ...], str]:
    return {
        tuple(event[key] for key in keys): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == what
    }
