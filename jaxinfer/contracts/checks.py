"""Whether candidates keep their promises; every function raises AssertionError if not.

The same checks run interpreted on a CPU, at the edges, and compiled on a GPU, at real sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.contracts.contract import Contract, Knobs, Sizes, Spec, named_places, sized
from pallas_kernels.backend import Impl


def shapes_agree(contract: Contract, sizes: Sizes) -> None:
    """The reference gives what the contract says, in shape and type; nothing is computed."""
    given = contract.named(jax.eval_shape(contract.specification(sizes), *contract.shaped(sizes)))
    for name, tree in contract.results.items():
        told = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(given[name])]
        promised = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(sized(tree, sizes))]
        assert told == promised, f"{contract.name}: {name} is {told}, promised {promised}"
    for argument, result in contract.overwrites.items():
        before, after = contract.arguments[argument], contract.results[result]
        same = sized(before, sizes) == sized(after, sizes)
        assert same, f"{contract.name}: {result} does not fit in the place of {argument}"


@dataclass(frozen=True)
class Subject:
    """A candidate under test.

    Attributes:
        contract: its promise.
        candidate: its name.
        sizes: of the arguments.
        impl: how it runs.
        knobs: its block sizes; None for the default.
    """

    contract: Contract
    candidate: str
    sizes: Sizes
    impl: Impl
    knobs: Knobs | None = None

    @property
    def has_bits_of_its_own(self) -> bool:
        """Interpreted, a kernel has those of XLA's CPU code, which follow the shapes."""
        return self.impl != "interpret"

    def resized(self, symbol: str, size: int) -> "Subject":
        """The same at another size."""
        return replace(self, sizes={**self.sizes, symbol: size})

    def compiled(self) -> Callable[..., dict[str, Any]]:
        """A function of NumPy arguments to named NumPy results."""
        contract = self.contract
        function = contract.function(self.candidate, self.sizes, self.impl, self.knobs)
        step = jax.jit(function, donate_argnums=contract.donated)

        def run(*arguments: Any) -> dict[str, Any]:
            on_device = jax.device_put(arguments)
            _poison_free_memory(contract, self.sizes)
            return jax.device_get(contract.named(step(*on_device)))

        return run


AS_WRITTEN = {"xla_allow_excess_precision": False}
"""XLA may otherwise leave out that a reference rounds, and then it is the one that is off."""


class Case(NamedTuple):
    """Arguments, and what the reference makes of them.

    Attributes:
        seed: they were drawn with.
        arguments: as NumPy arrays.
        results: by name, as NumPy arrays.
    """

    seed: int
    arguments: tuple[Any, ...]
    results: dict[str, Any]


def case(contract: Contract, sizes: Sizes, seed: int) -> Case:
    """Draw arguments and compute the reference."""
    arguments = contract.draw(sizes, seed)
    specified = jax.jit(contract.specification(sizes), compiler_options=AS_WRITTEN)
    results = specified(*jax.device_put(arguments))
    return Case(seed, arguments, jax.device_get(contract.named(results)))


def agrees(subject: Subject, case: Case, run: Callable[..., Any] | None = None) -> None:
    """The candidate gives what the reference gives.

    Inputs and free memory are poisoned with NaN, so what is read without leave, or not written,
    shows.

    Args:
        subject: the candidate.
        case: what is compared.
        run: the candidate, compiled already.
    """
    got = (run or subject.compiled())(*case.arguments)
    for name, tree in subject.contract.results.items():
        what = f"{_where(subject, case.seed)}: {name}"
        _compare(what, subject.contract, tree, got[name], case.results[name])


def holds(subject: Subject, seeds: tuple[int, ...] = (0, 1)) -> None:
    """The candidate agrees with the reference, and what must not matter does not."""
    run = subject.compiled()
    for seed in seeds:
        agrees(subject, case(subject.contract, subject.sizes, seed), run)
    for symbol, how in subject.contract.invariant.items():
        _INVARIANCES[how](subject, symbol, run, seeds[0])


def _where(subject: Subject, seed: int) -> str:
    sizes = " ".join(f"{symbol}={value}" for symbol, value in subject.sizes.items())
    return f"{subject.contract.name} by {subject.candidate} at {sizes}, seed {seed}"


def _compare(what: str, contract: Contract, tree: Any, got: Any, want: Any) -> None:
    leaves = (jax.tree.leaves(part) for part in (tree, got, want))
    for spec, ours, theirs in zip(*leaves, strict=True):
        if not jnp.issubdtype(theirs.dtype, jnp.inexact):
            np.testing.assert_array_equal(ours, theirs, what)
            continue
        tolerance = contract.tolerance if spec.tolerance is None else spec.tolerance
        ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        finite = theirs[np.isfinite(theirs)]
        size = float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0
        np.testing.assert_allclose(
            ours, theirs, rtol=tolerance, atol=tolerance * size, err_msg=what, equal_nan=True
        )


def _rows(subject: Subject, symbol: str, run: Callable[..., Any], seed: int) -> None:
    """Turned round; compiled also the last one alone, and those in the middle."""
    contract, count = subject.contract, subject.sizes[symbol]
    arguments = contract.draw(subject.sizes, seed)
    whole = run(*arguments)
    turned = np.arange(count)[::-1]
    _same_entries(subject, symbol, run(*_taken(contract, arguments, symbol, turned)), whole, turned)
    parts = {1: np.array([count - 1]), count - 2: np.arange(1, count - 1)}
    for number, places in parts.items():
        if subject.has_bits_of_its_own and 0 < number < count:
            part = _taken(contract, arguments, symbol, places)
            got = subject.resized(symbol, number).compiled()(*part)
            named = named_places(contract, _given(contract, part))
            _same_entries(subject, symbol, got, whole, places, named)


def _prefix(subject: Subject, symbol: str, run: Callable[..., Any], seed: int) -> None:
    """With something else behind the first entry; compiled also with nothing."""
    contract, count = subject.contract, subject.sizes[symbol]
    arguments, first = contract.draw(subject.sizes, seed), np.array([0])
    others = _taken(contract, contract.draw(subject.sizes, seed + 1), symbol, np.arange(1, count))
    start = _taken(contract, arguments, symbol, first)

    def follow(spec: Spec, one: np.ndarray, rest: np.ndarray) -> np.ndarray:
        axis = spec.axis(symbol)
        return one if axis is None else np.concatenate([one, rest], axis)

    changed = tuple(
        jax.tree.map(follow, *trees)
        for trees in zip(contract.arguments.values(), start, others, strict=True)
    )
    whole = run(*arguments)
    found = [run(*changed)]
    if subject.has_bits_of_its_own and count > 1:
        found.append(subject.resized(symbol, 1).compiled()(*start))
    for got in found:
        _same_first(subject, symbol, got, whole)


def _same_first(
    subject: Subject, symbol: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    for name, tree in subject.contract.results.items():
        leaves = (jax.tree.leaves(side) for side in (tree, ours[name], theirs[name]))
        for spec, a, b in zip(*leaves, strict=True):
            axis = spec.axis(symbol)
            if axis is not None:
                what = f"{_where(subject, 0)}: {name} depends on what follows along {symbol}"
                _equal(what, np.take(a, 0, axis), np.take(b, 0, axis))


def _labels(subject: Subject, symbol: str, run: Callable[..., Any], seed: int) -> None:
    """Entries of a pool under other numbers."""
    contract, count = subject.contract, subject.sizes[symbol]
    arguments = _given(contract, contract.draw(subject.sizes, seed))
    # `at[n]` is where entry n goes; the first and the last stay.
    at = np.arange(count)
    at[1:-1] = np.roll(at[1:-1], 1)

    def rename(spec: Spec, value: np.ndarray, at: np.ndarray) -> np.ndarray:
        axis = spec.axis(symbol)
        if axis is not None:
            value = np.take(value, np.argsort(at), axis)
        return at[value].astype(value.dtype) if spec.index == symbol else value

    def renamed(trees: Mapping[str, Any], values: Mapping[str, Any], at: np.ndarray) -> dict:
        return {
            name: jax.tree.map(lambda s, v: rename(s, v, at), tree, values[name])
            for name, tree in trees.items()
        }

    moved = run(*renamed(contract.arguments, arguments, at).values())
    back = renamed(contract.results, moved, np.argsort(at))
    for name, value in run(*arguments.values()).items():
        _equal(f"{contract.name}: {name} depends on numbers along {symbol}", back[name], value)


_INVARIANCES = {"rows": _rows, "prefix": _prefix, "labels": _labels}


def _given(contract: Contract, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(contract.arguments, arguments, strict=True))


def _taken(contract: Contract, arguments: tuple, symbol: str, places: np.ndarray) -> tuple:
    """The arguments with some entries of an axis only."""

    def take(spec: Spec, value: np.ndarray) -> np.ndarray:
        axis = spec.axis(symbol)
        return value if axis is None else np.take(value, places, axis)

    return tuple(
        jax.tree.map(take, tree, value)
        for tree, value in zip(contract.arguments.values(), arguments, strict=True)
    )


def _same_entries(
    subject: Subject,
    symbol: str,
    part: Mapping[str, Any],
    whole: Mapping[str, Any],
    places: np.ndarray,
    named: Mapping[str, np.ndarray] | None = None,
) -> None:
    """`part` holds entries `places` of `whole`, bit for bit.

    Args:
        subject: for the message, and what the results are.
        symbol: the axis of which entries were taken.
        part: results for these.
        whole: results for all.
        places: which.
        named: of results without that axis, the entries that are compared, by axis; None for all.
    """
    for name, tree in subject.contract.results.items():
        leaves = (jax.tree.leaves(side) for side in (tree, part[name], whole[name]))
        for spec, ours, theirs in zip(*leaves, strict=True):
            axis = spec.axis(symbol)
            if axis is not None:
                theirs = np.take(theirs, places, axis)
            elif named is not None:
                pools = [(spec.axes.index(s), at) for s, at in named.items() if s in spec.axes]
                if not pools:
                    continue
                for axis, at in pools:
                    ours, theirs = (np.take(a, at, axis) for a in (ours, theirs))
            _equal(f"{_where(subject, 0)}: {name} depends on others along {symbol}", ours, theirs)


def _equal(what: str, ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # As float32, which is exact, since NumPy does not know NaN in small types.
        a, b = (v.astype(np.float32) if v.dtype.itemsize < 4 else v for v in (a, b))
        np.testing.assert_array_equal(a, b, what)


def _poison_free_memory(contract: Contract, sizes: Sizes) -> None:
    """Fill a GPU's free memory where results may come to lie; the interpreter does so itself."""
    if jax.default_backend() == "cpu":
        return
    for tree in contract.results.values():
        for leaf in jax.tree.leaves(sized(tree, sizes)):
            size = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
            jax.block_until_ready(jnp.full(-(-size // 4), jnp.nan, jnp.float32))
