"""`pallas_kernels.picture_attention`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.draws import uniform
from pallas_kernels.picture_attention import Tiles, by_parts, picture_attention, turn
from pallas_kernels.picture_attention_mosaic import Tiles as MosaicTiles
from pallas_kernels.picture_attention_mosaic import picture_attention_mosaic

_REAL = {"H": 16, "d": 64}


def _by_triton(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, impl: Any, **knobs: Any
) -> jax.Array:
    return picture_attention(qkv, cos, sin, impl=impl, tiles=Tiles(**knobs))


def _by_mosaic(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, impl: Any, **knobs: Any
) -> jax.Array:
    return picture_attention_mosaic(qkv, cos, sin, impl=impl, tiles=MosaicTiles(**knobs))


def _by_cudnn(qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, impl: Any) -> jax.Array:
    """Turned by XLA; what is not for a GPU is XLA's altogether."""
    parts = by_parts(qkv, cos)
    query, key = (turn(parts, part, cos, sin) for part in (0, 1))
    fused = impl == "kernel" and qkv.dtype == jnp.bfloat16
    out = jax.nn.dot_product_attention(
        query, key, parts[:, :, 2], implementation="cudnn" if fused else "xla"
    )
    return out.reshape(*qkv.shape[:2], -1)


def _multiplied(s: Sizes) -> float:
    return 4.0 * s["b"] * s["W"] * s["n"] * s["n"] * s["H"] * s["d"]


_ANGLES = Spec("n d/2", "float32", uniform(-1, 1))

CONTRACTS = (
    Contract(
        name="picture_attention",
        doc="Attention of a picture's tokens to those of their window, or to all, turned by place.",
        arguments={"qkv": Spec("b W*n 3*H*d", "bfloat16"), "cos": _ANGLES, "sin": _ANGLES},
        results={"y": Spec("b W*n H*d", "bfloat16")},
        reference=lambda qkv, cos, sin: picture_attention(qkv, cos, sin, impl="plain"),
        candidates={
            "mosaic": Candidate(
                _by_mosaic,
                around(MosaicTiles(), keys=(64,), programs=(1 << 30,)),
            ),
            "cudnn": Candidate(_by_cudnn),
            "triton": Candidate(
                _by_triton,
                around(
                    Tiles(),
                    queries=(128,),
                    keys=(128,),
                    warps=(8,),
                    stages=(2,),
                    ahead=(False,),
                ),
                instructions=("wgmma",),
            ),
        },
        shapes={
            "windows of 1 picture": {**_REAL, "b": 1, "W": 9, "n": 576},
            "windows of 8 pictures": {**_REAL, "b": 8, "W": 9, "n": 576},
            "1 whole picture": {**_REAL, "b": 1, "W": 1, "n": 5184},
            "8 whole pictures": {**_REAL, "b": 8, "W": 1, "n": 5184},
        },
        edges={
            "windows of 9 tokens": {"b": 2, "W": 2, "n": 9, "H": 2, "d": 16},
            "more than a block of keys": {"b": 2, "W": 1, "n": 100, "H": 1, "d": 32},
        },
        # Weights are rounded to bfloat16 at another maximum than the reference's.
        tolerance=3e-2,
        invariant={"b": "rows"},
        operations=_multiplied,
        group=("n",),
    ),
)
