"""Work on behalf of a client that may leave, and server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Disconnected(Exception):
    """The client has left; whoever worked for it has been cancelled."""


async def until_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the client leaves first.

    The request's body must have been read. Raises Disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for pending in (task, watch):
            pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pending


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge[T](streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What all the streams yield as it comes, each with the number of its stream.

    They run at the same time. An error in one of them, or closing this, closes all.
    """
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                number = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    item = task.result()
                    waiting[asyncio.ensure_future(anext(streams[number]))] = number
                    yield number, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


class EventStream(Response):
    """A response of server-sent events; `events` is closed whatever happens."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        async with aclosing(self._events):
            with suppress(Disconnected):
                await until_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""


def event(value: Any) -> bytes:
    """One event that carries a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
