"""What the commands share: loading with a spinner, showing a stream, the line of figures."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from checkpoints import progress_bar
from jaxinfer.commands.sizes import in_bytes
from jaxinfer.engine import LLM, Chunk, Usage, device_kind
from jaxinfer.qwen.messages import CallArguments, CallStart, Delta, Message, MessageParser, join

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)

THOUGHT, CALL, FIGURES = "dim italic", "cyan", "dim green"


def open_llm(model: str, *, speculation: str = "auto", max_batch: int = 1, **options: Any) -> LLM:
    """Load a model and compile its steps; progress goes to standard error."""
    keep_compiled_steps()
    drafting = None if speculation == "none" else speculation
    llm = LLM(model, max_batch=max_batch, speculation=drafting, progress=True, **options)
    stages = ", ".join(f"{stage} {s:.1f} s" for stage, s in llm.report.seconds.items())
    err.print(f"{model}: {in_bytes(llm.report.bytes_on_device)} ({stages})", style="dim")
    what = f"compiling for {device_kind()} (faster the next time)"
    with progress_bar(what) as advance:
        llm.engine.warm_up(advance)
    return llm


def keep_compiled_steps() -> None:
    """Have XLA store what it compiles in the user's cache directory, unless told otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "jaxinfer" / "xla"))


@dataclass
class Clock:
    """Takes the time of a stream that passes through it.

    Attributes:
        usage: of the stream so far.
        first: seconds to the first chunk, which the prompt's prefill gives.
        rest: seconds from then to the last chunk so far.
    """

    usage: Usage = field(default_factory=Usage)
    first: float = 0.0
    rest: float = 0.0
    _at_first: int = 0

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same chunks."""
        start = time.perf_counter()
        for chunk in chunks:
            passed = time.perf_counter() - start
            if not self.usage.completion_tokens:
                self.first, self._at_first = passed, chunk.usage.completion_tokens
            self.usage, self.rest = chunk.usage, passed - self.first
            yield chunk

    def figures(self) -> str:
        """A line for people; the rate is that of decoding alone."""
        usage = self.usage
        line = f"{usage.completion_tokens} tokens"
        if self.rest:
            rate = (usage.completion_tokens - self._at_first) / self.rest
            line += f", {rate:.0f} tokens/s"
        if usage.drafted:
            share = f"{100 * usage.acceptance:.0f} %"
            line += f", drafts accepted {usage.accepted} of {usage.drafted} ({share})"
        return f"{line}, {self.first:.2f} s to the first"


def show_reply(chunks: Iterable[Chunk], parser: MessageParser) -> Message:
    """Print a reply as it comes: thoughts dim, calls coloured; returns what was said."""
    deltas: list[Delta] = []
    kind = ""
    for delta in _deltas(chunks, parser):
        deltas.append(delta)
        match delta:
            case CallStart(_, name):
                out.print(f"{'\n' if kind else ''}{name} ", style=CALL, markup=False, end="")
                kind = "call"
            case CallArguments(_, fragment):
                out.print(fragment, style=CALL, markup=False, end="", soft_wrap=True)
            case _:
                if kind and kind != delta.kind:
                    out.print()
                kind = delta.kind
                style = THOUGHT if kind == "reasoning" else None
                out.print(delta.text, style=style, markup=False, end="", soft_wrap=True)
    out.print()
    return join(deltas)


def _deltas(chunks: Iterable[Chunk], parser: MessageParser) -> Iterator[Delta]:
    for chunk in chunks:
        yield from parser.feed(chunk.text)
    yield from parser.finish()
