"""Run prompts in an engine and tell what that took."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import jax
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Chunk, Completion, SamplingParams
from jaxinfer.engine.running import Request
from jaxinfer.engine.stats import Counters, EngineStats


class Turn(NamedTuple):
    """One call of `Engine.step`.

    Attributes:
        seconds: it took.
        waiting: those of them in which results were awaited and read.
        tokens: it brought.
        steady: nothing but decode calls, as large as that for all requests, was under way.
    """

    seconds: float
    waiting: float
    tokens: int
    steady: bool


@dataclass(frozen=True)
class Run:
    """Some prompts from their submission to their last token.

    Attributes:
        completions: of the prompts, in order.
        seconds: from first to last.
        first: seconds to the first token that a user saw.
        turns: calls of `Engine.step`.
        reads: seconds from the start to when results had been read, one a compiled call.
        stats: counters of this run alone; the rest as it was at the end.
    """

    completions: list[Completion]
    seconds: float
    first: float
    turns: list[Turn]
    reads: list[float]
    stats: EngineStats

    def summary(self, steps: int) -> dict[str, Any]:
        """What there is to tell, given the steps of a decode call; None where nothing was steady.

        The host's time is that of an `Engine.step` less what it waits for results. On a CPU, host
        and device share their cores.
        """
        counters, steady = self.stats.counters, [turn for turn in self.turns if turn.steady]
        spent = sum(turn.seconds for turn in steady)
        told: dict[str, Any] = {
            "output_tokens": counters.generated_tokens,
            "seconds": self.seconds,
            "first_token_milliseconds": 1e3 * self.first,
            "output_tokens_per_second": counters.generated_tokens / self.seconds,
            "steady_calls": len(steady),
            "steady_tokens_per_second": None,
            "step_milliseconds": None,
            "host_milliseconds_a_call": None,
            "late_calls": counters.late_calls / max(1, counters.decode_calls),
            "tokens_per_step": self.stats.tokens_per_step,
            "drafted": counters.drafted,
            "acceptance": self.stats.acceptance if counters.drafted else None,
        }
        if steady:
            told["steady_tokens_per_second"] = sum(turn.tokens for turn in steady) / spent
            told["step_milliseconds"] = 1e3 * median(t.seconds for t in steady) / steps
            host = median(turn.seconds - turn.waiting for turn in steady)
            told["host_milliseconds_a_call"] = 1e3 * host
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}


def measure(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Run:
    """Run prompts together in an idle engine, after a warm-up with the same ones."""
    run(engine, prompts, sampling)
    return run(engine, prompts, sampling)


def run(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Run:
    """Run prompts together in an idle engine, compiling what has not been compiled."""
    options, before = engine.options, engine.stats()
    chunks: dict[Request, list[Chunk]] = {}
    turns: list[Turn] = []
    first = None
    with _reading() as reads:
        began = last = time.perf_counter()
        for prompt in prompts:
            chunks[engine.submit(prompt, sampling)] = []
        while engine.busy:
            read, started = len(reads), all(chunks.values())
            given = engine.step()
            now = time.perf_counter()
            for request, chunk in given:
                chunks[request].append(chunk)
            if given and first is None:
                first = now - began
            left = sum(not request.ended for request in chunks)
            whole = left and options.batch_size(left) == options.batch_size(len(prompts))
            waiting = sum(end - start for start, end in reads[read:])
            tokens = sum(len(chunk.token_ids) for _, chunk in given)
            turns.append(Turn(now - last, waiting, tokens, bool(started and whole)))
            last = now
        stats = _since(engine.stats(), before)
        ends = [end - began for _, end in reads]
        engine.step()  # what was dispatched for requests that had ended
    completions = [Completion.join(given) for given in chunks.values()]
    return Run(completions, last - began, first or 0.0, turns, ends, stats)


def _since(after: EngineStats, before: EngineStats) -> EngineStats:
    """The later ones, with the counts between the two."""
    earlier = asdict(before.counters)
    counted = {name: value - earlier[name] for name, value in asdict(after.counters).items()}
    return replace(after, counters=Counters(**counted))


@contextmanager
def _reading() -> Iterator[list[tuple[float, float]]]:
    """Begin and end of every `jax.device_get`: there, and only there, the engine waits."""
    times: list[tuple[float, float]] = []
    original = jax.device_get

    def timed(values: Any) -> Any:
        began = time.perf_counter()
        result = original(values)
        times.append((began, time.perf_counter()))
        return result

    jax.device_get = timed
    try:
        yield times
    finally:
        jax.device_get = original


@contextmanager
def compilation() -> Iterator[dict[str, list[float]]]:
    """Seconds that each program took to trace, lower and compile, by the name of its step."""
    names = ("prefill_step", "decode_steps")
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    pending: defaultdict[str, float] = defaultdict(float)

    def add(event: str, duration_secs: float, **kwargs: str | int) -> None:
        name = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if name in names:
            pending[name] += duration_secs
            if event.endswith("backend_compile_duration"):
                seconds[name].append(round(pending.pop(name), 2))

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


def numbers_tokenizer(size: int) -> Tokenizer:
    """A tokenizer for models that never saw a text: it spells an id as its number."""
    return Tokenizer(WordLevel({str(number): number for number in range(size)}, unk_token="0"))
