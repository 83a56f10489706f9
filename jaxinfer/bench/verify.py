"""What it costs to verify drafts, and what that is worth at a given acceptance.

A step of `rows` rows verifies `rows - 1` drafts. Random weights accept nothing that means anything,
so tokens a second are told for acceptance that is stated: either that each draft holds with a fixed
chance given that the one before it did, `1 + a + a² + … + a^drafts` tokens a step, or what was
measured with a trained checkpoint.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from jaxinfer.bench.decode import Point, Record, decode_at
from jaxinfer.bench.roofline import traffic
from jaxinfer.bench.subjects import Subject

ROWS = (1, 2, 4, 8)
RATES = (0.5, 0.7, 0.9)
ACCEPTANCE = Path("docs/measurements/tiny_qwen/acceptance.jsonl")


def measure_verify(
    subject: Subject,
    point: Point,
    rows: Sequence[int],
    drafters: Sequence[str],
    *,
    steps: int,
    calls: int,
    kernels: frozenset[str] | None = None,
    measured: Sequence[Record] = (),
) -> Iterator[Record]:
    """Steps of several widths against a step of one row.

    Args:
        subject: the model.
        point: sequences and their length.
        rows: widths.
        drafters: where drafts come from. "ngram" costs next to nothing, so that its steps show what
            verifying costs; those of "mtp" draft as well.
        steps: decode steps a call.
        calls: decode calls that are timed.
        kernels: see `make_plan`.
        measured: lines of acceptance, as `checkpoints.tiny_qwen_training.evaluate` writes them.
    """
    how = {"steps": steps, "calls": calls, "kernels": kernels}
    one = decode_at(subject, point, **how)
    plain = traffic(subject.cfg, subject.params, point.streams, point.context).total
    if 1 in rows:
        yield one | {"step_ratio": 1.0, "bytes_ratio": 1.0, "simulated": {}, "accepted": []}
    for drafter, width in product(drafters, [width for width in rows if width > 1]):
        record = decode_at(subject, point, speculation=drafter, drafts=width - 1, **how)
        moved = traffic(subject.cfg, subject.params, point.streams, point.context, width).total
        took, alone = record["step_milliseconds"], one["step_milliseconds"]
        yield record | {
            "step_ratio": round(took / alone, 4) if took and alone else None,
            "bytes_ratio": round(moved / plain, 4),
            "simulated": simulated(point.streams, width - 1, took),
            "accepted": combined(point.streams, width - 1, drafter, took, measured),
        }


def simulated(streams: int, drafts: int, milliseconds: float | None) -> dict[str, float]:
    """Tokens a second by the chance that a draft holds."""
    if not milliseconds:
        return {}
    expected = {rate: sum(rate**place for place in range(1 + drafts)) for rate in RATES}
    return {
        str(rate): round(1e3 * streams * tokens / milliseconds, 1)
        for rate, tokens in expected.items()
    }


def combined(
    streams: int,
    drafts: int,
    drafter: str,
    milliseconds: float | None,
    measured: Sequence[Record],
) -> list[Record]:
    """Tokens a second with the tokens a step that a trained checkpoint had from the same drafter.

    Its steps are those of another model: the two are put together, not measured together.
    """
    return [
        {
            "text": line["text"],
            "sampling": line["sampling"],
            "tokens_per_step": line["tokens_per_step"],
            "tokens_per_second": round(1e3 * streams * line["tokens_per_step"] / milliseconds, 1),
        }
        for line in measured
        if milliseconds and (line["speculation"], line["draft_length"]) == (drafter, drafts)
    ]


def read_acceptance(path: Path) -> list[Record]:
    """Lines of acceptance; none if the file is not there."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
