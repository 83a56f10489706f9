"""One engine thread that serves any number of asyncio callers."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from jaxinfer.engine.engine import Request
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request import Chunk, SamplingParams

Deliver = Callable[[Chunk | BaseException], None]


class AsyncLLM:
    """Streams from an `LLM` whose engine runs on a thread of its own.

    The `LLM` must not be used directly between `start` and `close`.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        # What other threads want done by the engine's thread; None ends it.
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliver: dict[Request, Deliver] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; may be called again after `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; streams still open end with an error."""
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join()
            self._thread = None

    async def stream(
        self, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[Chunk]:
        """Complete one prompt. Closing the iterator cancels the request.

        Raises RequestError if it can never be served, RuntimeError if the engine is not running
        or fails.
        """
        if self._thread is None:
            raise RuntimeError("the engine is not running: call start() first")
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()
        taken: list[Request] = []

        def deliver(item: Chunk | BaseException) -> None:
            # A caller whose event loop has closed must not take the engine down.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        def submit() -> None:
            try:
                request = self._llm.submit(token_ids, params)
            except Exception as error:
                deliver(error)
                return
            taken.append(request)
            self._deliver[request] = deliver

        def cancel() -> None:
            for request in taken:
                self._deliver.pop(request, None)
                if not request.ended:
                    self._llm.engine.cancel(request)

        self._errands.put(submit)
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finish_reason:
                    return
        finally:
            self._errands.put(cancel)

    def _run(self) -> None:
        engine = self._llm.engine
        while True:
            # Idle: sleep until somebody wants something. Busy: only look.
            while not self._errands.empty() or not engine.busy:
                errand = self._errands.get()
                if errand is None:
                    self._fail(RuntimeError("the engine was shut down"))
                    return
                errand()
            try:
                for request, chunk in engine.step():
                    if deliver := self._deliver.get(request):
                        deliver(chunk)
                    if chunk.finish_reason:
                        self._deliver.pop(request, None)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End every open stream with an error and free what it held."""
        for request, deliver in self._deliver.items():
            if not request.ended:
                self._llm.engine.cancel(request)
            deliver(error)
        self._deliver.clear()
