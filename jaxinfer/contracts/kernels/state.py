"""Changes of what slots hold from one step to the next, in place."""

from typing import Any

import jax

from jaxinfer.contracts.contract import Candidate, Contract, Spec
from jaxinfer.contracts.draws import distinct, integers
from jaxinfer.engine.sampling import Sampler, count
from jaxinfer.qwen.model import accept
from jaxinfer.qwen.state import Rows, State

_SLOT = Spec("b", "int32", distinct(0, "B-1"), index="B")
_SHAPES = {"decode 1 row": {"b": 1, "B": 2}, "32 streams": {"b": 32, "B": 33}}


def _alone(kind: type, **fields: Any) -> Any:
    """One of a dataclass with nothing in the other fields."""
    return kind(**{**dict.fromkeys(kind.__dataclass_fields__), **fields})


def _accept(
    length: jax.Array, pending: jax.Array, slot: jax.Array, accepted: jax.Array, *, impl: Any
) -> tuple[jax.Array, jax.Array]:
    state = _alone(State, length=length, pending=pending)
    state = accept(state, _alone(Rows, slot=slot), accepted)
    return state.length, state.pending


def _accept_one_by_one(
    length: jax.Array, pending: jax.Array, slot: jax.Array, accepted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    for row in range(slot.shape[0]):
        at = slot[row]
        length = length.at[at].set(length[at] + accepted[row])
        pending = pending.at[at].set(accepted[row])
    return length, pending


def _count(
    counts: jax.Array, slot: jax.Array, tokens: jax.Array, number: jax.Array, *, impl: Any
) -> jax.Array:
    return count(_alone(Sampler, counts=counts), slot, tokens, number).counts


def _count_one_by_one(
    counts: jax.Array, slot: jax.Array, tokens: jax.Array, number: jax.Array
) -> jax.Array:
    for row in range(slot.shape[0]):
        for place in range(tokens.shape[1]):
            at = slot[row], tokens[row, place]
            counts = counts.at[at].set(counts[at] + (place < number[row]))
    return counts


CONTRACTS = (
    Contract(
        name="accept",
        doc="Keep the first rows of the last step: its sequences are so much longer.",
        arguments={
            "length": Spec("B", "int32", integers(0, 1000)),
            "pending": Spec("B", "int32", integers(0, 5)),
            "slot": _SLOT,
            "accepted": Spec("b", "int32", integers(0, 5)),
        },
        results={"length": Spec("B", "int32"), "pending": Spec("B", "int32")},
        reference=_accept_one_by_one,
        candidates={"xla": Candidate(_accept)},
        shapes=_SHAPES,
        edges={"three sequences": {"b": 3, "B": 6}},
        tolerance=0,
        overwrites={"length": "length", "pending": "pending"},
        invariant={"b": "rows", "B": "labels"},
    ),
    Contract(
        name="count_tokens",
        doc="Count the first of some tokens of each sequence, for the penalties.",
        arguments={
            "counts": Spec("B V", "int32", integers(0, 9)),
            "slot": _SLOT,
            "tokens": Spec("b T", "int32", integers(0, "V")),
            "number": Spec("b", "int32", integers(0, "T+1")),
        },
        results={"counts": Spec("B V", "int32")},
        reference=_count_one_by_one,
        candidates={"xla": Candidate(_count)},
        shapes={name: {**sizes, "T": 4, "V": 248320} for name, sizes in _SHAPES.items()},
        edges={"three sequences": {"b": 3, "B": 6, "T": 4, "V": 5}},
        tolerance=0,
        overwrites={"counts": "counts"},
        invariant={"b": "rows", "B": "labels"},
        bytes=lambda s: 3.0 * 4 * s["b"] * s["T"],
    ),
)
