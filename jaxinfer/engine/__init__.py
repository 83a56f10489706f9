"""What turns a model into a service in one process."""

from jaxinfer.engine.async_llm import AsyncLLM
from jaxinfer.engine.llm import LLM, device_kind
from jaxinfer.engine.request import (
    Chunk,
    Completion,
    RequestError,
    SamplingParams,
    StructuredOutput,
    Usage,
)
from jaxinfer.engine.stats import EngineStats

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "EngineStats",
    "RequestError",
    "SamplingParams",
    "StructuredOutput",
    "Usage",
    "device_kind",
]
