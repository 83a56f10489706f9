"""Time to the first token: from the submission of a prompt to an idle engine until it is known.

Prompts are random tokens and share nothing; the median of several is told.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import median

import jax

from jaxinfer.bench.decode import Record
from jaxinfer.bench.engines import PREFILL_TOKENS, make_engine, make_plan
from jaxinfer.bench.measure import compilation, run
from jaxinfer.bench.roofline import prefill_roofline
from jaxinfer.bench.subjects import Subject
from jaxinfer.engine.request import SamplingParams

SIZES = (128, 1024, 8192)


def measure_prefill(
    subject: Subject,
    sizes: Sequence[int],
    *,
    repeats: int,
    kernels: frozenset[str] | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[Record]:
    """Prompts of these sizes, one after another.

    Args:
        subject: the model.
        sizes: tokens of the prompts.
        repeats: prompts of each size, after one that is not timed.
        kernels: see `make_plan`.
        prefill_tokens: tokens of a prompt that a call takes.
    """
    plan = make_plan(subject, None, 0, kernels)
    kind = jax.devices()[0].device_kind
    # One token: no decode call is made, nor compiled.
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prefix_cache=False)
    with compilation() as compiled:
        engine = make_engine(
            subject,
            plan,
            streams=1,
            context=max(sizes) + 1,
            steps=1,
            prefill_tokens=prefill_tokens,
        )
        for size in sizes:
            prompts = subject.prompts(repeats + 1, size, seed=size)
            runs = [run(engine, [prompt], sampling) for prompt in prompts][1:]
            times = sorted(one.first for one in runs)
            calls = runs[0].stats.counters.prefill_calls
            least = prefill_roofline(subject.cfg, subject.params, size, calls, kind)
            told = not math.isnan(least)
            yield {
                "model": subject.name,
                "weights": subject.weights,
                "kernels": sorted(plan.kernels),
                "prompt": size,
                "prefill_calls": calls,
                "repeats": repeats,
                "first_token_milliseconds": round(1e3 * median(times), 3),
                "fastest_slowest": [round(1e3 * t, 3) for t in (times[0], times[-1])],
                "prompt_tokens_per_second": round(size / median(times), 1),
                "roofline_milliseconds": round(1e3 * least, 4) if told else None,
                "share_of_roofline": round(least / median(times), 4) if told else None,
                "compile_seconds_so_far": compiled["prefill_step"],
            }
