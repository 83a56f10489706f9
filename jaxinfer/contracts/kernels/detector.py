"""What the detector of SAM attends with: `pallas_kernels.cross_attention` and `.box_bias`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.draws import constant, normal, uniform
from pallas_kernels.box_bias import box_bias
from pallas_kernels.cross_attention import Tiles, cross_attention

_HEADS = {"H": 8, "d": 32}
_GRID = 72
_KNOBS = around(Tiles(), queries=(32,), keys=(128,), stages=(2,))


def _called(
    query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array, heads: int, **how: Any
) -> jax.Array:
    """`more`: which tokens are seen, or a bias by rows and by columns, or nothing."""
    if len(more) == 1:
        how["seen"] = more[0]
    if len(more) == 2:
        how["bias"] = more
    return cross_attention(query, key, value, heads, **how)


def _exact(*arguments: jax.Array, heads: int) -> jax.Array:
    wide = [a if a.dtype == jnp.bool_ else a.astype(jnp.float32) for a in arguments]
    return _called(*wide, heads=heads, impl="plain").astype(arguments[0].dtype)


def _by_triton(*arguments: jax.Array, impl: Any, heads: int, **knobs: Any) -> jax.Array:
    return _called(*arguments, heads=heads, impl=impl, tiles=Tiles(**knobs))


def _by_xla(*arguments: jax.Array, impl: Any, heads: int) -> jax.Array:
    return _called(*arguments, heads=heads, impl="plain")


def _multiplied(s: Sizes) -> float:
    return 4.0 * s["P"] * s["T"] * s.get("S", s.get("g", 0) ** 2) * s["H"] * s["d"]


def _some_seen(drawn: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    drawn["seen"][:, sizes["S"] // 2 + 1 :] = False
    return drawn


def _attention(
    name: str,
    doc: str,
    tokens: str,
    more: dict[str, Spec],
    shapes: dict[str, Sizes],
    edges: dict[str, Sizes],
    arrange: Callable[[dict[str, Any], Sizes], dict[str, Any]] = lambda drawn, sizes: drawn,
) -> Contract:
    """Of queries `[P, T, H d]` to keys and values `[P, S, H d]`."""
    heads = _HEADS["H"]
    return Contract(
        name=name,
        doc=doc,
        arguments={
            "query": Spec("P T H*d", "bfloat16"),
            "key": Spec(f"P {tokens} H*d", "bfloat16"),
            "value": Spec(f"P {tokens} H*d", "bfloat16"),
            **more,
        },
        results={"y": Spec("P T H*d", "bfloat16")},
        reference=partial(_exact, heads=heads),
        candidates={
            "triton": Candidate(partial(_by_triton, heads=heads), _KNOBS),
            "xla": Candidate(partial(_by_xla, heads=heads)),
        },
        shapes=shapes,
        edges=edges,
        tolerance=3e-2,
        invariant={"P": "rows"},
        operations=_multiplied,
        arrange=arrange,
    )


def _measured(*arguments: jax.Array, grid: int, **how: Any) -> jax.Array:
    function: Callable[..., Any] = box_bias
    return function(*arguments, grid, **how)


def _measured_by_xla(*arguments: jax.Array, impl: Any) -> jax.Array:
    return _measured(*arguments, grid=_GRID, impl="plain")


CONTRACTS = (
    _attention(
        "attention_to_prompt",
        "Attention of a picture's tokens to those of a prompt that are seen.",
        "S",
        {"seen": Spec("P S", "bool", constant(np.True_))},
        {
            "1 prompt": {**_HEADS, "P": 1, "T": 5184, "S": 33},
            "8 prompts": {**_HEADS, "P": 8, "T": 5184, "S": 33},
        },
        {"three prompts": {"P": 3, "T": 20, "S": 33, "H": 8, "d": 16}},
        _some_seen,
    ),
    _attention(
        "attention_to_picture",
        "Attention of objects to a picture's tokens, biased by row and column.",
        "g*g",
        {"rows": Spec("P T H g", "float32"), "columns": Spec("P T H g", "float32")},
        {
            "200 objects": {**_HEADS, "P": 1, "T": 201, "g": 72},
            "8 times 200 objects": {**_HEADS, "P": 8, "T": 201, "g": 72},
        },
        {"a grid of 9": {"P": 2, "T": 5, "g": 9, "H": 8, "d": 16}},
    ),
    _attention(
        "attention_to_all",
        "Attention of a picture's tokens to one another, unbiased.",
        "S",
        {},
        {
            "1 picture": {**_HEADS, "P": 1, "T": 5184, "S": 5184},
            "4 pictures": {**_HEADS, "P": 4, "T": 5184, "S": 5184},
        },
        {"more than a block of tokens": {"P": 2, "T": 20, "S": 70, "H": 8, "d": 16}},
    ),
    Contract(
        name="box_bias",
        doc="How far rows and columns of a picture lie from boxes, as a bias for each head.",
        arguments={
            "boxes": Spec("P Q 4", "float32", uniform(0.1, 0.9)),
            "w1": Spec("2 M 2", "float32", normal(0.5)),
            "b1": Spec("2 M", "float32", normal(0.1)),
            "w2": Spec("2 H M", "float32", normal(0.1)),
            "b2": Spec("2 H", "float32"),
        },
        results={"bias": Spec("2 P 1+Q H 72", "float32")},
        reference=partial(_measured, grid=_GRID, impl="plain"),
        candidates={
            "triton": Candidate(
                partial(_measured, grid=72),
                around(box_bias, cells=(256,), hidden=(32,), warps=(8,)),
            ),
            "xla": Candidate(
                lambda *arguments, impl: _measured(*arguments, grid=_GRID, impl="plain")
            ),
        },
        shapes={
            "200 objects": {"P": 1, "Q": 200, "H": 8, "M": 256},
            "8 times 200 objects": {"P": 8, "Q": 200, "H": 8, "M": 256},
        },
        edges={"three boxes": {"P": 2, "Q": 3, "H": 2, "M": 64}},
        tolerance=3e-2,
        invariant={"P": "rows"},
        operations=lambda s: 4.0 * s["P"] * (1 + s["Q"]) * _GRID * s["M"] * (2 + s["H"]),
    ),
)
