"""`jaxinfer serve`."""

import socket
from contextlib import suppress
from typing import Any

import uvicorn

from jaxinfer.commands.terminal import err, open_llm
from server.app import create_app

GRACE_SECONDS = 5
"""How long answers that are under way may take once the server is told to stop."""


def run(
    model: str,
    name: str | None,
    host: str,
    port: int,
    **options: Any,
) -> None:
    """Serve until interrupted; `options` are those of `LLM`."""
    # Taken first: a port that is in use should not cost the time of loading.
    listening = listen(host, port)
    llm = open_llm(model, **options)
    app = create_app(llm, name=name)
    shown = f"[{host}]" if ":" in host else host
    err.print(
        f"serving {name or llm.name} at http://{shown}:{listening.getsockname()[1]}/v1 "
        f"(context {llm.context} tokens, {llm.engine.options.slots} requests together)",
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
