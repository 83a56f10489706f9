"""`pallas_kernels.normed` and `pallas_kernels.projection`: decode rows on their way into layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.draws import normal, uniform
from jaxinfer.contracts.weights import weight
from pallas_kernels import Dense, Fp8, Nvfp4, dequantise, take
from pallas_kernels.normed import Form, normed
from pallas_kernels.projection import HEAD, SHORT, TALL, Tiles, natural, project

ROWS: Mapping[str, Sizes] = {
    "decode 1 row": {"R": 1},
    "verify 4 rows": {"R": 4},
    "32 streams": {"R": 32},
}
EPS = 1e-6
_KINDS: dict[str, type] = {"dense": Dense, "fp8": Fp8, "fp8_static": Dense, "nvfp4": Nvfp4}
_KNOBS = {
    tiles: around(tiles, step=(64, 128, 256), width=(32, 64, 128), stages=(2, 3, 4))
    for tiles in (HEAD, TALL, SHORT)
}


def _normed(
    name: str, doc: str, kinds: Sequence[str], heights: Mapping[str, int], sizes: Sizes, tiny: Sizes
) -> Contract:
    """A norm whose rows are wanted in the forms of `kinds`, and small products by height."""
    scaled = [kind == "fp8_static" for kind in kinds]

    def run(x: jax.Array, norm: jax.Array, *rest: Any, layer: int, impl: Any, rows: int = 4) -> Any:
        scales, small = rest
        given = iter(scales)
        forms = [
            Form(_KINDS[kind], next(given) if static else None, layer)
            for kind, static in zip(kinds, scaled, strict=True)
        ]
        weights = [(w, layer) for w in small]
        out = normed(x, norm, layer, forms, weights, eps=EPS, impl=impl, rows=rows)
        return list(out.h), list(out.products)

    return Contract(
        name=name,
        doc=doc,
        arguments={
            "x": Spec("R K", "bfloat16"),
            "norm": Spec("L K", "bfloat16", normal(0.2)),
            "scales": [Spec("L", "float32", uniform(0.01, 0.02)) for static in scaled if static],
            "small": [weight("dense", f"L {symbol} K") for symbol in heights],
        },
        results={
            "h": [
                Spec("R K", "float8_e4m3fn" if static else "bfloat16", tolerance=0.13)
                for static in scaled
            ],
            "products": [Spec(f"R {symbol}", "bfloat16") for symbol in heights],
        },
        reference=lambda *a, layer: run(*a, layer=layer, impl="plain"),
        candidates={"triton": Candidate(run, {"rows": (4, 1, 2, 8)})},
        shapes={where: {**rows, **sizes, **heights} for where, rows in ROWS.items()},
        edges={"three rows": {"R": 3, **tiny, **dict.fromkeys(heights, 2)}},
        tolerance=2e-2,
        stack="L",
        invariant={"R": "rows"},
    )


def _multiplied(h: jax.Array, w: Any, kind: str, layer: int) -> jax.Array:
    """`h Wᵀ` in float32, of what the stored numbers stand for."""
    w, rows = take(w, layer), natural(h, _KINDS[kind]).astype(jnp.float32)
    rows = rows * w.input_scale if kind == "fp8_static" else rows
    y = jnp.matmul(rows, dequantise(w).T, precision=lax.Precision.HIGHEST)
    return y.astype(jnp.bfloat16)


def _project(
    name: str,
    doc: str,
    parts: Mapping[str, str],
    sizes: Sizes,
    tiny: Sizes,
    tiles: Tiles,
    residual: bool = False,
) -> Contract:
    """A projection by `parts`: the format of each weight by the symbol of its height."""
    kinds = list(parts.values())

    def run(h: Any, weights: Any, *rest: jax.Array, layer: int, impl: Any, **knobs: int) -> Any:
        more = {"residual": rest[0]} if residual else {}
        return project(h, weights, layer, impl=impl, tiles=Tiles(**knobs), **more)

    def reference(h: Any, weights: Any, *rest: jax.Array, layer: int) -> Any:
        y = [_multiplied(*one, layer) for one in zip(h, weights, kinds, strict=True)]
        return [rest[0] + y[0]] if residual else y

    inputs = [Spec("R K", "float8_e4m3fn" if k == "fp8_static" else "bfloat16") for k in kinds]
    added = {"residual": Spec(f"R {next(iter(parts))}", "bfloat16")} if residual else {}
    return Contract(
        name=name,
        doc=doc,
        arguments={
            "h": inputs,
            "weights": [weight(kind, f"L {symbol} K") for symbol, kind in parts.items()],
            **added,
        },
        results={"y": [Spec(f"R {symbol}", "bfloat16") for symbol in parts]},
        reference=reference,
        candidates={"triton": Candidate(run, _KNOBS[tiles])},
        shapes={where: {**rows, **sizes} for where, rows in ROWS.items()},
        edges={"three rows": {"R": 3, **tiny}},
        tolerance=2e-2,
        stack="L",
        invariant={"R": "rows"},
        operations=lambda s: 2.0 * s["R"] * s["K"] * sum(s[symbol] for symbol in parts),
    )


CONTRACTS = (
    _normed(
        "normed_gdn",
        "`h = x / rms(x) · (1 + g)` as Gated DeltaNet's FP8 weights want it; decay and strength.",
        ("fp8_static", "fp8_static"),
        {"B": 32, "A": 32},
        {"L": 30, "K": 2048},
        {"L": 2, "K": 64},
    ),
    _normed(
        "normed_attention",
        "The same as the FP8 weights of queries, keys and values want it.",
        ("fp8_static", "fp8_static", "fp8_static"),
        {},
        {"L": 10, "K": 2048},
        {"L": 2, "K": 64},
    ),
    _normed(
        "normed_moe",
        "The same as NVFP4 experts want it; logits of the router and of the shared expert's gate.",
        ("nvfp4",),
        {"E": 256, "G": 1},
        {"L": 40, "K": 2048},
        {"L": 2, "K": 64},
    ),
    _project(
        "project_gdn",
        "`y_i = h_i W_iᵀ`: the inputs of Gated DeltaNet's convolution, and its output gates.",
        {"C": "fp8_static", "Z": "fp8_static"},
        {"L": 30, "K": 2048, "C": 8192, "Z": 4096},
        {"L": 2, "K": 128, "C": 48, "Z": 16},
        TALL,
    ),
    _project(
        "project_attention",
        "Queries with their gates, keys and values.",
        {"Q": "fp8_static", "V": "fp8_static", "W": "fp8_static"},
        {"L": 10, "K": 2048, "Q": 8192, "V": 512, "W": 512},
        {"L": 2, "K": 128, "Q": 32, "V": 16, "W": 16},
        TALL,
    ),
    _project(
        "project_out",
        "A mixer's output, added to the residual stream: `residual + h Wᵀ`.",
        {"N": "fp8_static"},
        {"L": 30, "K": 4096, "N": 2048},
        {"L": 2, "K": 128, "N": 32},
        SHORT,
        residual=True,
    ),
    _project(
        "project_head",
        "Scores of all tokens from the hidden state.",
        {"V": "nvfp4"},
        {"L": 1, "K": 2048, "V": 248320},
        {"L": 1, "K": 128, "V": 40},
        HEAD,
    ),
)
