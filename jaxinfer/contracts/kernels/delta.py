"""`pallas_kernels.delta_step` and `pallas_kernels.delta_chunk`: Gated DeltaNet."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.draws import constant, distinct, integers, normal, uniform
from pallas_kernels.delta_chunk import delta_chunks
from pallas_kernels.delta_plain import Places
from pallas_kernels.delta_step import delta_step

EPS = 1e-6
_REAL = {"L": 30, "H": 32, "g": 16, "d": 128, "e": 128, "W": 4, "P": 4}
_TINY = {"L": 2, "H": 2, "g": 1, "d": 16, "e": 16, "W": 4, "P": 3}


def _step(*arguments: Any, layer: int, impl: Any = "plain", **knobs: Any) -> Any:
    weights, state = arguments[:8], arguments[8:]
    function: Callable[..., Any] = delta_step
    return tuple(function(*weights, layer, *state, eps=EPS, impl=impl, **knobs))


def _forget_the_rejected(drawn: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Poison pending rows that were not accepted."""
    for slot, accepted in enumerate(drawn["pending"]):
        for name in ("pending_x", "pending_g", "pending_beta"):
            drawn[name][:, slot, accepted:] = np.nan
    return drawn


def _chunks(*arguments: Any, layer: int, impl: Any = "plain", **knobs: Any) -> Any:
    weights, (conv, recurrent, *places) = arguments[:8], arguments[8:]
    function: Callable[..., Any] = delta_chunks
    scratch = recurrent.shape[1] - 1
    state = conv, recurrent, Places(*places)
    return tuple(function(*weights, layer, *state, scratch=scratch, eps=EPS, impl=impl, **knobs))


def _chunks_reference(*arguments: Any, layer: int) -> Any:
    y, recurrent, conv = _chunks(*arguments, layer=layer)
    # Plain JAX writes to scratch what is not to be kept.
    pools = zip((recurrent, conv), (arguments[9], arguments[8]), strict=True)
    return y, *(new.at[:, -1].set(old[:, -1]) for new, old in pools)


def _each_its_own(drawn: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Go on from the own slot; keep no snapshot of every other piece, poison where others go."""
    drawn["source"] = drawn["slot"].copy()
    drawn["snapshot"] = np.setdiff1d(np.arange(1, sizes["B"] - 1), drawn["slot"])[: sizes["P"]]
    drawn["snapshot"] = drawn["snapshot"].astype(np.int32)
    drawn["snapshot"][::2] = sizes["B"] - 1
    for name in ("conv", "recurrent"):
        drawn[name][:, drawn["snapshot"]] = np.nan
    return drawn


def _bytes(s: Sizes) -> float:
    """States read and written in float32; everything else is small beside them."""
    state = s["H"] * s["d"] * s["e"] * 4
    rows = 2 * (s["T"] + s["P"] + s["W"]) * s["C"] + 4 * s["T"] * s["H"] * s["e"]
    return s["b"] * (2.0 * state + rows) + 2.0 * s["W"] * s["C"]


def _chunk_bytes(s: Sizes) -> float:
    state, rows = s["H"] * s["d"] * s["e"] * 4, 64 * (2 * s["C"] + 4 * s["H"] * s["e"])
    return s["P"] * (2.0 * state + rows)


def _chunk_operations(s: Sizes) -> float:
    """Products with the state, of keys and queries, and with what is written, for each head."""
    each = 3 * s["d"] * s["e"] + 2 * 64 * s["d"] + 64 * (s["d"] + 2 * s["e"])
    return 2.0 * s["P"] * 64 * s["H"] * each


_WEIGHTS: dict[str, Any] = {
    "conv_weight": Spec("L C W", "bfloat16", normal(0.5)),
    "A_log": Spec("L H", "float32", uniform(0, 2.7)),
    "dt_bias": Spec("L H", "float32", uniform(-6, -2)),
    "o_norm": Spec("L e", "bfloat16", uniform(0.5, 1.5)),
    "conv": Spec("L B W-1 C", "bfloat16"),
    "recurrent": Spec("L B H d e", "float32", normal(0.1)),
}
_ENTRY = Spec("P", "int32", distinct(1, "B-1"), index="B")
_ROW = "b T H"
_POOL = "L B P H"
_POOLS = ("conv", "recurrent", "pending_x", "pending_g", "pending_beta")

CONTRACTS = (
    Contract(
        name="delta_step",
        doc="Advance the state over accepted pending rows, then run new rows from there.",
        arguments={
            "x": Spec("b T C", "bfloat16"),
            "a": Spec(_ROW, "bfloat16"),
            "b": Spec(_ROW, "bfloat16"),
            "z": Spec("b T H*e", "bfloat16"),
            **_WEIGHTS,
            "pending_x": Spec("L B P C", "bfloat16"),
            "pending_g": Spec(_POOL, "float32", uniform(-1, 0)),
            "pending_beta": Spec(_POOL, "float32", uniform(0, 1)),
            "pending": Spec("B", "int32", integers(0, "P+1")),
            "slot": Spec("b", "int32", distinct(0, "B-1"), index="B"),
        },
        results={
            "y": Spec("b T H*e", "bfloat16"),
            "conv": Spec("L B W-1 C", "bfloat16"),
            "recurrent": Spec("L B H d e", "float32", tolerance=1e-3),
            "pending_x": Spec("L B P C", "bfloat16"),
            "pending_g": Spec(_POOL, "float32", tolerance=1e-4),
            "pending_beta": Spec(_POOL, "float32", tolerance=1e-4),
        },
        reference=_step,
        candidates={"triton": Candidate(_step, around(delta_step, tile_v=(32, 64, 128)))},
        shapes={
            "decode 1 row": {**_REAL, "C": 8192, "b": 1, "T": 1, "B": 2},
            "verify 4 rows": {**_REAL, "C": 8192, "b": 1, "T": 4, "B": 2},
            "32 streams": {**_REAL, "C": 8192, "b": 32, "T": 1, "B": 33},
        },
        edges={"two sequences": {**_TINY, "C": 64, "b": 2, "T": 2, "B": 5}},
        tolerance=2e-2,
        overwrites={name: name for name in _POOLS},
        stack="L",
        invariant={"b": "rows", "T": "prefix", "B": "labels"},
        arrange=_forget_the_rejected,
        bytes=_bytes,
    ),
    Contract(
        name="delta_chunks",
        doc="The same for pieces of 64 tokens of prompts, each of a sequence of its own.",
        arguments={
            "x": Spec("P 64 C", "bfloat16"),
            "a": Spec("P 64 H", "bfloat16"),
            "b": Spec("P 64 H", "bfloat16"),
            "z": Spec("P 64 H*e", "bfloat16"),
            **_WEIGHTS,
            "slot": _ENTRY,
            "start": Spec("P", "int32", integers(0, 640, unit=64)),
            "valid": Spec("P", "int32", constant(64)),
            "source": _ENTRY,
            "snapshot": _ENTRY,
        },
        results={
            "y": Spec("P 64 H*e", "bfloat16"),
            "recurrent": Spec("L B H d e", "float32", tolerance=1e-3),
            "conv": Spec("L B W-1 C", "bfloat16"),
        },
        reference=_chunks_reference,
        # Some versions of ptxas keep two registers too few for the first kernel.
        candidates={
            "triton": Candidate(_chunks, around(delta_chunks, tile_v=(32, 16, 64)), spills=16)
        },
        shapes={
            "1 piece": {**_REAL, "C": 8192, "P": 1, "B": 4},
            "32 pieces": {**_REAL, "C": 8192, "P": 32, "B": 67},
        },
        edges={"two pieces": {**_TINY, "g": 2, "d": 32, "e": 64, "C": 256, "P": 2, "B": 7}},
        tolerance=2e-2,
        overwrites={"recurrent": "recurrent", "conv": "conv"},
        stack="L",
        invariant={"P": "rows", "B": "labels"},
        arrange=_each_its_own,
        operations=_chunk_operations,
        bytes=_chunk_bytes,
    ),
)
