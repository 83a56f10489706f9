"""The arithmetic that XLA does not do well, each operation beside its plain-jnp reference."""

from pallas_kernels.backend import Impl
from pallas_kernels.rows import each, rowwise, sealed
from pallas_kernels.weights import (
    Dense,
    Fp8,
    Nvfp4,
    Observed,
    PerLayer,
    Weight,
    dequantise,
    linear,
    take,
)

__all__ = [
    "Dense",
    "Fp8",
    "Impl",
    "Nvfp4",
    "Observed",
    "PerLayer",
    "Weight",
    "dequantise",
    "each",
    "linear",
    "rowwise",
    "sealed",
    "take",
]
