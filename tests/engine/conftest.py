from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from checkpoints import load, resolve
from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.slots import Plan
from tests.engine.helpers import EOS, HELDOUT

Build = Callable[..., Engine]
Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="session")
def build(tiny_llm: LLM) -> Build:
    """Makes engines: `build(model, speculation, drafts, slots, …)`, the rest as `build_engine`.

    The model keeps two layers, one of each kind: that compiles in half the time
    and still copies code.
    """

    @cache
    def parameters(model: str):
        config, params = load(resolve(model), vision=False)
        return replace(config, layer_types=config.layer_types[2:4]), params

    def make(
        model: str,
        speculation: str | None,
        drafts: int,
        slots: int,
        context: int = 512,
        **options: Any,
    ) -> Engine:
        config, params = parameters(model)
        plan = Plan(config, speculation, drafts)
        return build_engine(
            params, plan, tiny_llm.tokenizer, EOS, slots=slots, context=context, **options
        )

    return make


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves the next one its requests."""
    yield
    if "tiny_llm" in request.fixturenames:
        engine = request.getfixturevalue("tiny_llm").engine
        if engine.busy:
            engine.reset()


@pytest.fixture(scope="session")
def code(tiny_llm: LLM) -> list[int]:
    """Token ids of Python source that the model has not seen."""
    text = (HELDOUT / "code.txt").read_text(encoding="utf-8")[:12_000]
    return tiny_llm.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def question(tiny_llm: LLM) -> list[int]:
    """A prompt that the model answers and ends by itself."""
    messages = [{"role": "user", "content": "Please plan a concert on Tuesday with Iris."}]
    return tiny_llm.render(messages, enable_thinking=False)
