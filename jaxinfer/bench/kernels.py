"""A decode step, kernel by kernel: the time of each family, and the gaps between kernels."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxinfer.bench.decode import Point, Record
from jaxinfer.bench.engines import make_plan, standing_engine
from jaxinfer.bench.roofline import shares, traffic
from jaxinfer.bench.subjects import Subject
from jaxinfer.bench.trace import break_down, record
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import SamplingParams

SHOWN = 25
"""Kernels that are told by name."""


def measure_kernels(
    subject: Subject,
    points: Sequence[Point],
    *,
    steps: int,
    calls: int,
    kernels: frozenset[str] | None = None,
    speculation: str | None = None,
    drafts: int = 0,
) -> Iterator[Record]:
    """Trace some decode calls in a steady state; see `decode.decode_at` for the arguments.

    The profiler slows the device down a little: what a step takes is told by `decode`.
    """
    plan = make_plan(subject, speculation, drafts, kernels)
    rows = 1 + drafts
    for point in points:
        # Calls before the trace, in it, and under way when it ends.
        tokens = steps * (2 * calls + 4) * rows
        context = -(-(point.context + tokens + rows) // 64) * 64
        engine = standing_engine(subject, plan, streams=point.streams, context=context, steps=steps)
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, prefix_cache=False
        )
        for prompt in subject.prompts(point.streams, point.context):
            engine.submit(prompt, sampling)
        _read(engine, calls)
        found = record(lambda engine=engine: _read(engine, calls))
        made = break_down(found, calls * steps)
        moved = traffic(subject.cfg, subject.params, point.streams, point.context, rows)
        took = (made.busy + made.gaps) / 1e6
        yield {
            "model": subject.name,
            "weights": subject.weights,
            "streams": point.streams,
            "context": point.context,
            "rows": rows,
            "kernels": sorted(plan.kernels),
            "steps_traced": calls * steps,
            "families_microseconds": _rounded(made.families),
            "gaps_microseconds": round(made.gaps, 2),
            "busy_microseconds": round(made.busy, 2),
            "kernels_a_step": round(sum(runs for _, runs in made.names.values()), 1),
            "longest_kernels": {
                name: {"microseconds": round(time, 2), "runs": round(runs, 2)}
                for name, (time, runs) in list(made.names.items())[:SHOWN]
            },
            **shares(moved.total, took, jax.devices()[0].device_kind),
        }
        del engine  # its pools make room for the next one's


def _read(engine: Engine, calls: int) -> None:
    """Step until so many more results have been read."""
    for _ in range(calls):
        engine.step()


def _rounded(times: dict[str, float]) -> dict[str, Any]:
    return {name: round(time, 2) for name, time in times.items()}
