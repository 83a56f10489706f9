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
from jaxinfer.engine.text import token_bytes
from jaxinfer.qwen.messages import (
    CallArguments,
    CallStart,
    Delta,
    MessageParser,
    TextDelta,
    join,
)
from server.errors import INTERNAL, ApiError
from server.prompt import Job
from server.responses import (
    Alternative,
    CallOut,
    ChatChunk,
    ChatCompletion,
    ChoiceOut,
    ChunkChoice,
    DeltaOut,
    FunctionOut,
    Logprobs,
    PromptDetails,
    ReplyOut,
    TokenLogprob,
    UsageOut,
)
from server.stream import DONE, event
from server.verbatim import VerbatimParser

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[tuple[int, Chunk]]
"""Pieces of several answers, each with the number of its answer."""

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
        parts: list[list[Chunk]] = [[] for _ in range(self.job.params.n)]
        async with aclosing(chunks):
            async for index, chunk in chunks:
                parts[index].append(chunk)
        answers = [Completion.join(part) for part in parts]
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        usage = _usage([answer.usage for answer in answers])
        return ChatCompletion(self.id, self.created, self.model, choices, usage)

    def _choice(self, index: int, answer: Completion) -> ChoiceOut:
        parser = self.job.parser()
        deltas = [*parser.feed(answer.text), *parser.finish()]
        message, calls = join(deltas), _calls(deltas)
        for call in calls:
            call.index = UNSET
        reply = ReplyOut(
            content=message.content or (None if calls else ""),
            reasoning_content=message.reasoning,
            tool_calls=calls or UNSET,
        )
        reason = _finish_reason(answer.finish_reason, bool(calls))
        return ChoiceOut(reply, reason, self._logprobs(answer), index)

    async def events(
        self, first: tuple[int, Chunk], rest: Chunks, include_usage: bool
    ) -> AsyncGenerator[bytes]:
        """The stream's events; an error on the way becomes the last one.

        Args:
            first: the first chunk, which the caller has awaited to learn of errors in time.
            rest: all chunks after it.
            include_usage: end with a piece that has no choice but the usage.
        """
        usage = None if include_usage else UNSET

        def shown(choice: ChunkChoice) -> bytes:
            return event(ChatChunk(self.id, self.created, self.model, [choice], usage))

        answers = [_Streamed(self.job.parser()) for _ in range(self.job.params.n)]
        async with aclosing(rest):
            try:
                for index in range(len(answers)):
                    yield shown(ChunkChoice(DeltaOut(role="assistant", content=""), index=index))
                async for index, chunk in _together(first, rest):
                    delta, reason = answers[index].take(chunk)
                    logprobs = self._logprobs(chunk)
                    if delta is not None or logprobs:
                        yield shown(ChunkChoice(delta or DeltaOut(), None, logprobs, index))
                    if reason:
                        yield shown(ChunkChoice(DeltaOut(), reason, index=index))
                if include_usage:
                    total = _usage([answer.usage for answer in answers])
                    yield event(ChatChunk(self.id, self.created, self.model, [], total))
                yield DONE
            except ApiError as error:
                yield event(error.body())
            except Exception:
                logger.exception("a stream failed")
                yield event(INTERNAL.body())

    def _logprobs(self, said: Chunk | Completion) -> Logprobs | None:
        if not said.logprobs:
            return None
        tokens = zip(said.token_ids, said.logprobs, strict=True)
        others = said.top_logprobs or [()] * len(said.token_ids)
        return Logprobs(
            [
                TokenLogprob(*self._shown(*own), [Alternative(*self._shown(*pair)) for pair in top])
                for own, top in zip(tokens, others, strict=True)
            ]
        )

    def _shown(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = token_bytes(self.tokenizer, token)
        return raw.decode(errors="replace"), max(logprob, LOWEST_LOGPROB), list(raw)


@dataclass
class _Streamed:
    """One answer on its way to the client.

    Attributes:
        parser: takes its text apart.
        usage: so far.
        called: whether a tool call has begun.
    """

    parser: MessageParser | VerbatimParser
    usage: Usage = field(default_factory=Usage)
    called: bool = False

    def take(self, chunk: Chunk) -> tuple[DeltaOut | None, str | None]:
        """What a chunk adds to the message, if anything, and why it ends, if it does."""
        reason, self.usage = chunk.finish_reason, chunk.usage
        deltas = self.parser.feed(chunk.text) + (self.parser.finish() if reason else [])
        self.called = self.called or any(isinstance(delta, CallStart) for delta in deltas)
        return _delta(deltas) if deltas else None, reason and _finish_reason(reason, self.called)


async def _together(first: tuple[int, Chunk], rest: Chunks) -> Chunks:
    yield first
    async for item in rest:
        yield item


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


def _usage(answers: Sequence[Usage]) -> UsageOut:
    """That of all answers; they have one prompt, whose tokens the first speaks of."""
    prompt, completion = answers[0].prompt_tokens, sum(a.completion_tokens for a in answers)
    cached = PromptDetails(answers[0].cached_tokens)
    return UsageOut(prompt, completion, prompt + completion, cached)
