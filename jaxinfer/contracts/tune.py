"""Choosing candidates and block sizes for the device at hand; see `lessons` for what is learnt."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.contracts import bench
from jaxinfer.contracts.checks import Case, Subject, agrees, case, holds
from jaxinfer.contracts.contract import Contract, Knobs, Sizes
from jaxinfer.contracts.table import key

_UNFIT = (AssertionError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
"""What block sizes raise that do not fit, or compute something else."""


@dataclass(frozen=True)
class Trial:
    """A candidate at some block sizes, measured at all shapes of a group.

    Attributes:
        candidate: its name.
        knobs: its block sizes.
        seconds: by name of the shape.
    """

    candidate: str
    knobs: Knobs
    seconds: dict[str, float]

    @property
    def cost(self) -> float:
        """The geometric mean over the shapes: each counts alike, whatever it takes."""
        return math.exp(sum(math.log(s) for s in self.seconds.values()) / len(self.seconds))

    @property
    def label(self) -> str:
        """Candidate and knobs in a line."""
        return " ".join([self.candidate, *(f"{k}={v}" for k, v in self.knobs.items())])


@dataclass(frozen=True)
class Outcome:
    """What tuning brought for shapes that share their block sizes.

    Attributes:
        contract: what was tuned.
        place: the sizes that the shapes have in common; see `table.key`.
        shapes: they, by name.
        predicted: seconds that a kernel takes by the rule of thumb: a launch, and its bytes or
            operations at the device's best.
        trials: what was measured, the default first.
        failed: labels of what does not fit or computes something else, and why.
    """

    contract: Contract
    place: str
    shapes: dict[str, Sizes]
    predicted: dict[str, float]
    trials: tuple[Trial, ...]
    failed: dict[str, str]

    @property
    def winner(self) -> Trial:
        """The cheapest."""
        return min(self.trials, key=lambda trial: trial.cost)

    @property
    def entry(self) -> dict[str, object]:
        """For the table."""
        return {"candidate": self.winner.candidate, **self.winner.knobs}


def groups(contract: Contract) -> dict[str, dict[str, Sizes]]:
    """The shapes of a contract by the sizes for which block sizes are chosen apart."""
    found: dict[str, dict[str, Sizes]] = {}
    for name, sizes in contract.shapes.items():
        place = key({symbol: sizes[symbol] for symbol in contract.group})
        found.setdefault(place, {})[name] = sizes
    return found


def tune(
    contract: Contract,
    limits: bench.Limits,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Outcome]:
    """Try all candidates at all block sizes; what is wrong at any shape is out.

    Args:
        contract: of the operation.
        limits: of the device at hand.
        report: is told of every trial.

    Raises:
        ValueError: nothing is left.
    """
    for place, shapes in groups(contract).items():
        trials: list[Trial] = []
        failed: dict[str, str] = {}
        cases = {n: case(contract, cut(contract, sizes), seed=0) for n, sizes in shapes.items()}
        sets = {name: bench.draw_sets(contract, sizes) for name, sizes in shapes.items()}
        for candidate, ways in contract.candidates.items():
            for knobs in ways.settings():
                trial = Trial(candidate, knobs, {})
                told = _try(contract, trial, shapes, cases, sets)
                if len(trial.seconds) == len(shapes):
                    trials.append(trial)
                else:
                    failed[trial.label] = told
                report(f"{contract.name} {place} {trial.label}: {told}")
        # Bits under all circumstances cost more time to check, so only the fastest are.
        while trials:
            best = min(trials, key=lambda trial: trial.cost)
            told = _broken(contract, best, shapes)
            if not told:
                break
            trials.remove(best)
            failed[best.label] = told
            report(f"{contract.name} {place} {best.label}: {told}")
        if not trials:
            raise ValueError(f"no candidate of {contract.name} does at {place}: {failed}")
        predicted = {
            name: limits.launch + bench.least_seconds(contract, sizes, limits)
            for name, sizes in shapes.items()
        }
        yield Outcome(contract, place, shapes, predicted, tuple(trials), failed)


def _try(
    contract: Contract,
    trial: Trial,
    shapes: dict[str, Sizes],
    cases: dict[str, Case],
    sets: dict[str, list[Any]],
) -> str:
    """Check and time a trial at every shape, and say what came of it."""
    try:
        for name, sizes in shapes.items():
            subject = _subject(contract, trial, sizes)
            agrees(subject, cases[name])
            trial.seconds[name] = bench.seconds(subject, sets[name])
    except _UNFIT as error:
        return str(error).strip().splitlines()[0]
    return ", ".join(f"{name} {1e6 * taken:.2f} us" for name, taken in trial.seconds.items())


def _broken(contract: Contract, trial: Trial, shapes: dict[str, Sizes]) -> str:
    """The promise that a trial breaks at some shape, or nothing."""
    try:
        for sizes in shapes.values():
            holds(_subject(contract, trial, sizes), seeds=(1,))
    except AssertionError as error:
        return str(error).strip().splitlines()[0]
    return ""


def _subject(contract: Contract, trial: Trial, sizes: Sizes) -> Subject:
    return Subject(contract, trial.candidate, cut(contract, sizes), "kernel", trial.knobs)


def cut(contract: Contract, sizes: Sizes) -> Sizes:
    """The sizes with two layers, which is enough to go wrong by."""
    return {**sizes, contract.stack: 2} if contract.stack else sizes
