"""Once warm, the loop neither compiles nor moves anything that it did not ask for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM, SamplingParams, StructuredOutput
from jaxinfer.engine.engine import Engine
from tests.engine.helpers import run

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What is traced, lowered or compiled meanwhile."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def engine(tiny_llm: LLM) -> Engine:
    return tiny_llm.engine


def work(engine: Engine, code: list[int], start: int) -> None:
    """Prompts of several lengths alone and together, sampled in several ways."""
    hot = replace(GREEDY, temperature=1, seed=start, top_k=9, stop=("x y",), bad_words=("self",))
    biased = replace(hot, logit_bias={5: 1.0}, stop_token_ids=(9, 10))
    run(engine, [engine.submit(code[start : start + 200], GREEDY)])
    sizes = (1, 40, 64, 130, 300, 70)
    jobs = zip(sizes, (hot, biased, GREEDY) * 2, strict=True)
    run(engine, [engine.submit(code[start : start + size], params) for size, params in jobs])


def test_nothing_is_compiled_twice_and_no_transfer_is_implicit(
    engine: Engine, code: list[int]
) -> None:
    work(engine, code, 0)
    made = engine._calls.made
    with compilations() as events, jax.transfer_guard("disallow"):
        work(engine, code, 1)
        assert events == []
    assert engine._calls.made == made


def test_constrained_steps_are_as_steady(engine: Engine, code: list[int]) -> None:
    def constrained(start: int) -> None:
        regexes = (r"[a-c]{5}\d{4}", r"(yes|no), because [a-z]{3}")
        jobs = [
            replace(GREEDY, ignore_eos=False, structured=StructuredOutput(regex=r)) for r in regexes
        ]
        run(engine, [engine.submit(code[start : start + 9], p) for p in (*jobs, GREEDY)])

    constrained(0)
    made = engine._calls.made
    with compilations() as events, jax.transfer_guard("disallow"):
        constrained(1)
        assert events == []
    assert engine._calls.made == made


def test_the_listener_hears_a_compilation_and_the_guard_sees_a_transfer() -> None:
    with compilations() as events:
        jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert events
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed"):
        jnp.add(jnp.zeros(3), 1)


def test_a_call_is_on_its_way_before_the_one_before_is_read(
    engine: Engine, code: list[int]
) -> None:
    request = engine.submit(code[:9], GREEDY)
    assert engine.step() == []
    dispatched = engine.stats().counters.decode_calls
    given = engine.step()
    # The first token is told with the second call: the first was read once it was dispatched.
    assert engine.stats().counters.decode_calls == dispatched + 1
    assert [r for r, _ in given][:1] == [request]
