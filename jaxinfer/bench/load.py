"""An engine under load: users who each wait for their answer, or requests at a rate.

In a closed loop so many users ask, and each asks again as soon as it has its answer. In an open
loop requests arrive at random (a Poisson process), whether or not those before have been answered;
a request's latency counts from its arrival. The engine is called in this process: there is no
network and no HTTP in the figures.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.bench.decode import Record
from jaxinfer.bench.engines import make_plan
from jaxinfer.bench.measure import compilation
from jaxinfer.bench.subjects import Subject
from jaxinfer.bench.timeline import Answer, figures
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.running import Request
from jaxinfer.qwen.config import CHUNK


@dataclass(frozen=True)
class Load:
    """What is asked of an engine.

    Attributes:
        streams: requests that run together, and users of the closed loop.
        prompt: tokens of each prompt.
        output: tokens of each answer.
        requests: in all.
        rate: requests a second in an open loop; None for a closed one.
    """

    streams: int
    prompt: int
    output: int
    requests: int
    rate: float | None = None


def load_engine(
    subject: Subject, load: Load, *, steps: int | None, kernels: frozenset[str] | None
) -> Engine:
    """An engine as users have it, but for the prefix cache and pools of a fixed size."""
    context = -(-(load.prompt + load.output) // CHUNK) * CHUNK
    return build_engine(
        subject.params,
        make_plan(subject, None, 0, kernels),
        subject.tokenizer,
        (),
        slots=load.streams,
        context=context,
        prefix_cache=False,
        # A page more for each, or the scheduler would keep the last ones waiting.
        pages=load.streams * (1 + context // CHUNK),
        # Without a prefix cache there are none anyway.
        snapshots=0,
        steps=steps,
        batches=(load.streams,),
    )


def measure_load(
    subject: Subject,
    loads: Sequence[Load],
    *,
    steps: int | None = None,
    kernels: frozenset[str] | None = None,
) -> Iterator[Record]:
    """Put an engine under each of these loads, after a warm-up of the same kind."""
    for load in loads:
        sampling = SamplingParams(
            max_tokens=load.output, temperature=0.0, ignore_eos=True, prefix_cache=False
        )
        prompts = subject.prompts(load.requests, load.prompt)
        with compilation() as before:
            engine = load_engine(subject, load, steps=steps, kernels=kernels)
            # Whichever calls the start of a run and its end need.
            drive(engine, prompts[: load.streams + 1], sampling, streams=load.streams)
        with compilation() as late:
            answers = drive(engine, prompts, sampling, streams=load.streams, rate=load.rate)
        yield {
            "model": subject.name,
            "weights": subject.weights,
            "loop": "closed" if load.rate is None else "open",
            "streams": load.streams,
            "rate": load.rate,
            "prompt": load.prompt,
            "output": load.output,
            "kernels": sorted(engine.plan.kernels),
            "steps_per_call": engine.options.steps,
            **figures(answers),
            "late_calls": engine.stats().counters.late_calls,
            "preemptions": engine.stats().preemptions,
            "compile_seconds": before,
            "compiled_while_measured": late,
        }
        del engine  # its pools make room for the next one's


def drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    streams: int,
    rate: float | None = None,
    seed: int = 0,
) -> list[Answer]:
    """Run prompts: a closed loop of `streams` users, or an open one at `rate` a second."""
    count = len(prompts)
    due = np.zeros(count)
    if rate is not None:
        due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
        streams = count
    waiting = deque(zip(due.tolist(), prompts, strict=True))
    asked: dict[Request, float] = {}
    times: dict[Request, list[float]] = {}
    began = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - began
        running = sum(not request.ended for request in times)
        while waiting and waiting[0][0] <= now and running < streams:
            arrived, prompt = waiting.popleft()
            request = engine.submit(prompt, sampling)
            asked[request] = arrived if rate is not None else now
            times[request] = []
            running += 1
        if not engine.busy:
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        for request, chunk in engine.step():
            known = time.perf_counter() - began
            times[request] += [known] * len(chunk.token_ids)
    engine.step()  # what was dispatched for requests that had ended
    return [Answer(asked[request], tuple(known)) for request, known in times.items()]
