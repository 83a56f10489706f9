import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.draft_length import DraftLength

LENGTHS = (1, 2, 3, 4)
Cost = Callable[[int], float]


def usual(length: int) -> float:
    """A step whose cost is not what is assumed before it is measured."""
    return 0.003 + 0.0006 * length


def follow(choice: DraftLength, steps: int, holds: Callable[[int], bool]) -> list[int]:
    """The lengths chosen in a row, where draft `k` holds, if those before do, by `holds(k)`."""
    used = []
    for _ in range(steps):
        length = choice.best()
        accepted = next((k - 1 for k in range(1, length + 1) if not holds(k)), length)
        choice.observe(accepted, length, length)
        used.append(length)
    return used


def speed(lengths: Sequence[int], chance: float, cost: Cost, steps: int) -> float:
    """Tokens a second of a simulated run of independent drafts, lengths chosen step by step."""
    noise, choice = random.Random(0), DraftLength(lengths)
    tokens = seconds = 0.0
    for _ in range(steps):
        length = choice.best()
        accepted = 0
        while accepted < length and noise.random() < chance:
            accepted += 1
        took = cost(length) * noise.uniform(0.9, 1.1)
        choice.observe(accepted, length, length)
        choice.measured(length, took)
        tokens, seconds = tokens + 1 + accepted, seconds + took
    return tokens / seconds


def best_fixed_speed(lengths: Sequence[int], chance: float, cost: Cost) -> float:
    return max(sum(chance**k for k in range(length + 1)) / cost(length) for length in lengths)


def test_drafts_that_hold_make_the_longest_best() -> None:
    assert follow(DraftLength(LENGTHS), 200, lambda k: True)[-1] == 4


def test_drafts_that_never_hold_make_the_shortest_best_until_they_hold_again() -> None:
    choice = DraftLength(LENGTHS)
    assert follow(choice, 400, lambda k: False)[-1] == 1
    assert follow(choice, 400, lambda k: True)[-1] == 4


def test_no_drafts_at_all_are_best_if_none_hold_but_they_are_tried_again() -> None:
    choice = DraftLength((0, 1, 3))
    vain = follow(choice, 5000, lambda k: False)
    assert vain[400] == 0
    assert 0 < sum(length > 0 for length in vain[400:]) < 500
    assert follow(choice, 2000, lambda k: True)[-1] == 3


def test_one_draft_is_best_if_only_the_first_holds() -> None:
    choice = DraftLength(LENGTHS)
    used = follow(choice, 4000, lambda k: k == 1)[400:]
    assert used.count(1) > 0.9 * len(used)
    assert follow(choice, 1000, lambda k: True)[-1] == 4


def test_a_place_left_empty_counts_as_a_draft_that_did_not_hold() -> None:
    choice, other = DraftLength(LENGTHS), DraftLength(LENGTHS)
    for _ in range(100):
        choice.observe(1, 1, 4)
        other.observe(1, 4, 4)
    assert choice.best() == other.best() == 1


def test_steps_of_a_length_that_is_not_to_choose_teach_about_the_others() -> None:
    good, bad = DraftLength((1, 2)), DraftLength((1, 2))
    for _ in range(200):
        good.observe(7, 8, 8)
        bad.observe(0, 8, 8)
    assert (good.best(), bad.best()) == (2, 1)
    bad.measured(8, 1.0)
    assert bad.best() == 1


def test_what_longer_drafts_cost_decides_between_them() -> None:
    cheap, dear = DraftLength(LENGTHS), DraftLength(LENGTHS)
    for length in LENGTHS:
        cheap.measured(length, 1.0)
        dear.measured(length, float(length))
    assert (cheap.best(), dear.best()) == (4, 1)


@given(
    st.lists(st.integers(0, 4), max_size=30),
    st.dictionaries(st.sampled_from(LENGTHS), st.floats(1e-3, 1.0)),
    st.integers(-8, 8),
)
def test_the_unit_of_time_makes_no_difference(
    accepted: list[int], costs: dict[int, float], power: int
) -> None:
    choice, other = DraftLength(LENGTHS), DraftLength(LENGTHS)
    for count in accepted:
        choice.observe(count, 4, 4)
        other.observe(count, 4, 4)
    for length, seconds in costs.items():
        choice.measured(length, seconds)
        other.measured(length, seconds * 2.0**power)
    assert choice.best() == other.best()


def test_one_slow_step_does_not_rule_a_length_out_for_good() -> None:
    choice = DraftLength(LENGTHS, prior=0.95)
    for length in LENGTHS:
        choice.measured(length, usual(length))
    choice.measured(4, 1.0)
    used = []
    for _ in range(10_000):
        used.append(choice.best())
        choice.measured(used[-1], usual(used[-1]))
    assert (used[0], used[-1]) == (3, 4)


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4), (0, 1, 3), (2, 7)])
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3, 0.5, 0.7, 0.85, 0.95])
def test_a_long_run_is_about_as_fast_as_with_the_best_fixed_length(
    lengths: tuple[int, ...], chance: float
) -> None:
    fixed = best_fixed_speed(lengths, chance, usual)
    assert speed(lengths, chance, usual, 10_000) > 0.96 * fixed


def test_a_run_whose_drafts_change_is_faster_than_with_any_fixed_length() -> None:
    noise, choice, steps = random.Random(0), DraftLength(LENGTHS), 8000
    fixed = dict.fromkeys(LENGTHS, 0)
    tokens = seconds = 0.0
    for step in range(steps):
        chance = 0.95 if step % 2000 < 1000 else 0.05
        holds = [noise.random() < chance for _ in range(4)]
        run = [*holds, False].index(False)
        length = choice.best()
        choice.observe(min(run, length), length, length)
        choice.measured(length, usual(length))
        tokens, seconds = tokens + 1 + min(run, length), seconds + usual(length)
        for other in LENGTHS:
            fixed[other] += 1 + min(run, other)
    assert tokens / seconds > max(fixed[one] / (steps * usual(one)) for one in LENGTHS)


@pytest.mark.parametrize("lengths", [(), (2, 1), (1, 1), (-1, 2)])
def test_lengths_that_do_not_ascend_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lengths must ascend"):
        DraftLength(lengths)


@pytest.mark.parametrize("name", ["prior", "weight", "forget"])
def test_a_share_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be from 0 to 1"):
        DraftLength(LENGTHS, **{name: 1.5})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.observe(3, 2, 4), "accepted=3, offered=2"),
        (lambda d: d.observe(-1, 2, 4), "accepted=-1"),
        (lambda d: d.observe(1, 3, 2), "offered=3 and length=2"),
        (lambda d: d.measured(-1, 1.0), "at least 0, not -1"),
        (lambda d: d.measured(1, 0.0), "seconds must be above 0"),
        (lambda d: d.measured(1, float("nan")), "seconds must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[DraftLength], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(DraftLength(LENGTHS))
