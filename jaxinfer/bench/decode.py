"""Decoding in a steady state: milliseconds a step and tokens a second, against the roofline."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.bench.engines import make_plan, standing_engine
from jaxinfer.bench.full_size import check
from jaxinfer.bench.measure import Run, compilation, measure
from jaxinfer.bench.roofline import shares, traffic
from jaxinfer.bench.subjects import Subject
from jaxinfer.engine.request import SamplingParams

Record = dict[str, Any]

BUFFERS_OFF = "--xla_gpu_enable_command_buffer="


class Point(NamedTuple):
    """Where decoding is measured: so many sequences, of so many tokens when they begin."""

    streams: int
    context: int


POINTS = (Point(1, 128), Point(1, 8192), Point(32, 1024))


def measure_decode(
    subject: Subject,
    points: Sequence[Point],
    *,
    steps: int,
    calls: int,
    kernels: frozenset[str] | None = None,
) -> Iterator[Record]:
    """Decode without speculation.

    Args:
        subject: the model.
        points: where.
        steps: decode steps a call.
        calls: decode calls that are timed; as many run before.
        kernels: see `make_plan`.
    """
    for point in points:
        yield decode_at(subject, point, steps=steps, calls=calls, kernels=kernels)


def decode_at(
    subject: Subject,
    point: Point,
    *,
    steps: int,
    calls: int,
    kernels: frozenset[str] | None = None,
    speculation: str | None = None,
    drafts: int = 0,
) -> Record:
    """One point, with so many drafts verified in every step; see `measure_decode`."""
    plan = make_plan(subject, speculation, drafts, kernels)
    # If every draft held, each step would bring `rows` tokens.
    rows = 1 + drafts
    tokens = steps * calls * rows
    context = -(-(point.context + tokens + rows) // 64) * 64
    prompts = subject.prompts(point.streams, point.context)
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=True, prefix_cache=False
    )
    with compilation() as seconds:
        engine = standing_engine(subject, plan, streams=point.streams, context=context, steps=steps)
        run = measure(engine, prompts, sampling)
    check(run)
    told = run.summary(steps)
    took = told["step_milliseconds"]
    reached = point.context + max(len(c.token_ids) for c in run.completions)
    moved = traffic(subject.cfg, subject.params, point.streams, (point.context + reached) / 2, rows)
    kind = jax.devices()[0].device_kind
    return {
        "model": subject.name,
        "weights": subject.weights,
        "streams": point.streams,
        "context": [point.context, reached],
        "rows": rows,
        "drafter": speculation,
        "kernels": sorted(plan.kernels),
        "command_buffers": BUFFERS_OFF not in os.environ.get("XLA_FLAGS", "").split(),
        "steps_per_call": steps,
        "step_milliseconds": took,
        "step_milliseconds_p10_p90": _spread(run, steps),
        "tokens_per_second": told["steady_tokens_per_second"],
        "tokens_per_step": told["tokens_per_step"],
        "host_milliseconds_a_call": told["host_milliseconds_a_call"],
        "late_calls": told["late_calls"],
        "distinct_last_tokens": len({c.token_ids[-1] for c in run.completions}),
        "traffic": {name: round(size) for name, size in asdict(moved).items()},
        **shares(moved.total, took and took / 1e3, kind),
        "compile_seconds": seconds["decode_steps"],
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _spread(run: Run, steps: int) -> list[float]:
    steady = [turn.seconds for turn in run.turns if turn.steady]
    return [round(1e3 * p / steps, 4) for p in np.percentile(steady, (10, 90))] if steady else []
