"""`jaxinfer generate`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.commands.terminal import FIGURES, Clock, err, open_llm
from jaxinfer.engine import SamplingParams


def run(
    prompt: str | None,
    model: str,
    context: int | None,
    speculation: str,
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt on standard output."""
    text = read_prompt(prompt)
    # A wrong value is told of before the model is loaded.
    SamplingParams(**sampling)
    llm = open_llm(model, context=context, speculation=speculation)
    params = replace(llm.defaults, **sampling)
    clock = Clock()
    for chunk in clock.watch(llm.stream(text, params)):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    err.print(clock.figures(), style=FIGURES)


def read_prompt(prompt: str | None) -> str:
    """The prompt itself, a file's text for `@path`, or standard input for None or "-".

    Raises ValueError if there is none.
    """
    if prompt is not None and prompt.startswith("@"):
        prompt = Path(prompt[1:]).read_text(encoding="utf-8")
    elif prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise ValueError("give a prompt, as an argument, as @FILE or on standard input")
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("the prompt is empty")
    return prompt
