"""From the engine's chunks to OpenAI's responses, whole or streamed."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET
from tokenizers import Tokenizer

from jaxinfer.engine import Chunk, Completion, Usage
from jaxinfer.qwen.messages import CallArguments, CallStart, Delta, TextDelta, join
from server.errors import INTERNAL
from server.prompt import Job
from server.schemas import (
    CallOut,
    ChatChunk,
    ChatCompletion,
    ChoiceOut,
    ChunkChoice,
    DeltaOut,
    FunctionOut,
    Logprobs,
    ReplyOut,
    TokenLogprob,
    UsageOut,
)
from server.stream import DONE, event
from server.tokens import token_bytes

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[Chunk]

LOWEST_LOGPROB = -9999.0
"""What OpenAI writes for a token of no probability, since JSON has no infinity."""


@dataclass(frozen=True)
class Replier:
    """Writes the response to one request.

    Attributes:
        job: the request.
        model: its name, as the client knows it.
        tokenizer: the model's.
    """

    job: Job
    model: str
    tokenizer: Tokenizer
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, chunks: Chunks) -> ChatCompletion:
        """One response, when all is there."""
        async with aclosing(chunks):
            completion = Completion.join([chunk async for chunk in chunks])
        parser = self.job.parser()
        deltas = [*parser.feed(completion.text), *parser.finish()]
        message, calls = join(deltas), _calls(deltas)
        for call in calls:
            call.index = UNSET
        reply = ReplyOut(
            content=message.content or (None if calls else ""),
            reasoning_content=message.reasoning,
            tool_calls=calls or UNSET,
        )
        choice = ChoiceOut(
            reply,
            _finish_reason(completion.finish_reason, bool(calls)),
            self._logprobs(completion.token_ids, completion.logprobs),
        )
        return ChatCompletion(self.id, self.created, self.model, [choice], _usage(completion.usage))

    async def events(
        self, first: Chunk, rest: Chunks, include_usage: bool
    ) -> AsyncGenerator[bytes]:
        """The stream's events; an error on the way becomes the last one.

        Args:
            first: the first chunk, which the caller has awaited to learn of errors in time.
            rest: all chunks after it.
            include_usage: end with a piece that has no choice but the usage.
        """
        usage = first.usage
        async with aclosing(rest):
            try:
                yield self._event(
                    ChunkChoice(DeltaOut(role="assistant", content="")), include_usage
                )
                parser, called = self.job.parser(), False
                async for chunk in _together(first, rest):
                    usage, reason = chunk.usage, chunk.finish_reason
                    deltas = parser.feed(chunk.text) + (parser.finish() if reason else [])
                    called = called or any(isinstance(delta, CallStart) for delta in deltas)
                    logprobs = self._logprobs(chunk.token_ids, chunk.logprobs)
                    if deltas or logprobs:
                        piece = ChunkChoice(_delta(deltas), logprobs=logprobs)
                        yield self._event(piece, include_usage)
                    if reason:
                        end = ChunkChoice(DeltaOut(), _finish_reason(reason, called))
                        yield self._event(end, include_usage)
                if include_usage:
                    yield event(ChatChunk(self.id, self.created, self.model, [], _usage(usage)))
                yield DONE
            except Exception:
                logger.exception("a stream failed")
                yield event(INTERNAL.body())

    def _event(self, choice: ChunkChoice, include_usage: bool) -> bytes:
        usage = None if include_usage else UNSET
        return event(ChatChunk(self.id, self.created, self.model, [choice], usage))

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None
    ) -> Logprobs | None:
        if not logprobs:
            return None
        content = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            raw = token_bytes(self.tokenizer, token_id)
            shown = raw.decode(errors="replace")
            content.append(TokenLogprob(shown, max(logprob, LOWEST_LOGPROB), list(raw)))
        return Logprobs(content)


async def _together(first: Chunk, rest: Chunks) -> AsyncGenerator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk


def _delta(deltas: Iterable[Delta]) -> DeltaOut:
    """Several deltas as one."""
    deltas = list(deltas)
    texts = {"reasoning": "", "content": ""}
    for delta in deltas:
        if isinstance(delta, TextDelta):
            texts[delta.kind] += delta.text
    return DeltaOut(
        reasoning_content=texts["reasoning"] or UNSET,
        content=texts["content"] or UNSET,
        tool_calls=_calls(deltas) or UNSET,
    )


def _calls(deltas: Iterable[Delta]) -> list[CallOut]:
    """The calls, or the pieces of calls, that the deltas add up to."""
    calls: dict[int, CallOut] = {}
    for delta in deltas:
        match delta:
            case CallStart(index, name):
                new_id = f"call_{secrets.token_hex(12)}"
                calls[index] = CallOut(FunctionOut(name), index, new_id, "function")
            case CallArguments(index, fragment):
                call = calls.setdefault(index, CallOut(FunctionOut(), index))
                call.function.arguments += fragment
            case _:
                pass
    return list(calls.values())


def _finish_reason(reason: str, called: bool) -> str:
    """A stop after a call is "tool_calls"; a call that was cut off is not one to be made."""
    return "tool_calls" if called and reason == "stop" else reason


def _usage(usage: Usage) -> UsageOut:
    return UsageOut(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
