from collections.abc import Iterator
from functools import partial

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel on Mosaic that is interpreted may access memory in an order that nothing gives."""
    params = partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", params)
    # What was traced unwatched stays so; and watched, it would be slow in other tests.
    jax.clear_caches()
    yield
    jax.clear_caches()
    found = interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()
    assert not found
