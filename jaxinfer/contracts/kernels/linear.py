"""`pallas_kernels.linear`: a weight of any format times rows, as XLA compiles it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.contracts.contract import Candidate, Contract, Spec
from jaxinfer.contracts.weights import FORMATS, weight
from pallas_kernels import Fp8, dequantise, linear, take
from pallas_kernels.weights import FP8_MAX


def reference(x: jax.Array, w: Any, layer: int) -> jax.Array:
    """`x Wᵀ` in float32, of what the stored numbers stand for."""
    w, rows = take(w, layer), x.astype(jnp.float32)
    if isinstance(w, Fp8) and w.input_scale is not None:
        rows = jnp.clip(rows * (1 / w.input_scale), -FP8_MAX, FP8_MAX)
        rows = rows.astype(jnp.float8_e4m3fn).astype(jnp.float32) * w.input_scale
    y = jnp.matmul(rows, dequantise(w).T, precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype)


def _by_xla(x: jax.Array, w: Any, *, impl: Any, layer: int) -> jax.Array:
    return linear(x, w, layer)


def _contract(kind: str) -> Contract:
    return Contract(
        name=f"linear_{kind}",
        doc=f"`y = x Wᵀ` for a stacked `{kind}` weight, summed in float32.",
        arguments={"x": Spec("R K", "bfloat16"), "w": weight(kind, "L N K")},
        results={"y": Spec("R N", "bfloat16")},
        reference=reference,
        candidates={"xla": Candidate(_by_xla)},
        shapes={
            "decode 1 row": {"R": 1, "N": 4096, "K": 2048, "L": 30},
            "prefill 1,024 tokens": {"R": 1024, "N": 4096, "K": 2048, "L": 30},
        },
        edges={
            "one row": {"R": 1, "N": 3, "K": 16, "L": 1},
            "few": {"R": 5, "N": 32, "K": 64, "L": 2},
        },
        tolerance=1e-2,
        stack="L",
        operations=lambda s: 2.0 * s["R"] * s["N"] * s["K"],
        group=("N", "K"),
    )


CONTRACTS = tuple(_contract(kind) for kind in FORMATS)
