"""How random arguments are made: functions of a generator, a shape and the sizes of the symbols."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Draw = Callable[[np.random.Generator, tuple[int, ...], Mapping[str, int]], np.ndarray]


def normal(scale: float = 1.0) -> Draw:
    """Normal numbers with this standard deviation."""
    return lambda rng, shape, _: np.float32(scale) * rng.standard_normal(shape, np.float32)


def uniform(low: float, high: float) -> Draw:
    """Numbers between the two."""
    return lambda rng, shape, _: rng.random(shape, np.float32) * (high - low) + low


def constant(value: Any) -> Draw:
    """The same value everywhere."""
    return lambda rng, shape, _: np.full(shape, value)


def codes() -> Draw:
    """Bytes, all as likely."""
    return lambda rng, shape, _: rng.integers(0, 256, shape, np.uint8)


def integers(low: int, high: str | int, unit: str | int = 1) -> Draw:
    """Multiples of `unit` from `low` to before `high`; both may be arithmetic with symbols."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], sizes: Mapping[str, int]):
        step, end = evaluate(str(unit), sizes), evaluate(str(high), sizes)
        return step * rng.integers(-(-low // step), -(-end // step), shape)

    return draw


def distinct(low: int, high: str | int) -> Draw:
    """Integers from `low` to before `high`, none twice."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], sizes: Mapping[str, int]):
        places = rng.permutation(np.arange(low, evaluate(str(high), sizes)))
        return places[: int(np.prod(shape))].reshape(shape)

    return draw


_SIGNS: dict[str, Callable[[int, int], int]] = {
    "": lambda a, b: b,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Arithmetic with symbols and numbers, from left to right: `2*N`, `K/16`, `M*64-T+1`."""
    total = 0
    for sign, name in re.findall(r"([-+*/]?)(\w+)", text):
        total = _SIGNS[sign](total, int(name) if name.isdigit() else sizes[name])
    return total
