"""Weights as arguments of a contract: stored bits that stand for matrices of deviation 0.02."""

from typing import Any

from jaxinfer.contracts.contract import Spec
from jaxinfer.contracts.draws import codes, normal, uniform
from pallas_kernels import Dense, Fp8, Nvfp4

FORMATS = ("dense", "fp8", "fp8_static", "nvfp4")


def weight(kind: str, shape: str, parts: str = "1", dtype: str = "bfloat16") -> Any:
    """A weight whose leaves are `Spec`s.

    Args:
        kind: one of `FORMATS`; "fp8_static" rounds its inputs (W8A8), "fp8" does not.
        shape: axes of the matrix, `... N K`.
        parts: how many fused parts have a scale of their own, a number or a symbol.
        dtype: of a dense weight.
    """
    *stack, N, K = shape.split()
    lead = " ".join(stack)
    scale = f"{lead} {parts}"
    match kind:
        case "dense":
            return Dense(_spec(shape, dtype, normal(0.02)))
        case "fp8" | "fp8_static":
            inputs = _spec(lead, "float32", uniform(0.01, 0.02)) if kind == "fp8_static" else None
            bits = _spec(shape, "float8_e4m3fn", normal(100))
            return Fp8(bits, _spec(scale, "float32", uniform(1.5e-4, 2.5e-4)), inputs)
        case "nvfp4":
            # Codes drawn evenly have deviation 2.91.
            return Nvfp4(
                _spec(f"{lead} {N} {K}/2", "uint8", codes()),
                _spec(f"{lead} {N} {K}/16", "float8_e4m3fn", uniform(32, 96)),
                _spec(scale, "float32", uniform(0.8e-4, 1.4e-4)),
            )
    raise ValueError(f"unknown weight format {kind!r}; there are {', '.join(FORMATS)}")


def _spec(shape: str, dtype: str, draw: Any) -> Any:
    return Spec(shape, dtype, draw)
