"""The device's part of segmenting: pictures and text features lie there, detections stay there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.sam_roofline import operations
from jaxinfer.bench.trace import break_down, record
from jaxinfer.sam import model
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import Config
from jaxinfer.sam.model import Features, Prompts
from jaxinfer.sam.params import Params
from jaxinfer.sam.prepared import prepared

Record = dict[str, Any]

WORDS = 4
"""Tokens of a prompt that count; it is padded to the model's context."""
ROUNDS, SECONDS = 3, 0.5
"""Rounds of which the median counts, and how long each takes about."""
TRACED, SHOWN = 2, 40
"""Calls in a trace, and kernels that are told by name."""


@dataclass(frozen=True, eq=False)
class Programs:
    """Embedding a batch of pictures and answering one prompt for each, compiled, with arguments.

    Attributes:
        batch: pictures.
        embed: of `embedding`, returns `Features`.
        detect: of `detecting` and `Features`, returns `Detections`.
        embedding: parameters that embedding needs, and pixels.
        detecting: parameters that detection needs, and prompts.
    """

    batch: int
    embed: Any
    detect: Any
    embedding: tuple[Params, jax.Array]
    detecting: tuple[Params, Prompts]

    def look(self) -> Features:
        """Set the device to embed the pictures."""
        return self.embed(*self.embedding)

    def find(self, features: Features) -> model.Detections:
        """Set it to answer the prompts."""
        params, prompts = self.detecting
        return self.detect(params, features, prompts)

    def both(self) -> model.Detections:
        """The one, then the other."""
        return self.find(self.look())


def compile_programs(params: Params, cfg: Config, pixels: np.ndarray) -> Programs:
    """Compile for so many pictures `[B, S, S, 3]` uint8; text features are noise."""
    batch, text = len(pixels), (len(pixels), cfg.text.context, cfg.width)
    dtype = params.neck.x1_conv1.weight.dtype
    prompts = Prompts(
        image=jnp.arange(batch),
        text=jnp.asarray(np.random.default_rng(0).standard_normal(text), dtype),
        text_mask=jnp.broadcast_to(jnp.arange(text[1]) < WORDS, text[:2]),
        boxes=jnp.zeros((batch, 0, 4)),
        box_labels=jnp.zeros((batch, 0), jnp.int32),
        box_mask=jnp.zeros((batch, 0), bool),
    )
    # Only what a call needs: to hand over a thousand arrays takes the host a while.
    embedding = (replace(params, text=None, clicks=None), jnp.asarray(pixels))
    finding = replace(prepared(embedding[0]), trunk=None, neck=None)
    look = jit(lambda p, pixels: model.embed_image(p, cfg, pixels))
    find = jit(lambda p, features, prompts: model.detect(p, cfg, features, prompts))
    features = jax.eval_shape(look, *embedding)
    return Programs(
        batch,
        look.lower(*embedding).compile(),
        find.lower(finding, features, prompts).compile(),
        embedding,
        (finding, prompts),
    )


def measure_device(programs: Programs, cfg: Config, *, fp8: bool) -> Record:
    """Times of calls in a row, and the share of the arithmetic ceiling that they reach."""
    batch, features = programs.batch, programs.look()
    took = seconds(programs.both)
    count = operations(cfg)
    kind = jax.devices()[0].device_kind
    share = count.least_seconds(batch, batch, fp8=fp8, kind=kind) / took
    return {
        "milliseconds": round(1e3 * took, 3),
        "embed_milliseconds": round(1e3 * seconds(programs.look), 3),
        "detect_milliseconds": round(1e3 * seconds(partial(programs.find, features)), 3),
        "images_per_second": round(batch / took, 2),
        "operations": round(count.total(batch, batch)),
        "teraflops_a_second": round(count.total(batch, batch) / took / 1e12, 2),
        "share_of_ceiling": None if np.isnan(share) else round(share, 4),
        "embed_bytes": _scratch(programs.embed),
        "detect_bytes": _scratch(programs.detect),
    }


def break_down_device(programs: Programs) -> Record:
    """Trace some calls, and tell kernels and families in microseconds a call."""
    calls: Sequence[Callable[[], Any]] = [programs.both] * TRACED
    jax.block_until_ready(programs.both())
    found = record(lambda: jax.block_until_ready([call() for call in calls]))
    return break_down(found, TRACED).told(SHOWN)


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes when each is dispatched before those in front of it have ended."""
    jax.block_until_ready(run())
    calls = max(1, min(50, round(SECONDS / _timed(run, 1))))
    return median(_timed(run, calls) for _ in range(ROUNDS))


def _timed(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    result = None
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / calls


def _scratch(program: Any) -> int | None:
    """Bytes that a program needs beside its arguments; None where the compiler does not tell."""
    told = program.memory_analysis()
    return None if told is None else told.temp_size_in_bytes + told.output_size_in_bytes
