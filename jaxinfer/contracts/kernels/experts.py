"""`pallas_kernels.experts`: the mixture of experts of decode rows."""

from collections.abc import Callable
from typing import Any

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.kernels.projection import ROWS
from jaxinfer.contracts.weights import weight
from pallas_kernels import expert_rows, experts_mosaic
from pallas_kernels.backend import as_data
from pallas_kernels.experts import Layer, Tiles, experts
from pallas_kernels.matmul import place

TOP = 8
_KNOBS = around(Tiles(), up=(16,), down=(64, 256), warps=(4,), stages=(1, 3))
_REAL = {"L": 40, "E": 256, "k": TOP, "I": 512, "S": 512, "D": 2048}
_TINY = {"R": 3, "L": 2, "E": 16, "k": TOP, "I": 32, "S": 64, "D": 512}


def _run(*arguments: Any, layer: int, impl: Any = "plain", **knobs: int) -> Any:
    function: Callable[..., Any] = experts
    rows, weights = arguments[:-4], Layer(*arguments[-4:])
    return function(*rows, weights, layer, TOP, impl=impl, tiles=Tiles(**knobs))


def _row_by_row(*arguments: Any, layer: int, impl: Any, **knobs: int) -> Any:
    rows, weights = arguments[:-4], Layer(*arguments[-4:])
    stacks, at = zip(*(place(w, layer) for w in weights), strict=True)
    function: Callable[..., Any] = expert_rows.expert_rows
    tiles = expert_rows.Tiles(**knobs)
    return function(*rows, Layer(*stacks), as_data(*at), k=TOP, impl=impl, tiles=tiles)


def _streamed(*arguments: Any, layer: int, impl: Any, **knobs: int) -> Any:
    rows, weights = arguments[:-4], Layer(*arguments[-4:])
    stacks, at = zip(*(place(w, layer) for w in weights), strict=True)
    if not experts_mosaic.fits(stacks):
        # The shapes of the edges are too small for it.
        return _run(*arguments, layer=layer, impl=impl)
    function: Callable[..., Any] = experts_mosaic.experts_mosaic
    tiles = experts_mosaic.Tiles(**knobs)
    return function(*rows, Layer(*stacks), as_data(*at), k=TOP, impl=impl, tiles=tiles)


def visited(s: Sizes) -> float:
    """Experts that `R` rows call for, if each is as likely."""
    return s["E"] * (1 - (1 - s["k"] / s["E"]) ** s["R"])


def _bytes(s: Sizes) -> float:
    """Rows, and NVFP4 matrices at 4.5 bits an element."""
    rows = 2.0 * s["R"] * (4 * s["D"] + s["E"] + 1)
    return rows + 3 * s["D"] * (visited(s) * s["I"] + s["S"]) * 9 / 16


def _operations(s: Sizes) -> float:
    return 6.0 * s["R"] * s["D"] * (s["k"] * s["I"] + s["S"])


CONTRACTS = (
    Contract(
        name="experts",
        doc="`x + Σ_j w_j (silu(h G_jᵀ) · (h U_jᵀ)) D_jᵀ` over the experts of a row's highest "
        "logits, and the shared one's by its gate.",
        arguments={
            "x": Spec("R D", "bfloat16"),
            "h": Spec("R D", "bfloat16"),
            "h_shared": Spec("R D", "bfloat16"),
            "logits": Spec("R E", "bfloat16"),
            "gate": Spec("R 1", "bfloat16"),
            "up": weight("nvfp4", "L E 2*I D", parts="2"),
            "shared_up": weight("nvfp4", "L 2*S D", parts="2"),
            "down": weight("nvfp4", "L E D I"),
            "shared_down": weight("nvfp4", "L D S"),
        },
        results={"y": Spec("R D", "bfloat16")},
        reference=_run,
        candidates={
            "mosaic": Candidate(
                _streamed,
                around(experts_mosaic.Tiles(), depth=(256,), stages=(3,), blocks=(396, 528)),
            ),
            "triton": Candidate(_run, _KNOBS),
            "row by row": Candidate(
                _row_by_row, around(expert_rows.Tiles(), up=(32,), shared_up=(8,), warps=(8,))
            ),
        },
        shapes={where: {**rows, **_REAL} for where, rows in ROWS.items()},
        edges={"three rows": _TINY},
        tolerance=3e-2,
        stack="L",
        invariant={"R": "rows"},
        operations=_operations,
        bytes=_bytes,
    ),
)
