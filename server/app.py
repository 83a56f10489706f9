"""The HTTP application: OpenAI's chat route over one model."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.engine import LLM, AsyncLLM, Chunk, RequestError, SamplingParams
from jaxinfer.engine.llm import answers
from server.errors import JSON, ApiError, fail, refuse, refuse_route
from server.params import refusal
from server.prompt import Job, prepare
from server.replies import Replier
from server.requests import read_chat_request
from server.responses import ModelCard, ModelList
from server.stream import Disconnected, EventStream, merge, until_disconnected

MAX_BODY = 32 * 2**20
"""Bytes of a request's body; a longer one is refused."""


def create_app(llm: LLM, *, name: str | None = None) -> Starlette:
    """The application that serves a model.

    Args:
        llm: used by the application alone between start-up and shutdown.
        name: what clients call the model; by default what it was loaded as.
    """
    routes = _Routes(llm, name or llm.name)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/health", routes.health),
        ],
        exception_handlers={
            ApiError: refuse,
            HTTPException: refuse_route,
            Disconnected: _nobody,
            Exception: fail,
        },
        lifespan=routes.lifespan,
    )


class _Routes:
    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self._engine = llm, AsyncLLM(llm)
        self._card = ModelCard(id=name, created=int(time.time()), max_model_len=llm.context)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            self._engine.close()

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok", "model": self._card.id})

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._card]))

    async def model(self, request: Request) -> Response:
        self._must_be_served(request.path_params["model"])
        return _json(self._card)

    async def chat(self, request: Request) -> Response:
        asked = read_chat_request(await _body(request))
        self._must_be_served(asked.model)
        # Tokenising a long conversation would hold up everybody's streams.
        job = await asyncio.to_thread(prepare, asked, self._llm)
        replier = Replier(job, self._card.id, self._llm.tokenizer)
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

    def _must_be_served(self, model: str) -> None:
        if model != self._card.id:
            raise ApiError(
                f"there is no model {model!r}; this server has {self._card.id!r}",
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
