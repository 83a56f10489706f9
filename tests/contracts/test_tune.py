"""Choosing block sizes, and what is written down."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxinfer.contracts import bench, lessons, table
from jaxinfer.contracts.checks import Subject
from jaxinfer.contracts.contract import Candidate, Contract, Spec
from jaxinfer.contracts.registry import CONTRACTS, find
from jaxinfer.contracts.tune import Outcome, tune

LIMITS = bench.Limits(bandwidth=1e12, rate=1e14, launch=1e-6)


def double(x, *, impl, rows, wrong=False):
    if rows == 3:
        raise ValueError("3 is no power of two")
    return x * (2.0 if rows != 4 else 2.5)


def contract() -> Contract:
    shapes = {"short": {"R": 2, "D": 8}, "long": {"R": 4, "D": 8}, "wide": {"R": 2, "D": 16}}
    return Contract(
        name="double",
        doc="`2 x`",
        arguments={"x": Spec("R D", "float32")},
        results={"y": Spec("R D", "float32")},
        reference=lambda x: x + x,
        candidates={
            "kernel": Candidate(double, {"rows": (1, 2, 3, 4)}),
            "xla": Candidate(lambda x, *, impl: jnp.add(x, x)),
        },
        shapes=shapes,
        edges={},
        tolerance=1e-6,
        group=("D",),
    )


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    def seconds(subject, sets) -> float:
        rows = subject.knobs.get("rows", 4)
        return 1e-6 * subject.sizes["R"] * (rows if subject.sizes["D"] == 8 else 3 - rows / 2)

    monkeypatch.setattr(bench, "seconds", seconds)
    return list(tune(contract(), LIMITS))


def test_timing_calls_the_candidate_on_sets_of_arguments() -> None:
    changed = replace(contract(), overwrites={"x": "y"})
    for one in (contract(), changed):
        subject = Subject(one, "xla", one.shapes["short"], "interpret")
        sets = bench.draw_sets(one, subject.sizes)
        assert len(sets) == bench.SETS
        assert bench.seconds(subject, sets[:2], repeats=1) < 1.0
        assert not sets[0][0].is_deleted()


def test_the_fastest_wins_for_each_group_of_sizes(outcomes: list[Outcome]) -> None:
    assert [outcome.place for outcome in outcomes] == ["D=8", "D=16"]
    assert [outcome.entry for outcome in outcomes] == [
        {"candidate": "kernel", "rows": 1},
        {"candidate": "xla"},
    ]


def test_what_does_not_fit_or_computes_something_else_is_out(outcomes: list[Outcome]) -> None:
    assert outcomes[0].failed["kernel rows=3"] == "3 is no power of two"
    assert "kernel rows=4" in outcomes[0].failed
    assert [trial.label for trial in outcomes[0].trials] == [
        "kernel rows=1",
        "kernel rows=2",
        "xla",
    ]


def test_winners_are_kept_by_device_and_found_again(outcomes, tmp_path: Path) -> None:
    path, known = tmp_path / "tuned.json", {"another": {"double": {"D=8": {"rows": 7}}}}
    for outcome in outcomes:
        known = table.with_winner(known, "GPU", "double", outcome.place, outcome.entry)
    table.write(known, path)
    assert table.read(path) == known
    assert table.tuned("double", "GPU", known, D=8) == {"rows": 1}
    assert table.tuned("double", "another", known, D=8) == {"rows": 7}
    assert table.tuned("double", "nowhere", known, D=8) == {}


def test_tuned_block_sizes_are_among_those_that_contracts_know() -> None:
    for of_device in table.read().values():
        for operation, places in of_device.items():
            for entry in places.values():
                knobs = CONTRACTS[operation].candidates[entry["candidate"]].knobs
                assert set(entry) - {"candidate"} == set(knobs)


def test_the_lesson_is_an_entry_like_others(outcomes: list[Outcome], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("| entry | lesson |\n|---|---|\n")
    text, lesson = lessons.entry(outcomes, "GPU", LIMITS)
    for part in ("# ", "**Symptom.**", "**Cause.**", "**Check.**", "**Fix.**", "**Evidence.**"):
        assert part in text
    assert "With `rows` 2 it takes 2.00 times as long" in text
    assert "`xla` is 2.50 times as fast as `kernel rows=1` at D=16" in text
    for _ in range(2):
        lessons.add(tmp_path, "double", text, lesson)
    listing = (tmp_path / "README.md").read_text().splitlines()
    assert listing[-1] == f"| [double](double.md) | {lesson} |"
    assert len(listing) == 3


def test_contracts_are_found_by_how_their_names_begin() -> None:
    assert [c.name for c in find(("linear_fp8",))] == ["linear_fp8", "linear_fp8_static"]
    with pytest.raises(ValueError, match="no contract 'nothing'; there are"):
        find(("nothing",))
