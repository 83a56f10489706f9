"""A decode step, or a prompt, kernel by kernel: the time of each family, and the gaps between."""

import math
from collections.abc import Iterator, Sequence

import jax

from jaxinfer.bench.decode import Point, Record
from jaxinfer.bench.engines import PREFILL_TOKENS, make_engine, make_plan, standing_engine
from jaxinfer.bench.measure import run
from jaxinfer.bench.roofline import prefill_roofline, shares, traffic
from jaxinfer.bench.subjects import Subject
from jaxinfer.bench.trace import break_down, record
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import SamplingParams

SHOWN = 25
"""Kernels of a step that are told by name."""


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
            **made.told(SHOWN),
            **shares(moved.total, took, jax.devices()[0].device_kind),
        }
        del engine  # its pools make room for the next one's


def measure_prefill_kernels(
    subject: Subject,
    sizes: Sequence[int],
    *,
    kernels: frozenset[str] | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[Record]:
    """Trace a prompt of each size up to its first token, after one of the same size.

    Gaps are those between its first and its last kernel: what the host does before and after is in
    `prefill`'s time to the first token, and not here. See `prefill.measure_prefill` for the
    arguments.
    """
    plan = make_plan(subject, None, 0, kernels)
    kind = jax.devices()[0].device_kind
    # One token: no decode call is made, nor compiled.
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prefix_cache=False)
    engine = make_engine(
        subject, plan, streams=1, context=max(sizes) + 1, steps=1, prefill_tokens=prefill_tokens
    )
    for size in sizes:
        first, second = subject.prompts(2, size, seed=size)
        run(engine, [first], sampling)
        calls = engine.stats().counters.prefill_calls
        made = break_down(record(lambda second=second: run(engine, [second], sampling)), 1)
        calls = engine.stats().counters.prefill_calls - calls
        took = (made.busy + made.gaps) / 1e6
        least = prefill_roofline(subject.cfg, subject.params, size, calls, kind)
        told = not math.isnan(least)
        yield {
            "model": subject.name,
            "weights": subject.weights,
            "prompt": size,
            "prefill_calls": calls,
            "kernels": sorted(plan.kernels),
            **made.told(),
            "roofline_milliseconds": round(1e3 * least, 4) if told else None,
            "share_of_roofline": round(least / took, 4) if told else None,
        }


def _read(engine: Engine, calls: int) -> None:
    """Step until so many more results have been read."""
    for _ in range(calls):
        engine.step()
