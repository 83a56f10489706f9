"""The form of a promise: one object from which checks, figures and documentation follow."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.contracts import draws
from pallas_kernels.backend import Impl

Sizes = Mapping[str, int]
"""A number for each symbol that stands in the shapes of a contract."""

Knobs = Mapping[str, Any]
"""A value for each of a candidate's block sizes, warps and stages."""


_NORMAL = draws.normal()


@dataclass(frozen=True)
class Spec:
    """An array that is taken or given.

    Attributes:
        shape: its axes, separated by blanks: a symbol, a number, or arithmetic with them that goes
            from left to right, such as `K/16` or `k*I+S`. Empty for a scalar.
        dtype: name of its type.
        draw: how random values of it are made; see `draws`.
        index: the symbol of the axis that its values are places on, for tables, slots and ids.
        memory: "device" or "host".
        tolerance: of a result, where it is not the contract's.
    """

    shape: str
    dtype: str
    draw: draws.Draw = _NORMAL
    index: str = ""
    memory: Literal["device", "host"] = "device"
    tolerance: float | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Its axes as written."""
        return tuple(self.shape.split())

    def sized(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        """Shape and type once the symbols have values."""
        shape = tuple(draws.evaluate(axis, sizes) for axis in self.axes)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def axis(self, symbol: str) -> int | None:
        """Where an axis lies, or None."""
        return self.axes.index(symbol) if symbol in self.axes else None


@dataclass(frozen=True)
class Candidate:
    """A way to compute what a contract promises.

    Attributes:
        run: takes the contract's arguments, then by name `impl`, `layer` if the contract has a
            stack, and the knobs. Raises ValueError for knobs that do not fit the shapes.
        knobs: values to try for each; the first is the default.
        instructions: what its machine code must hold, as PTX names it (`wgmma`, `mma.sync`).
        spills: bytes that a thread may move between registers and memory, where it has its reason.
    """

    run: Callable[..., Any]
    knobs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    instructions: tuple[str, ...] = ()
    spills: int = 0

    @property
    def defaults(self) -> Knobs:
        """The first value of every knob."""
        return {name: values[0] for name, values in self.knobs.items()}

    def settings(self) -> Iterator[Knobs]:
        """All combinations, the default first."""
        for values in product(*self.knobs.values()):
            yield dict(zip(self.knobs, values, strict=True))


def around(default: Any, **values: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Values to try for knobs, after those that they have by default.

    Args:
        default: a dataclass with a field for each knob, or a function with a keyword for each.
        values: what else to try, by knob.
    """
    if callable(default):
        keywords = inspect.signature(default).parameters
        own = {name: keywords[name].default for name in values}
    else:
        own = {field.name: getattr(default, field.name) for field in fields(default)}
    tried = {name: (value, *values.get(name, ())) for name, value in own.items()}
    return {name: tuple(dict.fromkeys(each)) for name, each in tried.items()}


Invariance = Literal["rows", "prefix", "labels"]
"""How one axis does not matter to the bits of a result.

rows: entry r of a result depends on entry r of the arguments alone: not on its place, nor on how
    many there are.
prefix: entry t depends on entries 0 to t alone: not on what stands behind it.
labels: the numbers of the entries are names; what bears another one gives the same. The first and
    the last, which pools keep for scratch, keep theirs.
"""


@dataclass(frozen=True)
class Contract:
    """What an operation promises.

    Attributes:
        name: of the operation.
        doc: what it computes.
        arguments: by name, pytrees (weights, states) whose leaves are `Spec`s, in order.
        results: the same for what it returns: one value, or a tuple of them in this order.
        reference: the specification, as plain JAX over the same arguments (and `layer`).
        candidates: what may run in its place; the first one does by default.
        shapes: sizes from the real world, by what they stand for.
        edges: sizes small enough to interpret, among them the awkward ones.
        tolerance: a result may be off by so much, relative to its magnitude and to the root mean
            square of its array; integers must be equal.
        overwrites: arguments that are donated, and the results that take their place.
        stack: symbol of the axis of layers; the operation is told which one.
        invariant: symbols of axes that do not matter, and how.
        arrange: the last word on what was drawn: makes arguments fit each other, poisons what may
            not be read.
        operations: multiplications and additions that the tensor cores must do at least.
        bytes: that must move at least; by default all that `least_bytes` finds addressed.
        group: symbols for whose values block sizes are chosen apart. Never rows: another tile for
            another number of rows would show in the bits.
    """

    name: str
    doc: str
    arguments: Mapping[str, Any]
    results: Mapping[str, Any]
    reference: Callable[..., Any]
    candidates: Mapping[str, Candidate]
    shapes: Mapping[str, Sizes]
    edges: Mapping[str, Sizes]
    tolerance: float
    overwrites: Mapping[str, str] = field(default_factory=dict)
    stack: str = ""
    invariant: Mapping[str, Invariance] = field(default_factory=dict)
    arrange: Callable[[dict[str, Any], Sizes], dict[str, Any]] = lambda drawn, sizes: drawn
    operations: Callable[[Sizes], float] = lambda sizes: 0.0
    bytes: Callable[[Sizes], float] | None = None
    group: tuple[str, ...] = ()

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the arguments that are overwritten."""
        return tuple(i for i, name in enumerate(self.arguments) if name in self.overwrites)

    def layer(self, sizes: Sizes) -> dict[str, int]:
        """The layer that checks ask for, by name: the last, which only an index reaches."""
        return {"layer": sizes[self.stack] - 1} if self.stack else {}

    def function(
        self, candidate: str, sizes: Sizes, impl: Impl, knobs: Knobs | None = None
    ) -> Callable[..., Any]:
        """A candidate with all fixed but the arguments."""
        chosen = self.candidates[candidate]
        settings = chosen.defaults if knobs is None else knobs
        layer = self.layer(sizes)
        return lambda *arguments: chosen.run(*arguments, impl=impl, **layer, **settings)

    def specification(self, sizes: Sizes) -> Callable[..., Any]:
        """The reference with all fixed but the arguments."""
        return partial(self.reference, **self.layer(sizes))

    def named(self, output: Any) -> dict[str, Any]:
        """What an operation returned, by the names of the results."""
        values = (output,) if len(self.results) == 1 else output
        return dict(zip(self.results, values, strict=True))

    def shaped(self, sizes: Sizes) -> tuple[Any, ...]:
        """The arguments as `jax.ShapeDtypeStruct`s."""
        return tuple(sized(tree, sizes) for tree in self.arguments.values())

    def draw(self, sizes: Sizes, seed: int) -> tuple[Any, ...]:
        """Random arguments as NumPy arrays, poisoned where nothing may be read."""
        rng = np.random.default_rng(seed)
        drawn = {
            name: jax.tree.map(lambda spec: _draw(spec, sizes, rng), tree)
            for name, tree in self.arguments.items()
        }
        return tuple(_poison(self, self.arrange(drawn, sizes), sizes).values())


def sized(tree: Any, sizes: Sizes) -> Any:
    """A pytree of `Spec`s as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda spec: spec.sized(sizes), tree)


def _draw(spec: Spec, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    target = spec.sized(sizes)
    return np.asarray(spec.draw(rng, target.shape, sizes)).astype(target.dtype)


def named_places(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For each axis that arguments index, the places they name."""
    found: dict[str, list[np.ndarray]] = {}
    for name, tree in contract.arguments.items():
        for spec, value in zip(
            jax.tree.leaves(tree), jax.tree.leaves(arguments[name]), strict=True
        ):
            if spec.index:
                found.setdefault(spec.index, []).append(np.unique(value))
    return {symbol: np.unique(np.concatenate(parts)) for symbol, parts in found.items()}


def _poison(contract: Contract, arguments: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """NaN in other layers, and in entries of pools that no index names."""
    readable = named_places(contract, arguments)
    if contract.stack:
        readable[contract.stack] = np.array([contract.layer(sizes)["layer"]])

    def poison(spec: Spec, value: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        for symbol, places in readable.items():
            axis = spec.axis(symbol)
            if axis is not None:
                others = np.setdiff1d(np.arange(value.shape[axis]), places)
                value[(slice(None),) * axis + (others,)] = np.nan
        return value

    return {
        name: jax.tree.map(poison, contract.arguments[name], value)
        for name, value in arguments.items()
    }


def least_bytes(contract: Contract, sizes: Sizes) -> float:
    """Bytes that must move at least.

    By default every argument is read once and every result written once; of a stack one layer
    counts, of a pool as many entries as there are indices to it.
    """
    if contract.bytes is not None:
        return contract.bytes(sizes)
    leaves = jax.tree.leaves(dict(contract.arguments)) + jax.tree.leaves(dict(contract.results))
    indices: dict[str, int] = {}
    for spec in jax.tree.leaves(dict(contract.arguments)):
        if spec.index:
            count = prod(spec.sized(sizes).shape)
            indices[spec.index] = indices.get(spec.index, 0) + count
    total = 0.0
    for spec in leaves:
        target = spec.sized(sizes)
        share = 1.0
        for axis in spec.axes:
            if axis == contract.stack:
                share /= sizes[axis]
            elif axis in indices:
                share *= min(1.0, indices[axis] / sizes[axis])
        total += share * prod(target.shape) * target.dtype.itemsize
    return total
