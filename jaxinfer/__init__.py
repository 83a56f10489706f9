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
    from jaxinfer.segmentation import Prompt
    from jaxinfer.segmenter import Segmenter

_ENGINE = {"LLM", "AsyncLLM", "Completion", "RequestError", "SamplingParams", "StructuredOutput"}
_MODULES = dict.fromkeys(_ENGINE, "jaxinfer.engine") | {
    "Prompt": "jaxinfer.segmentation",
    "Segmenter": "jaxinfer.segmenter",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Prompt",
    "RequestError",
    "SamplingParams",
    "Segmenter",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and JAX with it, at that time: `--help` needs neither."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
