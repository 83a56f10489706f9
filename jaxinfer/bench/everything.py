"""The benchmarks that share a process: all but those which take the device for themselves."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxinfer.bench.decode import POINTS, Point, Record, measure_decode
from jaxinfer.bench.kernels import measure_kernels, measure_prefill_kernels
from jaxinfer.bench.load import Load, measure_load
from jaxinfer.bench.one_answer import measure_one_answer
from jaxinfer.bench.prefill import SIZES, measure_prefill
from jaxinfer.bench.subjects import Subject
from jaxinfer.bench.verify import ACCEPTANCE, ROWS, measure_verify, read_acceptance

STEPS, CALLS = 4, 16
"""Decode steps a call, and calls that are timed."""

LOAD = Load(streams=32, prompt=512, output=256, requests=96)

Families = frozenset[str] | None
Bench = Callable[[Subject, Families], Iterator[Record]]


def _decode(subject: Subject, kernels: Families) -> Iterator[Record]:
    return measure_decode(subject, POINTS, steps=STEPS, calls=CALLS, kernels=kernels)


def _verify(subject: Subject, kernels: Families) -> Iterator[Record]:
    measured = read_acceptance(ACCEPTANCE)
    how = {"steps": STEPS, "calls": CALLS, "kernels": kernels, "measured": measured}
    return measure_verify(subject, Point(1, 1024), ROWS, ["ngram"], **how)


def _prefill(subject: Subject, kernels: Families) -> Iterator[Record]:
    return measure_prefill(subject, SIZES, repeats=5, kernels=kernels)


def _load(subject: Subject, kernels: Families) -> Iterator[Record]:
    return measure_load(subject, [LOAD], kernels=kernels)


def _kernels(subject: Subject, kernels: Families) -> Iterator[Record]:
    yield from measure_kernels(subject, POINTS, steps=STEPS, calls=4, kernels=kernels)
    yield from measure_prefill_kernels(subject, SIZES, kernels=kernels)


def _one_answer(subject: Subject, kernels: Families) -> Iterator[Record]:
    return measure_one_answer(subject, kernels=kernels)


BENCHES: Mapping[str, Bench] = {
    "decode": _decode,
    "verify": _verify,
    "prefill": _prefill,
    "load": _load,
    "kernels": _kernels,
    "one-answer": _one_answer,
}


def measure_everything(
    subject: Subject, names: Sequence[str], kernels: Families = None
) -> Iterator[tuple[str, Iterator[Record]]]:
    """Benchmarks of `BENCHES` by name, each with its records, which are made as they are read."""
    for name in names:
        yield name, BENCHES[name](subject, kernels)
