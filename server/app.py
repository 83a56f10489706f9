"""The HTTP application: OpenAI's chat route over a language model, and segmentation."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.engine import LLM, AsyncLLM, Chunk, RequestError, SamplingParams
from jaxinfer.engine.llm import answers
from jaxinfer.segmenter import Segmenter
from server.errors import JSON, ApiError, fail, refuse, refuse_route
from server.params import refusal
from server.prompt import Job, prepare
from server.replies import Replier
from server.requests import read_chat_request
from server.responses import ModelCard, ModelList
from server.segment import answer as answer_segment
from server.segment import read_segment_request
from server.stream import Disconnected, EventStream, merge, until_disconnected

MAX_BODY = 32 * 2**20
"""Bytes of a request's body; a longer one is refused."""

SEGMENTING = 4
"""Requests that a segmenter works on at a time: some decode and encode while one computes."""


def create_app(
    llm: LLM | None = None,
    *,
    name: str | None = None,
    segmenter: Segmenter | None = None,
    segmenter_name: str | None = None,
) -> Starlette:
    """The application that serves a language model, a segmenter or both.

    Args:
        llm: used by the application alone between start-up and shutdown.
        name: what clients call it; by default what it was loaded as.
        segmenter: for `/v1/segment`.
        segmenter_name: what clients call it; by default what it was loaded as.

    Raises ValueError if there is nothing to serve, or both have one name.
    """
    rooms: list[ChatRoutes | SegmentRoutes] = []
    if llm is not None:
        rooms.append(ChatRoutes(llm, name or llm.name))
    if segmenter is not None:
        rooms.append(SegmentRoutes(segmenter, segmenter_name or segmenter.name))
    cards = {room.card.id: room.card for room in rooms}
    if not rooms or len(cards) < len(rooms):
        raise ValueError("serve a language model, a segmenter, or both under different names")

    async def health(request: Request) -> Response:
        return _json({"status": "ok", "model": next(iter(cards))})

    async def models(request: Request) -> Response:
        return _json(ModelList(list(cards.values())))

    async def model(request: Request) -> Response:
        asked = request.path_params["model"]
        if asked not in cards:
            raise no_such_model(asked, " and ".join(map(repr, cards)))
        return _json(cards[asked])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for room in rooms:
                await stack.enter_async_context(room.lifespan())
            yield

    return Starlette(
        routes=[
            *(route for room in rooms for route in room.routes()),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/health", health),
        ],
        exception_handlers={
            ApiError: refuse,
            HTTPException: refuse_route,
            Disconnected: _nobody,
            Exception: fail,
        },
        lifespan=lifespan,
    )


class ChatRoutes:
    """What a language model answers."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self._engine = llm, AsyncLLM(llm)
        self.card = ModelCard(id=name, created=int(time.time()), max_model_len=llm.context)

    def routes(self) -> list[Route]:
        """Its routes."""
        return [Route("/v1/chat/completions", self.chat, methods=["POST"])]

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """The engine's thread runs while the server does."""
        self._engine.start()
        try:
            yield
        finally:
            self._engine.close()

    async def chat(self, request: Request) -> Response:
        """A completion, whole or streamed."""
        asked = read_chat_request(await _body(request))
        if asked.model != self.card.id:
            raise no_such_model(asked.model, repr(self.card.id))
        # Tokenising a long conversation would hold up everybody's streams.
        job = await asyncio.to_thread(prepare, asked, self._llm)
        replier = Replier(job, self.card.id, self._llm.tokenizer)
        chunks = merge([self._answer(job, params) for params in answers(job.params)])
        try:
            if not asked.stream:
                return _json(await until_disconnected(request.receive, replier.whole(chunks)))
            # An error before the first token is still told with a status.
            first = await until_disconnected(request.receive, anext(chunks))
        except RequestError as error:
            raise refusal(error, asked) from error
        options = asked.stream_options
        include_usage = options is not None and bool(options.include_usage)
        return EventStream(replier.events(first, chunks, include_usage))

    async def _answer(self, job: Job, params: SamplingParams) -> AsyncGenerator[Chunk]:
        """One answer. Raises ApiError if what it must conform to does not let it go on."""
        stream = cast(AsyncGenerator[Chunk], self._engine.stream(job.token_ids, params))
        async with aclosing(stream):
            async for chunk in stream:
                if chunk.finish_reason == "error":
                    message = f"the structured output cannot go on: {chunk.stop_reason}"
                    raise ApiError(message, code="structured_output_failed", status=500)
                yield chunk


class SegmentRoutes:
    """What a segmenter answers."""

    def __init__(self, segmenter: Segmenter, name: str) -> None:
        self._segmenter = segmenter
        self._turn = asyncio.Semaphore(SEGMENTING)
        self.card = ModelCard(id=name, created=int(time.time()))

    def routes(self) -> list[Route]:
        """Its routes."""
        return [Route("/v1/segment", self.segment, methods=["POST"])]

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """A segmenter has nothing to start or to stop."""
        yield

    async def segment(self, request: Request) -> Response:
        """Masks of what the prompts ask for."""
        job = await read_segment_request(request.headers, await _body(request))
        if job.model not in (None, self.card.id):
            raise no_such_model(job.model, repr(self.card.id))
        async with self._turn:
            return _json(
                await asyncio.to_thread(answer_segment, job, self._segmenter, self.card.id)
            )


def no_such_model(asked: str, served: str) -> ApiError:
    """The refusal of a request for another model."""
    return ApiError(
        f"there is no model {asked!r} here; this server has {served}",
        param="model",
        code="model_not_found",
        status=404,
    )


async def _body(request: Request) -> bytes:
    """The request's body. Raises ApiError (413) as soon as it is too long."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise ApiError(f"the body is longer than {MAX_BODY} bytes", status=413)
    return bytes(body)


async def _nobody(request: Request, error: Exception) -> Response:
    """For a client that has left: nginx's status for it, which only a log will see."""
    return Response(status_code=499)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
