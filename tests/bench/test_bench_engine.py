import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.engine import draft_lengths
from jaxinfer.bench.measure import Run, Turn, compilation, measure, numbers_tokenizer, run
from jaxinfer.engine.stats import Counters
from jaxinfer.engine.text import TextStream

PROMPTS = ([100, 200, 300], [7, 8, 9, 10])
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prefix_cache=False)


@pytest.fixture(scope="module")
def measured(tiny_llm: LLM) -> Run:
    return measure(tiny_llm.engine, PROMPTS, GREEDY)


def test_a_measured_run_gives_the_tokens_that_the_engine_gives_anyway(
    tiny_llm: LLM, measured: Run
) -> None:
    plain = tiny_llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in measured.completions] == [c.token_ids for c in plain]


def test_every_token_and_call_of_a_run_is_counted_once_whatever_ran_before(measured: Run) -> None:
    counters = measured.stats.counters
    assert sum(turn.tokens for turn in measured.turns) == counters.generated_tokens == 12
    assert counters.submitted == counters.finished == 2
    calls = counters.prefill_calls + counters.decode_calls
    # The last call may have been dispatched for requests that had ended, and is not read.
    assert calls - 1 <= len(measured.reads) <= calls


def test_the_time_of_a_run_is_that_of_its_turns_and_reads_lie_within(measured: Run) -> None:
    assert sum(turn.seconds for turn in measured.turns) == pytest.approx(measured.seconds)
    assert all(0 <= turn.waiting <= turn.seconds for turn in measured.turns)
    assert measured.reads == sorted(measured.reads)
    assert 0 < measured.reads[0] <= measured.first <= measured.seconds


def test_a_refused_prompt_leaves_the_reading_of_results_as_it_was(tiny_llm: LLM) -> None:
    original = jax.device_get
    with pytest.raises(ValueError, match="no tokens"):
        run(tiny_llm.engine, [[]], GREEDY)
    assert jax.device_get is original


def test_a_summary_tells_steady_turns_apart_from_the_others(measured: Run) -> None:
    turns = [
        Turn(seconds=9.0, waiting=0.0, tokens=1, steady=False),
        Turn(seconds=0.4, waiting=0.3, tokens=8, steady=True),
        Turn(seconds=0.6, waiting=0.3, tokens=12, steady=True),
    ]
    counters = Counters(
        generated_tokens=21, decode_calls=4, late_calls=1, sequence_steps=8, accepted=12, drafted=24
    )
    stats = replace(measured.stats, counters=counters)
    told = replace(measured, turns=turns, seconds=10.0, stats=stats).summary(steps=4)
    assert told["output_tokens_per_second"] == 2.1
    assert told["steady_tokens_per_second"] == 20
    assert told["step_milliseconds"] == 125
    assert told["host_milliseconds_a_call"] == 200
    assert told["late_calls"] == 0.25
    assert told["tokens_per_step"] == 2.5
    assert told["acceptance"] == 0.5


def test_compilation_is_told_by_step_and_only_while_it_is_asked_for() -> None:
    def prefill_step(x: jax.Array) -> jax.Array:
        return x * 2

    def something_else(x: jax.Array) -> jax.Array:
        return x * 3

    with compilation() as seconds:
        for size in (3, 4):
            jax.jit(prefill_step)(jnp.ones(size))
            jax.jit(something_else)(jnp.ones(size))
    jax.jit(prefill_step)(jnp.ones(5))
    assert list(seconds) == ["prefill_step"]
    assert len(seconds["prefill_step"]) == 2


def test_ids_without_a_text_are_spelt_as_numbers() -> None:
    stream = TextStream(numbers_tokenizer(300))
    assert [stream.feed(token)[0] for token in (7, 299)] == ["7", "299"]


def test_lengths_of_drafts_are_a_number_or_a_choice() -> None:
    assert draft_lengths("3") == (3,)
    assert draft_lengths("1-3") == (1, 2, 3)
    for wrong in ("0", "3-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 1 on"):
            draft_lengths(wrong)
