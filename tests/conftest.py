"""What all rooms share: where JAX runs, a compilation cache, and one loaded model."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX is imported, which reads its environment once.
os.environ["JAX_PLATFORMS"] = os.environ.get("JAXINFER_TEST_PLATFORM", "cpu")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from hypothesis import settings

from jaxinfer import LLM
from jaxinfer.engine import calls
from jaxinfer.sam import compiling

LONGEST = "test_one_answer.py"
ON_GPU = os.environ["JAX_PLATFORMS"] == "cuda"
HURRIED = ("checkpoints", "contracts", "pallas_kernels", "qwen", "sam", "segmentation")
"""Rooms whose tests take longer to compile than to run."""
OPTIMISED = ("interpreted_", "test_same_bits")
"""Files in them that have programs of one operation each, or ask for bits as users get them."""

if not ON_GPU:
    # SAM's programs run a few times here: to optimise them costs more than it brings.
    compiling.OPTIONS["xla_backend_optimization_level"] = 0
    # Nor do prefill calls run often: each is compiled as the long ones are on a GPU, thus.
    calls.LONG, calls.ONE_BY_ONE = 1, {"xla_backend_optimization_level": 0}

# Compiling makes single examples slow; a run that fails must fail again.
settings.register_profile("jaxinfer", deadline=None, derandomize=True)
settings.load_profile("jaxinfer")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests that need a GPU out, unless the mark expression speaks of them.

    On a GPU, promises that hold on any device are among them. The longest file comes first, and
    next those that use the shared model: while one process is busy with the former, the other
    compiles for the latter, and hardly anything is compiled in both.
    """
    sharing = {item.path for item in items if "tiny_llm" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (item.path.name != LONGEST, item.path not in sharing))
    if "gpu" in config.option.markexpr:
        for item in items:
            if ON_GPU and item.get_closest_marker("also_gpu"):
                item.add_marker("gpu")
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", autouse=True)
def programs_are_not_kept() -> Iterator[None]:
    """Let go of compiled programs after each file.

    On a CPU each is a thousand memory mappings or more, of which Linux lets a process have 65,530.
    """
    yield
    calls._compiled.clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def compiled_in_a_hurry(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile without optimising what runs once or twice."""
    hurried = request.path.parent.name in HURRIED and not request.path.name.startswith(OPTIMISED)
    jax.config.update("jax_disable_most_optimizations", hurried and not ON_GPU)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny_llm() -> LLM:
    """The little checkpoint; leave its engine idle."""
    return LLM("tiny_qwen", max_batch=4, memory_fraction=0.1)
