"""Our half of the conversation with a driver; `driver_lines` has the other, and the commands."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxinfer.bench.timeline import Answer

DRIVERS: Mapping[str, Path] = {
    name: Path(__file__).with_name(f"{name}_driver.py")
    for name in ("transformers", "vllm", "sam_transformers", "stub")
}
"""Scripts by the name of the engine that they drive."""

LOAD_SECONDS, GENERATE_SECONDS = 1200.0, 600.0
TOLD = 2000
"""Characters of a driver's standard error that an error message shows."""


class PeerError(ValueError):
    """A peer that failed: the message names it, and shows the end of what it said."""


class Peer:
    """Another engine, in a process of its own that ends with the `with` block.

    Attributes:
        name: a key of `DRIVERS`.
        about: what the driver told of itself when it had loaded.
    """

    def __init__(self, name: str, python: str | Path | None = None) -> None:
        """Start the driver.

        Args:
            name: a key of `DRIVERS`.
            python: the interpreter of an environment that has the engine; None for this one.

        Raises ValueError for an engine without a driver, PeerError if it cannot be started.
        """
        if name not in DRIVERS:
            raise ValueError(f"no driver for {name!r}; there are {', '.join(DRIVERS)}")
        self.name, self.about = name, {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [str(python or sys.executable), str(DRIVERS[name])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                # With all that it starts, so that all of it can be ended.
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"{name}: {python} cannot be run ({error}); give its Python") from error
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def load(
        self,
        config: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        timeout: float = LOAD_SECONDS,
    ) -> Mapping[str, Any]:
        """Load a model of this configuration; what the driver tells of it."""
        told = self._ask(timeout, cmd="load", config=config, options=options or {})
        self.about = told["about"]
        return self.about

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        streams: int,
        timeout: float = GENERATE_SECONDS,
    ) -> list[Answer]:
        """Answer prompts, so many at once; when each token of each was known."""
        command = {"prompts": prompts, "max_tokens": max_tokens, "streams": streams}
        told = self._ask(timeout, cmd="generate", **command)
        return [Answer(answer["asked"], tuple(answer["times"])) for answer in told["answers"]]

    def segment(self, batch: int, repeats: int, timeout: float = GENERATE_SECONDS) -> list[float]:
        """Seconds of each of so many batches of pictures, after some that are not told."""
        return self._ask(timeout, cmd="segment", batch=batch, repeats=repeats)["answers"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the driver and all that it started."""
        assert self._process.stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # the end of its commands
            self._process.wait(timeout=10)
        self._kill()
        self._errors.close()

    def _ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        what = command["cmd"]
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died(what) from None
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._kill()
            message = f"gave no answer to {what!r} within {timeout:g} s and was ended"
            raise self._error(message) from None
        if line is None:
            raise self._died(what)
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._error(f"answered {what!r} with {line[:200]!r}, which is no JSON") from None
        if "error" in answer:
            raise self._error(f"could not {what}: {answer['error']}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _died(self, what: str) -> PeerError:
        code = self._process.wait()
        return self._error(f"ended with status {code} at {what!r}")

    def _error(self, message: str) -> PeerError:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TOLD))
        said = self._errors.read().decode(errors="replace").strip() or "nothing"
        return PeerError(f"{self.name} {message}. The end of what it said:\n{said}")
