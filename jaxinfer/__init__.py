"""A JAX/Pallas compiled inference engine for Qwen3.6-35B-A3B and SAM 3.1 on one NVIDIA GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.engine import (
        LLM,
        AsyncLLM,
        Completion,
        RequestError,
        SamplingParams,
        StructuredOutput,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "RequestError",
    "SamplingParams",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and JAX with it, when it is first asked for: `--help` needs neither."""
    if name in __all__:
        return getattr(import_module("jaxinfer.engine"), name)
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
