"""Driving another engine: what it says, and what happens when it fails."""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench.peer import Shape, against, measure_peer, rival
from jaxinfer.bench.subjects import TOY
from jaxinfer.peers.protocol import DRIVERS, Peer, PeerError

PROMPTS = [[1, 2, 3]] * 3


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer("stub") as started:
        yield started


def test_tokens_of_all_prompts_have_times(peer: Peer) -> None:
    assert peer.load(TOY)["engine"] == "stub"
    answers = peer.generate(PROMPTS, max_tokens=4, streams=2)
    assert [len(answer.times) for answer in answers] == [4, 4, 4]
    assert all(list(a.times) == sorted(a.times) for a in answers)
    # Two at a time: the third waits for the others.
    assert answers[2].asked >= answers[0].times[-1]


def test_a_refusal_is_told_and_the_driver_goes_on(peer: Peer) -> None:
    with pytest.raises(PeerError, match="stub could not load: RuntimeError: out of memory"):
        peer.load(TOY, {"fail": "error", "at": "load"})
    assert peer.load(TOY)["engine"] == "stub"


def test_a_crash_names_the_peer_and_shows_its_last_words(peer: Peer) -> None:
    peer.load(TOY, {"fail": "crash"})
    with pytest.raises(PeerError, match="stub ended with status 3") as raised:
        peer.generate(PROMPTS, 1, 1)
    assert "the last words of a driver" in str(raised.value)
    with pytest.raises(PeerError, match="ended with status 3"):
        peer.generate(PROMPTS, 1, 1)


def test_silence_ends_it(peer: Peer) -> None:
    peer.load(TOY, {"fail": "hang"})
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"within 0\.5 s") as raised:
        peer.generate(PROMPTS, 1, 1, timeout=0.5)
    assert "thinking" in str(raised.value)
    assert time.monotonic() - began < 10
    assert peer._process.poll() is not None


def test_a_closed_peer_leaves_no_process() -> None:
    with Peer("stub") as peer:
        peer.load(TOY)
        process = peer._process
    assert process.poll() is not None


def test_what_cannot_be_started_is_an_error() -> None:
    with pytest.raises(ValueError, match="no driver for 'llama'; there are transformers, vllm"):
        Peer("llama")
    with pytest.raises(PeerError, match="cannot be run"):
        Peer("stub", "/no/such/python")


@pytest.mark.parametrize("name", ["transformers", "vllm", "sam_transformers"])
def test_a_driver_without_its_engine_says_what_is_missing(name: str) -> None:
    module = name.removeprefix("sam_")
    if (
        subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode
        == 0
    ):
        pytest.skip(f"{module} is installed")
    with Peer(name) as peer, pytest.raises(PeerError, match="ModuleNotFoundError: No module"):
        peer.load(TOY)


def test_drivers_import_nothing_of_ours() -> None:
    for path in (*DRIVERS.values(), DRIVERS["stub"].with_name("driver_lines.py")):
        tree = ast.parse(path.read_text())
        names = [
            a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
        ]
        names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not [name for name in names if name.split(".")[0] in ("jaxinfer", "jax", "server")]


def test_a_measured_peer_stands_beside_our_line() -> None:
    shape = Shape(streams=2, prompt=5, output=6, requests=2)
    other = rival("stub", None, '{"config": {"model_type": "another"}}')
    assert other is not None
    told = measure_peer(other, TOY, [shape])[shape]
    assert told["about"] == {"engine": "stub", "settings": "another"}
    assert told["output_tokens"] == 12
    line: dict[str, Any] = against({"speed": 3.0}, {"of": {"speed": 2.0}}, "speed", "of.speed")
    assert line["ratio_to_peer"] == 1.5
    assert against({"speed": 3.0}, None, "speed", "of.speed") == {"speed": 3.0}


def test_options_of_a_peer_are_an_object(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"variant": "compiled", "config": {"a": 1}}')
    given = rival("stub", None, f"@{file}")
    assert given is not None
    assert (given.options, given.config) == ({"variant": "compiled"}, {"a": 1})
    assert rival(None, None, "nonsense") is None
    for wrong in ("nonsense", "[1]"):
        with pytest.raises(ValueError, match="must be a JSON object"):
            rival("stub", None, wrong)
