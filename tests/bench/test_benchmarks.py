"""The benchmarks on a model of two layers: that they run, and that they measure what they say."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.bench import ablation, everything, first_token, one_answer, startup, subjects
from jaxinfer.bench.ablation import measure_ablation, variants
from jaxinfer.bench.decode import Point, decode_at
from jaxinfer.bench.engines import known_families, make_plan, standing_engine
from jaxinfer.bench.kernels import measure_kernels, measure_prefill_kernels
from jaxinfer.bench.load import Load, measure_load
from jaxinfer.bench.measure import run
from jaxinfer.bench.one_answer import measure_one_answer
from jaxinfer.bench.subjects import Subject, subject
from jaxinfer.bench.verify import combined, simulated
from jaxinfer.cli import app
from jaxinfer.engine.request import SamplingParams
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import FormatOf, Params, shapes

POINT = Point(streams=2, context=70)
HOW: dict[str, Any] = {"steps": 1, "calls": 4}


def cheap_init(cfg: Config, key: jax.Array, format_of: FormatOf) -> Params:
    """Small random numbers by NumPy: nothing is compiled for them."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == np.uint8:
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        return jnp.asarray((0.1 * rng.standard_normal(leaf.shape)).astype(leaf.dtype))

    return jax.tree.map(draw, shapes(cfg, format_of))


@pytest.fixture(scope="module")
def toy() -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subjects, "init", cheap_init)
        yield subject("toy")


def test_decoding_is_measured_where_it_was_asked_for(toy: Subject) -> None:
    line = decode_at(toy, POINT, **HOW)
    assert line["context"] == [70, 74]
    assert line["streams"] == 2
    assert line["step_milliseconds"] > 0
    assert line["tokens_per_second"] > 0
    assert line["tokens_per_step"] == 1.0
    assert line["bytes_a_step"] == sum(line["traffic"].values())
    json.dumps(line)


def test_kernels_are_named_one_by_one() -> None:
    assert known_families(None) is None
    assert known_families("none") == frozenset()
    assert known_families("projection, delta") == {"projection", "delta"}
    with pytest.raises(ValueError, match="no family of kernels"):
        known_families("projection,others")


def test_kernels_that_cannot_be_used_here_are_refused(toy: Subject) -> None:
    with pytest.raises(ValueError, match="kernels for delta cannot be used"):
        make_plan(toy, None, 0, frozenset({"delta"}))


def test_prompts_taken_as_read_are_in_place_together(toy: Subject) -> None:
    engine = standing_engine(toy, make_plan(toy, None, 0, None), streams=2, context=128, steps=1)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, prefix_cache=False)
    result = run(engine, toy.prompts(2, 70), sampling)
    assert result.stats.counters.prefill_calls == 1
    assert result.stats.counters.prefilled_tokens == 140
    assert [len(c.token_ids) for c in result.completions] == [5, 5]
    assert result.completions[0].token_ids != result.completions[1].token_ids
    # The newest token is not in the state yet.
    assert engine._slots.state.length[:2].tolist() == [74, 74]


def test_a_step_is_broken_down_by_kernel(toy: Subject) -> None:
    (line,) = measure_kernels(toy, [POINT], **HOW)
    assert line["steps_traced"] == 4
    assert line["busy_microseconds"] > 0
    assert sum(line["families_microseconds"].values()) >= line["busy_microseconds"] * 0.99


def test_a_prompt_is_broken_down_by_kernel(toy: Subject) -> None:
    short, long = measure_prefill_kernels(toy, [40, 100], prefill_tokens=64)
    assert (short["prefill_calls"], long["prefill_calls"]) == (1, 2)
    for line in (short, long):
        assert line["busy_microseconds"] > 0
        assert line["kernels_a_step"] >= len(line["longest_kernels"])
        assert sum(line["families_microseconds"].values()) >= line["busy_microseconds"] * 0.99
    json.dumps(long)


def test_both_loops_answer_every_request(toy: Subject) -> None:
    loads = [Load(2, 70, 4, 5), Load(2, 70, 4, 5, rate=200.0)]
    closed, opened = measure_load(toy, loads, steps=1)
    for line in (closed, opened):
        assert line["requests"] == 5
        assert line["output_tokens"] == 20
        assert line["first_token_milliseconds"]["p50"] > 0
        assert not line["compiled_while_measured"]
    assert (closed["loop"], opened["loop"]) == ("closed", "open")


def test_acceptance_is_simulated_or_that_of_the_same_drafter() -> None:
    assert simulated(2, 1, 4.0) == {"0.5": 750.0, "0.7": 850.0, "0.9": 950.0}
    assert simulated(2, 1, None) == {}
    lines = [
        {"speculation": who, "draft_length": 3, "text": "code", "sampling": "greedy"}
        | {"tokens_per_step": 2.5}
        for who in ("mtp", "ngram")
    ]
    (told,) = combined(1, 3, "mtp", 10.0, lines)
    assert told["tokens_per_second"] == 250.0
    assert combined(1, 2, "mtp", 10.0, lines) == []


def test_variants_differ_in_one_thing_each() -> None:
    made = variants(("a", "b"), steps=3)
    assert [v.kernels for v in made] == [(), ("a",), ("a", "b"), ("a", "b"), ("a", "b")]
    assert [v.command_buffers for v in made] == [False, False, False, True, True]
    assert [v.steps for v in made] == [1, 1, 1, 1, 3]


def test_each_variant_is_a_process_and_a_failure_is_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pretend(command: list[str], timeout: float) -> str | None:
        if "--no-command-buffers" in command:
            return "no memory"
        out = Path(command[command.index("--out") + 1])
        out.write_text('{"bench": "decode", "streams": 1, "command": "its own", "device": "x"}\n')
        return None

    monkeypatch.setattr(ablation, "_run", pretend)
    first, *_, last = measure_ablation(variants(("a",)), "toy", ["1x64"], calls=4, timeout=1)
    assert first == {"variant": "plain XLA", "model": "toy", "failure": "no memory"}
    assert last == {"variant": "+ 4 steps a call", "streams": 1, "device": "x"}


def test_a_start_is_told_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time() + 0.5
    told = {"began": began, "ended": began + 2, "stages": {"imports": 1.0, "first token": 1.0}}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho chatter\necho '{json.dumps(told)}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    how: dict[str, Any] = {"prompt": 4, "context": 64, "timeout": 10.0}
    cold, warm = startup.measure_startup(tmp_path, tmp_path / "cache", **how)
    assert (cold["compile_cache"], warm["compile_cache"]) == ("cold", "warm")
    assert cold["seconds"] >= 2
    assert list(cold["stages"]) == ["python", "imports", "first token"]
    python.write_text("#!/bin/sh\necho 'no such device' >&2\nexit 1\n")
    with pytest.raises(ValueError, match="no such device"):
        list(startup.measure_startup(tmp_path, tmp_path / "cache", **how))


def test_stages_of_a_start_add_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = SimpleNamespace(token_ids=(1,))
    llm = SimpleNamespace(
        report=SimpleNamespace(seconds={"read": 0.0}),
        config=SimpleNamespace(vocab_size=9),
        stream=lambda ids, sampling: iter([chunk]),
    )
    monkeypatch.setattr(first_token, "LLM", lambda directory, **options: llm)
    monkeypatch.setattr(sys, "argv", ["first_token", "somewhere"])
    first_token.main()
    told = json.loads(capsys.readouterr().out)
    stages = {name: s for name, s in told["stages"].items() if name != "(again)"}
    assert list(stages) == ["imports", "device", "load", "engine", "first token"]
    assert sum(stages.values()) == pytest.approx(told["ended"] - told["began"])


def test_only_models_that_are_drawn_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use jaxinfer convert"):
        startup.write("tiny_qwen", tmp_path)


# --- the command ----------------------------------------------------------------------------------


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "100"})


def test_a_line_says_how_it_was_made(
    toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "subject", lambda name: toy)
    out = tmp_path / "lines.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["jaxinfer", "bench", "decode", "--out", str(out), "-m", "toy"]
    )
    arguments = ["--model", "toy", "--at", "2x70", "--steps", "1", "--calls", "4", "--peer", "stub"]
    result = bench("decode", *arguments, "--out", str(out))
    assert result.exit_code == 0, result.output
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["bench"] == "decode"
    assert line["command"].endswith("bench decode -m toy")
    assert line["peer"]["about"]["engine"] == "stub"
    assert line["ratio_to_peer"] > 0


@pytest.mark.parametrize(
    "command",
    ["decode", "verify", "prefill", "load", "startup", "kernels", "ablation", "report"],
)
def test_help_has_an_example(command: str) -> None:
    assert f"Example: jaxinfer bench {command}" in bench(command, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("decode", "--model", "toy", "--at", "32"), "--at takes STREAMSxCONTEXT"),
        (("decode", "--model", "toy", "--at", "0x5"), "--at takes STREAMSxCONTEXT"),
        (("decode", "--model", "toy", "--kernels", "magic"), "no family of kernels ['magic']"),
        (("decode", "--model", "tiny_qwen", "--peer", "stub"), "peers run models drawn at random"),
        (("load", "--model", "toy", "--peer", "stub", "--peer-options", "no"), "a JSON object"),
        (("kernels", "--at", "1x64", "--prefill", "64"), "give one of them"),
        (("ablation", "--only", "99"), "there is no variant 99"),
        (("prefill", "--model", "nowhere"), "nowhere is not a directory"),
    ],
)
def test_errors_take_one_line(arguments: tuple[str, ...], told: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.output


def test_answers_in_company_are_compared_with_those_given_alone(
    toy: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = measure_one_answer(toy, ((2, 1),))
    assert line["same_tokens"]
    assert line["same_bits"]
    assert line["answers"] == one_answer.ALONE
    given = iter([[SimpleNamespace(token_ids=(1, last), logprobs=(0.0,))] for last in (2, 3)])
    monkeypatch.setattr(one_answer, "_answers", lambda *_: next(given))
    (line,) = measure_one_answer(toy, ((2, 1),))
    assert not line["same_tokens"]


def test_one_that_fails_does_not_keep_the_others_from_being_measured(
    toy: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"number": 1}
        raise RuntimeError("out of memory")

    benches = {"first": fails, "second": lambda *_: iter([{"number": 2}])}
    monkeypatch.setattr(everything, "BENCHES", benches)
    monkeypatch.setattr(subjects, "subject", lambda _: toy)
    out = tmp_path / "lines.jsonl"
    result = CliRunner().invoke(app, ["bench", "all", "--model", "toy", "--out", str(out)])
    assert result.exit_code == 1
    assert "first failed: out of memory" in result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["bench"], line["number"]) for line in lines] == [("first", 1), ("second", 2)]
