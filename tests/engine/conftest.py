from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from checkpoints import load, resolve
from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.steps import Plan
from tests.engine.helpers import EOS, HELDOUT

Build = Callable[..., Engine]
Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="session")
def build(tiny_llm: LLM) -> Build:
    """Makes engines: `build(model, speculation, drafts, batch, context)`; each is made once."""
    parameters = cache(lambda model: load(resolve(model), vision=False))

    @cache
    def make(
        model: str, speculation: str | None, drafts: int, batch: int, context: int = 2048
    ) -> Engine:
        config, params = parameters(model)
        plan = Plan(config, speculation, drafts)
        return Engine(params, plan, tiny_llm.tokenizer, EOS, batch, context)

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


@pytest.fixture(scope="session")
def jobs(code: list[int], question: list[int]) -> list[Job]:
    """Prompts around the borders of a prefill chunk, and one whose answer accepts many drafts."""
    greedy = SamplingParams(temperature=0, max_tokens=16, logprobs=True, ignore_eos=True)
    sampled = replace(greedy, temperature=1, top_k=20, top_p=0.95)
    return [
        (code[:1], replace(sampled, seed=1)),
        (code[:63], greedy),
        (code[:64], replace(sampled, seed=2)),
        (code[:65], greedy),
        (code[:128], replace(sampled, seed=3, min_p=0.05)),
        (question, greedy),
        (question, replace(sampled, seed=4, temperature=0.6)),
    ]
