"""`jaxinfer.engine.sampling.sample`: choosing tokens, by kernels or in plain JAX."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.contracts.contract import Candidate, Contract, Sizes, Spec
from jaxinfer.contracts.draws import Draw, constant, distinct, integers, normal, uniform
from jaxinfer.engine.sampling import LENGTH, STOPS, WORDS, Sampled, Sampler, sample

TOP = 4
_REAL = {"V": 248320, "stops": STOPS, "words": WORDS, "length": LENGTH}
_TINY = {"V": 3000, "stops": STOPS, "words": WORDS, "length": LENGTH}


def _sampler(temperature: Draw, penalty: Draw) -> Any:
    def each(draw: Draw, dtype: str = "float32") -> Any:
        return Spec("B", dtype, draw)

    def table(shape: str, dtype: str, draw: Draw) -> Any:
        return Spec(shape, dtype, draw)

    return Sampler(
        temperature=each(temperature),
        top_k=each(integers(0, 60), "int32"),
        top_p=each(uniform(0.5, 1.0)),
        min_p=each(uniform(0, 0.05)),
        seed=each(integers(0, 2**31), "uint32"),
        presence=each(penalty),
        frequency=each(penalty),
        repetition=each(constant(1.0)),
        stops=table("B stops", "int32", integers(0, "V")),
        earliest=each(integers(0, 20), "int32"),
        bad=table("B words length", "int32", integers(0, "V")),
        counts=table("B V", "int32", lambda rng, shape, _: rng.random(shape) < 1e-3),
        prompted=table("B V", "bool", lambda rng, shape, _: rng.random(shape) < 1e-3),
        bias=table("B V", "float32", constant(0.0)),
        biased=each(constant(False), "bool"),
    )


def _run(*arguments: Any, impl: Any = "plain") -> Sampled:
    scores, sampler, slots, tokens, tail, index = arguments
    return sample(scores, sampler, slots, tokens, tail, index, None, TOP, tile=1, impl=impl)


def _contract(
    name: str, doc: str, temperature: Draw, penalty: Draw, edges: Mapping[str, Sizes]
) -> Contract:
    def bytes_read(s: Sizes) -> float:
        return 4.0 * s["b"] * s["T"] * s["V"]

    return Contract(
        name=name,
        doc=doc,
        arguments={
            "scores": Spec("b T V", "float32", normal(3)),
            "sampler": _sampler(temperature, penalty),
            "slots": Spec("b", "int32", distinct(0, "B-1"), index="B"),
            "tokens": Spec("b T", "int32", integers(0, "V")),
            "tail": Spec("b T length-1", "int32", integers(0, "V")),
            "index": Spec("b T", "int32", integers(8, 1000)),
        },
        results={
            "tokens": Spec("b T", "int32"),
            "logprobs": Spec("b T", "float32"),
            "top_tokens": Spec(f"b T {TOP}", "int32"),
            "top_logprobs": Spec(f"b T {TOP}", "float32"),
        },
        reference=_run,
        # On a path that is rarely taken.
        candidates={"triton": Candidate(_run, spills=32)},
        shapes={
            "decode 1 row": {**_REAL, "b": 1, "T": 1, "B": 2},
            "32 streams": {**_REAL, "b": 32, "T": 1, "B": 33},
        },
        edges={where: {**_TINY, **sizes} for where, sizes in edges.items()},
        tolerance=1e-4,
        invariant={"b": "rows", "T": "prefix", "B": "labels"},
        bytes=bytes_read,
    )


def _mixed(rng: np.random.Generator, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Any:
    return np.where(rng.random(shape) < 0.3, 0.0, rng.uniform(0.5, 1.5, shape))


CONTRACTS = (
    _contract(
        "sample_greedy",
        "The likeliest token of each row, its log probability, and the likeliest four.",
        constant(0.0),
        constant(0.0),
        {},  # `sample` has such rows among its own.
    ),
    _contract(
        "sample",
        "A token of each row by temperature, top-k, top-p, min-p and penalties.",
        _mixed,
        uniform(0, 0.5),
        {"two sequences": {"b": 2, "T": 2, "B": 4}},
    ),
)
