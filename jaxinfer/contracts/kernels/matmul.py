"""`pallas_kernels.matmul`: projections of prompts."""

from typing import Any

import jax

from jaxinfer.contracts.contract import Candidate, Contract, Spec, around
from jaxinfer.contracts.kernels.linear import reference
from jaxinfer.contracts.weights import weight
from pallas_kernels.matmul import E4M3_SIZES, Tiles, matmul

_KNOBS = around(Tiles(), rows=(64, 128), cols=(128, 64), depth=(128, 64), warps=(4, 8))
_E4M3_KNOBS = around(E4M3_SIZES[0], rows=(64, 256), cols=(128, 64), warps=(4,), pieces=(1,))


def _by_tiles(x: jax.Array, w: Any, *, impl: Any, layer: int, **knobs: int) -> jax.Array:
    return matmul(x, w, layer, impl=impl, tiles=Tiles(**knobs))


def _contract(kind: str) -> Contract:
    knobs = _E4M3_KNOBS if kind == "fp8_static" else _KNOBS
    return Contract(
        name=f"matmul_{kind}",
        doc=f"`y = x Wᵀ` for many rows and a stacked `{kind}` weight, on tensor cores.",
        arguments={"x": Spec("R K", "bfloat16"), "w": weight(kind, "L N K")},
        results={"y": Spec("R N", "bfloat16")},
        reference=reference,
        candidates={"triton": Candidate(_by_tiles, knobs, instructions=("wgmma",))},
        shapes={
            "prefill 64 tokens": {"R": 64, "N": 8192, "K": 2048, "L": 30},
            "prefill 2,048 tokens": {"R": 2048, "N": 8192, "K": 2048, "L": 30},
        },
        edges={"five rows": {"R": 5, "N": 32, "K": 64, "L": 2}},
        tolerance=1e-2,
        stack="L",
        invariant={"R": "rows"},
        operations=lambda s: 2.0 * s["R"] * s["N"] * s["K"],
        group=("N", "K"),
    )


CONTRACTS = tuple(_contract(kind) for kind in ("dense", "fp8_static", "nvfp4"))
