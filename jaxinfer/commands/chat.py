"""`jaxinfer chat`."""

from dataclasses import replace
from typing import Any

from jaxinfer.commands.terminal import FIGURES, Clock, err, open_llm, out, show_reply
from jaxinfer.engine import LLM, RequestError, SamplingParams
from jaxinfer.qwen.messages import Message, MessageParser

HELP = "/reset forgets the conversation, /exit ends it"


def run(
    model: str,
    context: int | None,
    speculation: str,
    sampling: dict[str, Any],
    *,
    system: str | None,
    thinking: bool,
) -> None:
    """Read lines and answer them until the user has enough."""
    # A wrong value is told of before the model is loaded.
    SamplingParams(**sampling)
    llm = open_llm(model, context=context, speculation=speculation)
    params = replace(llm.defaults, **sampling)
    beginning = [{"role": "system", "content": system}] if system else []
    history: list[dict[str, Any]] = list(beginning)
    err.print(f"{llm.name}: {HELP}", style=FIGURES)
    while (line := _read()) is not None:
        match line:
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                history = list(beginning)
            case _ if line.startswith("/"):
                err.print(f"unknown command {line}: {HELP}", style="red", markup=False)
            case _:
                asked = [*history, {"role": "user", "content": line}]
                reply = _answer(llm, params, asked, thinking)
                if reply is not None:
                    history = [*asked, reply]


def _read() -> str | None:
    """The next line, None at the end of input."""
    try:
        return out.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        out.print()
        return None


def _answer(
    llm: LLM, params: SamplingParams, messages: list[dict[str, Any]], thinking: bool
) -> dict[str, Any] | None:
    """Print the reply; None if there is none to remember."""
    clock = Clock()
    try:
        chunks = llm.stream_chat(messages, params, enable_thinking=thinking)
        message = show_reply(clock.watch(chunks), MessageParser(thinking=thinking, calls=False))
    except RequestError as error:
        err.print(f"error: {error} (or /reset)", style="red", markup=False, soft_wrap=True)
        return None
    except KeyboardInterrupt:
        out.print("\n(cut short and forgotten)", style=FIGURES)
        return None
    err.print(clock.figures(), style=FIGURES)
    return _remember(message)


def _remember(message: Message) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning or "",
    }
