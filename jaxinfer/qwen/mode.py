"""How a forward pass is cut and computed."""

from dataclasses import dataclass

import jax

from jaxinfer.qwen.config import CHUNK, Config
from pallas_kernels import Impl

FAMILIES = ("projection", "experts", "delta", "attention", "sampling")
"""Kinds of kernels that can be used, or left to plain JAX, one by one."""


@dataclass(frozen=True)
class Mode:
    """A static argument of every layer.

    Attributes:
        tile: rows computed together by everything in plain JAX that treats tokens one by one, see
            `pallas_kernels.rows`; None computes all at once, fast but with bits that depend on the
            batch (training).
        chunked: tokens are prompt chunks (Gated DeltaNet in its parallel form, every expert over
            all rows); otherwise they are decode or verify rows, each computed as if alone.
        kernels: families that run as kernels.
        interpret: run kernels by interpretation, on any device.
    """

    tile: int | None
    chunked: bool
    kernels: frozenset[str] = frozenset()
    interpret: bool = False

    def impl(self, family: str) -> Impl:
        """How an operation of a family is to be run."""
        if family not in self.kernels:
            return "plain"
        return "interpret" if self.interpret else "kernel"


TRAIN = Mode(tile=None, chunked=True)


def prefill_mode(kernels: frozenset[str] = frozenset(), interpret: bool = False) -> Mode:
    """The mode of pieces of prompts."""
    return Mode(CHUNK, True, kernels, interpret)


PREFILL = prefill_mode()


def decode_mode(kernels: frozenset[str] = frozenset(), interpret: bool = False) -> Mode:
    """The mode of decode and verify steps: the tile that is cheapest on this backend."""
    return Mode(8 if jax.default_backend() == "cpu" else 64, False, kernels, interpret)


def usable_kernels(cfg: Config, backend: str) -> frozenset[str]:
    """The families that can be used for a model on a backend.

    All on a GPU, for models in bfloat16 whose sizes are powers of two; none otherwise.
    """
    sizes = (
        cfg.hidden_size,
        cfg.head_dim,
        cfg.linear_key_head_dim,
        cfg.linear_value_head_dim,
        cfg.num_experts,
        cfg.num_experts_per_tok,
        cfg.moe_intermediate_size,
        cfg.shared_expert_intermediate_size,
    )
    fit = cfg.dtype == "bfloat16" and all(n & (n - 1) == 0 for n in sizes)
    return frozenset(FAMILIES) if backend == "gpu" and fit else frozenset()
