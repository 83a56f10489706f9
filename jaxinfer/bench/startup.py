"""From nothing to the first token: a fresh process, files in the engine's own format.

The process loads the model as a user would, with `LLM`, and answers one prompt. It runs twice: the
first time compiles and fills the compilation cache, the second finds it. Both are told; so are the
bytes of the files, which the operating system may well hold in memory after the first time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import engine_format
from jaxinfer.bench.decode import Record
from jaxinfer.bench.subjects import configuration, subject

CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def write(name: str, directory: Path) -> None:
    """Draw a model of random numbers and write it in the engine's own format.

    In a process of its own, since one that has drawn holds the device.

    Raises ValueError if that fails, or for a model that is not drawn.
    """
    if configuration(name) is None:
        raise ValueError(f"{name!r} is not drawn at random; use jaxinfer convert")
    command = [sys.executable, "-m", "jaxinfer.bench.startup", name, str(directory)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"{name} could not be written; the end of why:\n{done.stderr[-2000:]}")


def _write(name: str, directory: Path) -> None:
    drawn = subject(name)
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "config.json").write_text(json.dumps(configuration(name)))
        drawn.tokenizer.save(str(Path(source) / "tokenizer.json"))
        engine_format.save(directory, drawn.cfg, drawn.params, source)


def measure_startup(
    directory: Path, cache: Path, *, prompt: int, context: int, timeout: float
) -> Iterator[Record]:
    """Start twice; the second time everything has been compiled.

    Args:
        directory: a checkpoint, best in the engine's own format.
        cache: where compiled programs are kept.
        prompt: tokens of the prompt.
        context: tokens that a request may have.
        timeout: seconds that a start may take.

    Raises ValueError if the process fails, with the end of what it said.
    """
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    for number in range(2):
        seconds, told = _start(directory, cache, prompt, context, timeout)
        yield {
            "model": directory.name,
            "file_bytes": size,
            "compile_cache": "warm" if number or _held(cache, told) else "cold",
            "prompt": prompt,
            "context": context,
            "seconds": round(seconds, 3),
            "stages": told["stages"],
        }


def _start(
    directory: Path, cache: Path, prompt: int, context: int, timeout: float
) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of the process to its first token, and what it told."""
    arguments = [str(directory), "--prompt", str(prompt), "--context", str(context)]
    environment = os.environ | CACHE | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    entries = _entries(cache)
    began = time.time()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxinfer.bench.first_token", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"no first token within {timeout:g} s; give --timeout") from error
    if done.returncode:
        raise ValueError(f"the process failed; the end of what it said:\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    stages = {"python": told["began"] - began, **told["stages"]}
    rounded = {name: round(seconds, 3) for name, seconds in stages.items()}
    return told["ended"] - began, {"stages": rounded, "entries": entries}


def _entries(cache: Path) -> int:
    return sum(1 for _ in cache.rglob("*")) if cache.is_dir() else 0


def _held(cache: Path, told: dict[str, Any]) -> bool:
    """Whether a start found all that it needed in the cache."""
    return 0 < told["entries"] == _entries(cache)


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
