"""`pallas_kernels.experts`: the mixture of experts of decode rows."""

from collections.abc import Callable
from typing import Any

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.kernels.projection import ROWS
from jaxinfer.contracts.weights import weight
from pallas_kernels import Nvfp4
from pallas_kernels.experts import Tiles, expert_inner, expert_outer

TOP = 8
_KNOBS = around(Tiles(), rows=(8, 16), parts=(4, 8, 16), warps=(2, 4, 8))
_REAL = {"L": 40, "E": 256, "k": TOP, "I": 512, "S": 512, "D": 2048}
_TINY = {"R": 3, "L": 2, "E": 16, "k": TOP, "I": 32, "S": 64, "D": 512}


def _inner(*arguments: Any, layer: int, impl: Any = "plain", **knobs: int) -> Any:
    function: Callable[..., Any] = expert_inner
    after = (Nvfp4, Nvfp4)
    return function(*arguments, layer, TOP, after, impl=impl, tiles=Tiles(**knobs))


def _outer(*arguments: Any, layer: int, impl: Any = "plain", **knobs: int) -> Any:
    function: Callable[..., Any] = expert_outer
    return function(*arguments, layer, TOP, impl=impl, tiles=Tiles(**knobs))


def visited(s: Sizes) -> float:
    """Experts that `R` rows call for, if each is as likely."""
    return s["E"] * (1 - (1 - s["k"] / s["E"]) ** s["R"])


def _weight_bytes(s: Sizes, outputs: int, routed: int, shared: int) -> float:
    """Bytes of NVFP4 matrices with so many outputs: 4.5 bits an element."""
    return outputs * (visited(s) * routed + shared) * 9 / 16


def _inner_bytes(s: Sizes) -> float:
    rows = 2.0 * s["R"] * (2 * s["D"] + s["E"] + s["k"] * s["I"] + s["S"])
    return rows + _weight_bytes(s, 2 * s["D"], s["I"], s["S"])


def _outer_bytes(s: Sizes) -> float:
    rows = 2.0 * s["R"] * (2 * s["D"] + s["E"] + s["k"] * s["I"] + s["S"])
    return rows + _weight_bytes(s, s["D"], s["I"], s["S"])


def _multiplied(s: Sizes) -> float:
    return 2.0 * s["R"] * s["D"] * (s["k"] * s["I"] + s["S"])


CONTRACTS = (
    Contract(
        name="expert_inner",
        doc="`silu(h Gᵀ) · (h Uᵀ)` for the experts of a row's highest logits and the shared one.",
        arguments={
            "h": Spec("R D", "bfloat16"),
            "h_shared": Spec("R D", "bfloat16"),
            "logits": Spec("R E", "bfloat16"),
            "gate_up": weight("nvfp4", "L E 2*I D", parts="2"),
            "shared": weight("nvfp4", "L 2*S D", parts="2"),
        },
        results={"inner": Spec("R k*I+S", "bfloat16")},
        reference=_inner,
        candidates={"triton": Candidate(_inner, _KNOBS)},
        shapes={where: {**rows, **_REAL} for where, rows in ROWS.items()},
        edges={"three rows": _TINY},
        tolerance=3e-2,
        stack="L",
        invariant={"R": "rows"},
        operations=lambda s: 2 * _multiplied(s),
        bytes=_inner_bytes,
    ),
    Contract(
        name="expert_outer",
        doc="`x + Σ_j w_j inner_j D_jᵀ + sigmoid(gate) · inner_s D_sᵀ` for the same experts.",
        arguments={
            "x": Spec("R D", "bfloat16"),
            "inner": Spec("R k*I+S", "bfloat16"),
            "logits": Spec("R E", "bfloat16"),
            "gate": Spec("R 1", "bfloat16"),
            "down": weight("nvfp4", "L E D I"),
            "shared": weight("nvfp4", "L D S"),
        },
        results={"y": Spec("R D", "bfloat16")},
        reference=_outer,
        candidates={"triton": Candidate(_outer, _KNOBS)},
        shapes={where: {**rows, **_REAL} for where, rows in ROWS.items()},
        edges={"three rows": _TINY},
        tolerance=2e-2,
        stack="L",
        invariant={"R": "rows"},
        operations=_multiplied,
        bytes=_outer_bytes,
    ),
)
