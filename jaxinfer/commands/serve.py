"""`jaxinfer serve`."""

import socket
from contextlib import suppress
from typing import Any

import uvicorn

from jaxinfer.commands.segment import open_segmenter
from jaxinfer.commands.terminal import err, open_llm
from server.app import create_app

GRACE_SECONDS = 5
"""How long answers that are under way may take once the server is told to stop."""

COMMON_SIDES = (1024, 2048, 4096)
"""Sides of squares that most pictures fit in; masks of others wait for a compiler once."""


def run(
    model: str | None,
    segmenter: str | None,
    name: str | None,
    host: str,
    port: int,
    **options: Any,
) -> None:
    """Serve a language model, a segmenter or both until interrupted; `options` are of `LLM`."""
    # Taken first: a port that is in use should not cost the time of loading.
    listening = listen(host, port)
    masks = open_segmenter(segmenter) if segmenter else None
    if masks is not None:
        masks.warm_up(batches=[1], boxes=1, sizes=[(side, side) for side in COMMON_SIDES])
    llm = open_llm(model, **options) if model else None
    app = create_app(llm, name=name, segmenter=masks)
    shown = f"[{host}]" if ":" in host else host
    names = [segmenter] if segmenter else []
    limits = ""
    if llm is not None:
        names.append(name or llm.name)
        slots = llm.engine.options.slots
        limits = f" (context {llm.context} tokens, {slots} requests together)"
    err.print(
        f"serving {' and '.join(names)} at http://{shown}:{listening.getsockname()[1]}/v1{limits}",
        style="green",
        markup=False,
        soft_wrap=True,
    )
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
