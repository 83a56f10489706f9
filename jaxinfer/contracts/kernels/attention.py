"""`pallas_kernels.paged_attention` and `pallas_kernels.prefill_attention`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec, around
from jaxinfer.contracts.draws import Draw, distinct, evaluate, integers, normal, uniform
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention_mosaic import Tiles

EPS = 1e-6
_REAL = {"L": 11, "H": 16, "G": 2, "d": 256, "r": 32, "p": 64}
_PAGED: dict[str, tuple[Any, ...]] = {
    "tile": (16, 32),
    "least": (2, 1, 4),
    "programs": (8, 16, 64),
    "warps": (4, 8),
    "stages": (),
}
_TINY = {"L": 2, "H": 4, "G": 2, "d": 32, "r": 4}


def _forget(drawn: dict[str, Any], sizes: Sizes, seen: str) -> dict[str, Any]:
    """Poison what stands in a sequence's pages after its first `seen` new tokens."""
    for sequence, start in zip(drawn["table"], drawn["start"], strict=True):
        for number, page in enumerate(sequence):
            end = start + evaluate(seen, sizes) - number * sizes["p"]
            for pages in (drawn["k_pages"], drawn["v_pages"]):
                pages[:, page, np.clip(end, 0, sizes["p"]) :] = np.nan
    return drawn


def _read_bytes(s: Sizes, width: int) -> float:
    """Everything before the middle of the table, and the rows themselves."""
    past = s["b"] * (s["M"] * s["p"] / 2) * 2 * s["G"] * s["d"] * width
    rows = s["b"] * s["T"] * s["d"] * 2 * (3 * s["H"] + 2 * s["G"])
    return past + rows


def _multiplied(s: Sizes) -> float:
    return 4.0 * s["b"] * s["T"] * s["H"] * s["d"] * s["M"] * s["p"] / 2


Way = tuple[Callable[..., Any], Mapping[str, tuple[Any, ...]]]
"""A function with the arguments of a contract's, and knobs to try."""


def _by_mosaic(*arguments: Any, impl: Any, eps: float, **knobs: Any) -> Any:
    return prefill_attention(*arguments, eps=eps, impl=impl, kernel="mosaic", tiles=Tiles(**knobs))


def _by_triton(*arguments: Any, impl: Any, eps: float, **knobs: Any) -> Any:
    return prefill_attention(*arguments, eps=eps, impl=impl, kernel="triton", **knobs)


def _contract(
    name: str,
    doc: str,
    ways: Mapping[str, Way],
    starts: Draw,
    valid: Draw,
    held: str,
    shapes: Mapping[str, Sizes],
    edges: Mapping[str, Sizes],
    cache: str,
    **more: Any,
) -> Contract:
    def call(
        function: Callable[..., Any],
        *arguments: Any,
        layer: int,
        impl: Any = "plain",
        **knobs: Any,
    ) -> Any:
        return function(*arguments[:7], layer, layer, *arguments[7:], eps=EPS, impl=impl, **knobs)

    run = partial(call, next(iter(ways.values()))[0])

    def reference(*arguments: Any, layer: int) -> Any:
        # It multiplies what nobody may see by zero, and would make poison of it.
        clean = [jnp.where(jnp.isnan(pages), 0, pages) for pages in arguments[7:9]]
        y, _, _ = run(*arguments[:7], *clean, *arguments[9:], layer=layer)
        return y, *run(*arguments, layer=layer)[1:]

    pages = Spec("L N p G d", cache)
    return Contract(
        name=name,
        doc=doc,
        arguments={
            "q_gate": Spec("b T H*2*d", "bfloat16"),
            "k": Spec("b T G*d", "bfloat16"),
            "v": Spec("b T G*d", "bfloat16"),
            "cos": Spec("b T r", "float32", uniform(-1, 1)),
            "sin": Spec("b T r", "float32", uniform(-1, 1)),
            "q_norm": Spec("L d", "bfloat16", normal(0.2)),
            "k_norm": Spec("L d", "bfloat16", normal(0.2)),
            "k_pages": pages,
            "v_pages": pages,
            "table": Spec("b M", "int32", distinct(1, "N"), index="N"),
            "start": Spec("b", "int32", starts),
            "valid": Spec("b", "int32", valid),
        },
        results={"y": Spec("b T H*d", "bfloat16"), "k_pages": pages, "v_pages": pages},
        reference=reference,
        candidates={
            name: Candidate(partial(call, function), knobs)
            for name, (function, knobs) in ways.items()
        },
        shapes=shapes,
        edges=edges,
        tolerance=2e-2,
        overwrites={"k_pages": "k_pages", "v_pages": "v_pages"},
        stack="L",
        arrange=partial(_forget, seen=held),
        operations=_multiplied,
        bytes=partial(_read_bytes, width=1 if "8" in cache else 2),
        **more,
    )


def _decode(cache: str, suffix: str, edges: Mapping[str, Sizes]) -> Contract:
    return _contract(
        f"paged_attention{suffix}",
        f"Gated attention of a few tokens over pages of {cache}, which take their keys and values.",
        {"triton": (paged_attention, around(paged_attention, **_PAGED))},
        integers(0, "M*p-T+1"),
        integers(0, "T+1"),
        "0",
        {
            "decode 1 row, 2,048 tokens": {**_REAL, "b": 1, "T": 1, "M": 32, "N": 33},
            "verify 4 rows, 2,048 tokens": {**_REAL, "b": 1, "T": 4, "M": 32, "N": 33},
            "32 streams, 1,024 tokens": {**_REAL, "b": 32, "T": 1, "M": 16, "N": 513},
        },
        {name: {**_TINY, "p": 16, **sizes} for name, sizes in edges.items()},
        cache,
        invariant={"b": "rows", "T": "prefix", "N": "labels"},
    )


CONTRACTS = (
    _decode("bfloat16", "", {"two sequences": {"b": 2, "T": 3, "M": 3, "N": 9}}),
    _decode("float8_e4m3fn", "_fp8", {"one token": {"b": 1, "T": 1, "M": 3, "N": 5}}),
    _contract(
        "prefill_attention",
        "The same for pieces of prompts, a page of tokens each.",
        {
            "triton": (_by_triton, around(prefill_attention, heads=(1,), warps=(4,), stages=(2,))),
            "mosaic": (_by_mosaic, around(Tiles(), together=(1,), programs=(1 << 30,))),
        },
        integers(0, "M*p", unit="p"),
        integers(0, "T+1", unit="T"),
        "p",
        {
            "1 piece, 1,024 tokens": {**_REAL, "b": 1, "T": 64, "M": 16, "N": 17},
            "32 pieces, 1,024 tokens": {**_REAL, "b": 32, "T": 64, "M": 16, "N": 513},
        },
        {"two pieces": {**_TINY, "b": 2, "T": 64, "M": 2, "N": 6, "p": 64}},
        "bfloat16",
        invariant={"b": "rows", "N": "labels"},
    ),
)
