"""The command line: help, what each command does, and errors that a person can act on."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image
from typer.testing import CliRunner

from checkpoints import load
from jaxinfer.cli import KvDtype, Recipe, Speculation, app
from jaxinfer.commands import terminal
from jaxinfer.commands.demo import SCENE, answer
from jaxinfer.commands.sizes import in_bytes, in_numbers
from jaxinfer.engine import LLM, Chunk, SamplingParams, Usage
from jaxinfer.qwen.messages import ToolCall

COMMANDS = ("demo", "generate", "chat", "serve", "inspect", "quantize", "convert")
GOLDEN = str(Path(__file__).parent / "goldens" / "qwen")
CODE = "def read_lines(path):\n"


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "100"})


def refused(result: Any) -> str:
    """The error of a command that failed, which must be one line, after what loading printed."""
    assert result.exit_code == 2
    *before, line = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert not any("error" in other or "Traceback" in other for other in before)
    return line


@pytest.fixture
def opened(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Commands get the shared model; returns what they asked for."""
    asked: list[dict[str, Any]] = []

    def open_shared(model: str, **options: Any) -> LLM:
        asked.append({"model": model} | options)
        return tiny_llm

    monkeypatch.setattr(terminal, "LLM", open_shared)
    return asked


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: jaxinfer {command}" in result.stdout


def test_help_lists_the_commands() -> None:
    for result in (run(), run("--help"), run("-h")):
        assert all(command in result.stdout for command in COMMANDS)


def test_help_does_without_jax() -> None:
    code = "import sys, jaxinfer.cli; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "jaxinfer", "inspect", GOLDEN]
    assert "lm_head" in subprocess.check_output(command, text=True)


def test_the_declared_choices_are_the_real_ones() -> None:
    from checkpoints import RECIPES
    from jaxinfer.engine.build import KV_DTYPES
    from jaxinfer.engine.slots import SPECULATIONS

    assert set(Recipe) == set(RECIPES)
    assert {None, *KvDtype} == set(KV_DTYPES)
    assert set(Speculation) == {*SPECULATIONS, "none"}


@pytest.mark.parametrize("source", ["argument", "file", "input", "dash"])
def test_generate(opened: Any, tiny_llm: LLM, tmp_path: Path, source: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(CODE)
    prompt = {"argument": [CODE], "file": [f"@{file}"], "input": [], "dash": ["-"]}[source]
    options = ("--temperature", "0", "--max-tokens", "12")
    result = run("generate", *prompt, *options, stdin=CODE)
    params = SamplingParams(temperature=0, max_tokens=12)
    assert result.stdout == tiny_llm.generate(CODE, params)[0].text + "\n"
    assert "12 tokens" in result.stderr


def test_generate_passes_its_options_on(opened: Any, tiny_llm: LLM) -> None:
    text = run("generate", CODE, "--temperature", "0", "--max-tokens", "12").stdout
    word = text.split()[1]
    result = run(
        "generate", CODE, "--temperature", "0", "--stop", word, "-m", "some", "--context", "99",
        "--speculation", "none", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.1", "--seed", "1",
    )  # fmt: skip
    assert result.stdout == text[: text.index(word)] + "\n"
    expected = {"model": "some", "max_batch": 1, "context": 99, "speculation": None}
    assert opened[-1] == {**expected, "progress": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "nope"], "tiny_qwen"),
        (["generate", "x", "--top-p", "0"], "top_p"),
        (["generate", "@/no/such/file"], "/no/such/file"),
        (["generate", ""], "empty"),
        (["chat", "--model", "nope"], "tiny_qwen"),
        (["inspect", "nope"], "tiny_qwen"),
        (["inspect", "/"], "config.json"),
        (["quantize", "nope", "/tmp/x"], "tiny_qwen"),
        (["convert", "nope", "/tmp/x"], "tiny_qwen"),
        (["convert", GOLDEN, GOLDEN], "not empty"),
        (["quantize", GOLDEN, GOLDEN], "not empty"),
    ],
)
def test_errors_name_the_remedy(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in result.stderr


def test_an_error_is_one_line(opened: Any) -> None:
    assert "context" in refused(run("generate", "word " * 3000))


def test_a_traceback_on_request() -> None:
    result = run("--traceback", "inspect", "nope")
    assert type(result.exception).__name__ == "CheckpointError"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--temperature", "-1"],
        ["serve", "--port", "65536"],
        ["quantize", "a", "b", "--recipe", "best"],
        ["dance"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_chat(opened: Any) -> None:
    lines = "Who is older, Alice or Ben?\n\n/jump\n/reset\nWhat is the capital of Norway?\n/exit\n"
    result = run("chat", "--temperature", "0", "--system", "Answer briefly.", stdin=lines)
    assert result.exit_code == 0
    assert "Alice is older." in result.stdout
    assert "Oslo" in result.stdout
    assert "think>" not in result.stdout
    assert "unknown command /jump" in result.stderr
    assert result.stderr.count("tokens/s") == 2


def test_chat_remembers_and_ends_with_its_input(opened: Any, monkeypatch: Any) -> None:
    seen: list[list[dict[str, Any]]] = []
    original = LLM.stream_chat

    def stream_chat(self: LLM, messages: Any, *args: Any, **options: Any) -> Any:
        seen.append(list(messages))
        assert options == {"enable_thinking": False}
        return original(self, messages, *args, **options)

    monkeypatch.setattr(LLM, "stream_chat", stream_chat)
    result = run("chat", "--no-think", "--max-tokens", "8", stdin="Hi\nAnd you?\n")
    assert result.exit_code == 0
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]
    assert seen[1][1]["content"].strip()


def test_chat_survives_what_is_too_long(opened: Any) -> None:
    result = run("chat", "--temperature", "0", stdin="word " * 3000 + "\nWho are you?\n")
    assert result.exit_code == 0
    assert "/reset" in result.stderr
    assert "Tiny Qwen" in result.stdout


def test_demo(opened: Any, tmp_path: Path) -> None:
    overlay = tmp_path / "found.png"
    result = run("demo", "--out", str(overlay))
    assert result.exit_code == 0
    for shown in (
        "Alice is older.",
        'get_weather {"city": "Oslo"}',
        'get_weather replies {"temperature": 7, "sky": "rainy"}',
        'check_stock {"item": "lantern"}',
        "rainy in Oslo",
    ):
        assert shown in result.stdout
    assert result.stdout.count("drafts accepted") == 4
    assert "green heart  -" in result.stdout
    with Image.open(overlay) as found, Image.open(SCENE) as scene:
        assert found.size == scene.size


def test_the_demo_answers_what_it_does_not_know() -> None:
    for call in (
        ToolCall("get_weather", {"city": "X"}),
        ToolCall("f", {}),
        ToolCall("f", {"a": []}),
    ):
        assert answer(call) == '{"error": "not found"}'


def test_serve(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[uvicorn.Server] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self))
    # It would close handlers that other libraries have set up on the streams of the test runner.
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
    result = run(
        "serve", "--port", "0", "--name", "qwen", "--max-batch", "3", "--draft-length", "2",
        "--kv-dtype", "fp8", "--no-prefix-cache", "--prefill-budget", "192",
        "--memory-fraction", "0.5",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "serving qwen at http://127.0.0.1:" in result.stderr
    expected = {
        "max_batch": 3,
        "draft_length": 2,
        "kv_dtype": "fp8",
        "prefix_cache": False,
        "prefill_budget": 192,
        "memory_fraction": 0.5,
    }
    assert expected.items() <= opened[-1].items()
    assert len(served) == 1


def test_serve_on_a_port_in_use(opened: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refused(run("serve", "--port", str(port)))
    assert opened == []


def test_inspect() -> None:
    result = run("inspect", "tiny_qwen")
    assert result.exit_code == 0
    assert "8 layers (6 Gated DeltaNet, 2 attention)" in result.stdout
    assert "moe.gate_up" in result.stdout
    assert "dense bfloat16" in result.stdout


@pytest.mark.parametrize("recipe", list(Recipe))
def test_quantize_inspect_convert(tmp_path: Path, recipe: Recipe) -> None:
    small, fast = str(tmp_path / "small"), str(tmp_path / "fast")
    quantized = run("quantize", GOLDEN, small, "--recipe", recipe)
    assert quantized.exit_code == 0
    assert small in quantized.stdout
    assert "NVFP4" in run("inspect", small).stdout
    converted = run("convert", small, fast)
    assert converted.exit_code == 0
    assert load(fast)[0] == load(small)[0]
    assert run("inspect", fast).stdout.replace(fast, small) == run("inspect", small).stdout
    assert "not empty" in run("convert", small, fast).stderr


def test_quantize_calibrates(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\n\n\ndef names(path):\n    return os.listdir(path)\n" * 40)
    small = str(tmp_path / "small")
    result = run("quantize", "tiny_qwen", small, "--calibrate", str(text))
    assert result.exit_code == 0
    assert "FP8 static" in run("inspect", small).stdout
    other = str(tmp_path / "other")
    refusal = run("quantize", "tiny_qwen", other, "--recipe", "all", "--calibrate", str(text))
    assert "no FP8 modules" in refused(refusal)


def test_figures() -> None:
    clock = terminal.Clock()
    chunks = [
        Chunk("a", (1,), None, None, Usage(5, 1)),
        Chunk("b", (2, 3), None, "length", Usage(5, 3, 4, 1)),
    ]
    assert list(clock.watch(chunks)) == chunks
    clock.first, clock.rest = 0.5, 0.25
    assert clock.figures() == (
        "3 tokens, 8 tokens/s, drafts accepted 1 of 4 (25 %), 0.50 s to the first"
    )


@pytest.mark.parametrize(
    ("count", "size", "number"),
    [
        (0, "0 B", "0"),
        (999, "999 B", "999"),
        (1_500, "1.5 kB", "1.5 K"),
        (17_300_000, "17.3 MB", "17.3 M"),
        (34_660_610_688, "34.66 GB", "34.7 B"),
    ],
)
def test_sizes(count: int, size: str, number: str) -> None:
    assert (in_bytes(count), in_numbers(count)) == (size, number)
