"""How long a candidate takes on the device at hand, and what share of the physical limit that is.

It is timed as it runs in a step: captured into a CUDA graph, launched by no host, its weights in
no cache. So one program calls it on one set of arguments after another, together larger than the
second-level cache, and begins again many times.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.contracts.checks import Subject
from jaxinfer.contracts.contract import Contract, Sizes, least_bytes

CACHE = 60e6
"""Bytes of an H200's second-level cache."""
SETS = 32
"""The most sets of arguments."""
CALLS = 256
"""The fewest calls of the candidate in a program."""
QUEUED = 4
"""Programs that are queued together."""
_NEVER = 1.2345e-33
"""What no result is."""


@dataclass(frozen=True)
class Limits:
    """What a device can do at most, measured.

    Attributes:
        bandwidth: bytes a second, copied.
        rate: bfloat16 operations a second.
        launch: seconds that a kernel with cold loads costs besides its bytes.
    """

    bandwidth: float
    rate: float
    launch: float


LIMITS = {"NVIDIA H200": Limits(4.3e12, 790e12, 2.5e-6)}


def limits() -> Limits:
    """Those of the device at hand.

    Raises:
        ValueError: they are not known.
    """
    kind = jax.devices()[0].device_kind
    if kind not in LIMITS:
        raise ValueError(f"the limits of {kind} are not known; there are {', '.join(LIMITS)}")
    return LIMITS[kind]


def least_seconds(contract: Contract, sizes: Sizes, limits: Limits) -> float:
    """What physics allows."""
    return max(
        least_bytes(contract, sizes) / limits.bandwidth, contract.operations(sizes) / limits.rate
    )


def draw_sets(contract: Contract, sizes: Sizes) -> list[Any]:
    """Arguments on the device, of one layer, so many that together they do not fit a cache.

    What does not fit by itself is the same in all of them: indices lead to other parts of it.
    """
    sizes = _one_layer(contract, sizes)
    count = min(SETS, ceil(2 * CACHE / max(1.0, least_bytes(contract, sizes))))
    sets = [jax.device_put(contract.draw(sizes, 0))]
    for seed in range(1, count):
        drawn = contract.draw(sizes, seed)
        large = jax.tree.map(lambda a: a.nbytes > 2 * CACHE, drawn)
        sets.append(
            jax.tree.map(lambda a, b, same: b if same else jax.device_put(a), drawn, sets[0], large)
        )
    return sets


def seconds(subject: Subject, sets: list[Any] | None = None, repeats: int = 5) -> float:
    """Seconds a call: the median of some runs, less what the links between calls cost.

    Args:
        subject: the candidate.
        sets: from `draw_sets`, if they are at hand.
        repeats: runs.
    """
    contract = subject.contract
    sets = draw_sets(contract, subject.sizes) if sets is None else sets
    subject = replace(subject, sizes=_one_layer(contract, subject.sizes))
    rounds = ceil(CALLS / len(sets))
    took = []
    for linked in (calling(subject), None):
        written, others = split(contract, sets)
        written = jax.tree.map(jnp.copy, written)
        run = jax.jit(chain(contract, linked, rounds), donate_argnums=0)
        times = []
        for _ in range(1 + repeats):
            began = time.perf_counter()
            # Queued behind one another, so that the host's part is hidden.
            for _ in range(QUEUED):
                written, last = run(written, others)
            jax.block_until_ready((written, last))
            times.append(time.perf_counter() - began)
        took.append(median(times[1:]))
    return (took[0] - took[1]) / (QUEUED * rounds * len(sets))


def _one_layer(contract: Contract, sizes: Sizes) -> Sizes:
    return {**sizes, contract.stack: 1} if contract.stack else sizes


def split(contract: Contract, sets: Sequence[Any]) -> tuple[Any, Any]:
    """Of each set of arguments those that are overwritten, and the others, by name."""
    named = [dict(zip(contract.arguments, one, strict=True)) for one in sets]
    written = [{n: a for n, a in one.items() if n in contract.overwrites} for one in named]
    others = [{n: a for n, a in one.items() if n not in contract.overwrites} for one in named]
    return tuple(written), tuple(others)


def calling(subject: Subject) -> Callable[..., Any]:
    """The candidate; jitted, so that it is traced once for all calls of a chain."""
    return jax.jit(
        subject.contract.function(subject.candidate, subject.sizes, subject.impl, subject.knobs)
    )


def chain(
    contract: Contract, call: Callable[..., Any] | None, rounds: int
) -> Callable[[Any, Any], Any]:
    """A program that goes through sets of arguments, in turn and over again.

    XLA leaves out what nobody needs, and a CUDA graph runs side by side what can be. So an argument
    of each call is made, by a tiny kernel, from what the call before it returned.

    Args:
        contract: says what is overwritten.
        call: what is done with each set, or None for the links alone.
        rounds: how often.

    Returns:
        A function of what `split` gives; it returns the overwritten arguments and a number.
    """

    def go(state: dict[str, Any], rest: dict[str, Any], before: jax.Array) -> tuple[Any, jax.Array]:
        given = {**state, **rest}
        linked, link = _linked([given[name] for name in contract.arguments], before)
        if call is None:
            return state, _first(link)
        out = contract.named(lax.optimization_barrier(call(*linked)))
        return {n: out[result] for n, result in contract.overwrites.items()}, _first(out)

    def run(written: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, jax.Array]:
        def turn(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            states, before = list(carry[0]), carry[1]
            for number, rest in enumerate(others):
                states[number], before = go(states[number], rest, before)
            return tuple(states), before

        return lax.fori_loop(0, rounds, turn, (written, jnp.zeros((), jnp.float32)))

    return run


def _linked(arguments: list[Any], before: jax.Array) -> tuple[list[Any], jax.Array]:
    """The arguments, one of which cannot be known before `before` is; and that one."""
    leaves, tree = jax.tree.flatten(arguments)
    sizes = [leaf.size if leaf.dtype.itemsize > 1 else float("inf") for leaf in leaves]
    smallest = sizes.index(min(sizes))
    change = before == _NEVER
    leaves[smallest] = leaves[smallest] + change.astype(leaves[smallest].dtype)
    # Barriers, so that the link is not computed inside of what it links.
    leaves = lax.optimization_barrier(leaves)
    return jax.tree.unflatten(tree, leaves), leaves[smallest]


def _first(tree: Any) -> jax.Array:
    """A number made of the first element of every array."""
    return sum(
        (leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(tree)),
        start=jnp.zeros((), jnp.float32),
    )
