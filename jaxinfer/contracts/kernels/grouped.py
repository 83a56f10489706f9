"""`pallas_kernels.grouped_experts`: routed experts of prompts."""

from typing import Any

import numpy as np

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.draws import uniform
from jaxinfer.contracts.kernels.experts import visited
from jaxinfer.contracts.weights import weight
from pallas_kernels.grouped_experts import SOME, grouped_experts, reference
from pallas_kernels.matmul import Tiles

_REAL = {"L": 40, "E": 256, "k": 8, "I": 512, "D": 2048}


def _choose(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """For each row different experts."""
    return np.argsort(rng.random((shape[0], sizes["E"])), axis=1)[:, : shape[1]]


def _by_tiles(*arguments: Any, impl: Any, layer: int, **knobs: int) -> Any:
    h, chosen, weights, gate_up, down = arguments
    tiles = Tiles(**knobs)
    return grouped_experts(h, chosen, weights, gate_up, down, layer, impl=impl, tiles=tiles)


def _bytes(s: Sizes) -> float:
    """Every visited expert's weights once, 4.5 bits an element; rows in and out."""
    return visited(s) * 3 * s["I"] * s["D"] * 9 / 16 + s["R"] * s["D"] * 6


CONTRACTS = (
    Contract(
        name="grouped_experts",
        doc="`Σ_j w_j (silu(h G_jᵀ) · (h U_jᵀ)) D_jᵀ` over the chosen experts of many rows.",
        arguments={
            "h": Spec("R D", "bfloat16"),
            "chosen": Spec("R k", "int32", _choose, index="E"),
            "weights": Spec("R k", "float32", uniform(0, 0.25)),
            "gate_up": weight("nvfp4", "L E 2*I D", parts="2"),
            "down": weight("nvfp4", "L E D I"),
        },
        results={"y": Spec("R D", "float32")},
        reference=reference,
        candidates={
            "triton": Candidate(
                _by_tiles,
                around(SOME, rows=(64, 16), cols=(256, 64), warps=(8,), stages=(4, 2)),
            )
        },
        shapes={
            "prefill 64 tokens": {**_REAL, "R": 64},
            "prefill 2,048 tokens": {**_REAL, "R": 2048},
        },
        edges={"five rows": {"R": 5, "L": 2, "E": 6, "k": 2, "I": 32, "D": 64}},
        tolerance=2e-2,
        stack="L",
        invariant={"R": "rows", "E": "labels"},
        operations=lambda s: 6.0 * s["R"] * s["k"] * s["I"] * s["D"],
        bytes=_bytes,
    ),
)
