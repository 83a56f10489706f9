"""When the tokens of answers were known, and the figures that follow; the same for every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Answer:
    """One request, in seconds from the start of the run.

    Attributes:
        asked: when it arrived.
        times: when each of its tokens was on the host.
    """

    asked: float
    times: tuple[float, ...]

    @property
    def first(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.times[0] - self.asked

    @property
    def between(self) -> float | None:
        """Mean seconds between its tokens; None if there are none between which to measure."""
        count = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / count if count else None


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Throughput and latencies of a run.

    The latency between tokens is each request's mean, as AIPerf has it; pauses are those between
    tokens that did not arrive together.
    """
    seconds = max(answer.times[-1] for answer in answers) - min(answer.asked for answer in answers)
    tokens = sum(len(answer.times) for answer in answers)
    between = [answer.between for answer in answers if answer.between is not None]
    pauses = np.concatenate([np.diff(answer.times) for answer in answers])
    return {
        "requests": len(answers),
        "output_tokens": tokens,
        "seconds": round(seconds, 4),
        "output_tokens_per_second": round(tokens / seconds, 2),
        "requests_per_second": round(len(answers) / seconds, 3),
        "first_token_milliseconds": _percentiles([answer.first for answer in answers]),
        "between_tokens_milliseconds": _percentiles(between),
        "pause_milliseconds": _percentiles(pauses[pauses > 0]),
    }


def _percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(seconds):
        return {}
    found = 1e3 * np.percentile(seconds, PERCENTILES)
    return {f"p{p}": round(float(v), 3) for p, v in zip(PERCENTILES, found, strict=True)}
