"""Requests in, tokens out: which slot serves whom, and when a request has ended."""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxinfer.engine.request import Chunk, RequestError, SamplingParams, Usage
from jaxinfer.engine.sampling import Sampler
from jaxinfer.engine.steps import (
    Plan,
    Slots,
    claim,
    decode_step,
    init_slots,
    prefill_step,
    release,
)
from jaxinfer.engine.text import TextStream
from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.params import Params


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    Attributes:
        prompt: token ids.
        params: what the user asked for.
        limit: the most tokens to generate, once `max_tokens` and the context are weighed.
        text: its decoder.
        usage: counted so far.
        done: tokens of the prompt that have been prefilled.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    text: TextStream
    usage: Usage
    done: int = 0
    ended: bool = field(default=False)


class Engine:
    """Serves requests from a fixed number of slots, one compiled step after another.

    Not safe to use from several threads; see `AsyncLLM` for that.
    """

    def __init__(
        self,
        params: Params,
        plan: Plan,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        batch: int,
        context: int,
    ) -> None:
        self.plan, self.context = plan, context
        self._params, self._tokenizer, self._eos = params, tokenizer, frozenset(eos)
        self._slots = self._empty_slots(batch)
        self._running: list[Request | None] = [None] * batch
        self._waiting: deque[Request] = deque()

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises RequestError if it can never be served."""
        vocabulary = self.plan.cfg.vocab_size
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        if bad := [t for t in prompt if not 0 <= t < vocabulary]:
            raise RequestError(f"token id {bad[0]} is not in the vocabulary of {vocabulary}")
        room = self.context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context}, one of "
                "them for the answer: shorten the prompt or load the model with a larger context"
            )
        request = Request(
            prompt=tuple(prompt),
            params=params,
            limit=min(room, params.max_tokens or room),
            text=TextStream(self._tokenizer, params.stop),
            usage=Usage(prompt_tokens=len(prompt)),
        )
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request at whatever stage it is."""
        request.ended = True
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._running:
            self._free(self._running.index(request))

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._waiting) or any(self._running)

    def step(self) -> list[tuple[Request, Chunk]]:
        """Prefill one chunk if a prompt waits for it, else decode; returns what is new.

        If that fails or is interrupted, all requests are lost and the engine is reset.
        """
        try:
            self._admit()
            for slot, request in enumerate(self._running):
                if request and request.done < len(request.prompt):
                    return self._prefill(slot, request)
            return self._decode() if any(self._running) else []
        except BaseException:
            # The slots may have been donated to a step that never returned them.
            self.reset()
            raise

    def reset(self) -> None:
        """Forget all requests."""
        for request in (*self._waiting, *self._running):
            if request:
                request.ended = True
        self._waiting.clear()
        self._running = [None] * len(self._running)
        del self._slots  # before new ones take as much memory
        self._slots = self._empty_slots(len(self._running))

    def _empty_slots(self, batch: int) -> Slots:
        # Committed to the device from the start: parameters that are (restored by Orbax) make the
        # results so, and the next step would be compiled once more.
        return jax.device_put(init_slots(self.plan, batch, self.context), jax.devices()[0])

    def _admit(self) -> None:
        for slot, request in enumerate(self._running):
            if request is None and self._waiting:
                request = self._waiting.popleft()
                self._running[slot] = request
                self._slots = claim(self._slots, jnp.int32(slot), _sampler(request.params))

    def _prefill(self, slot: int, request: Request) -> list[tuple[Request, Chunk]]:
        piece = request.prompt[request.done : request.done + CHUNK]
        request.done += len(piece)
        last = request.done == len(request.prompt)
        tokens = np.zeros(CHUNK, np.int32)
        tokens[: len(piece)] = piece
        self._slots, token, logprob = prefill_step(
            self._params,
            self.plan,
            self._slots,
            jnp.int32(slot),
            jnp.asarray(tokens),
            jnp.int32(len(piece)),
            jnp.int32(-1 if last else request.prompt[request.done]),
        )
        return [self._commit(slot, request, [int(token)], [float(logprob)], 0)] if last else []

    def _decode(self) -> list[tuple[Request, Chunk]]:
        self._slots, committed = decode_step(self._params, self.plan, self._slots)
        committed = jax.device_get(committed)
        out = []
        for slot, request in enumerate(self._running):
            if request is None:
                continue
            count = int(committed.count[slot])
            tokens, logprobs = committed.tokens[slot, :count], committed.logprobs[slot, :count]
            drafted = int(committed.drafted[slot])
            out.append(self._commit(slot, request, tokens.tolist(), logprobs.tolist(), drafted))
        return out

    def _commit(
        self, slot: int, request: Request, tokens: list[int], logprobs: list[float], drafted: int
    ) -> tuple[Request, Chunk]:
        """Take tokens one by one until one of them ends the request."""
        text, reason, taken = "", None, 0
        for token in tokens:
            taken += 1
            piece, stopped = request.text.feed(token)
            text += piece
            reason = self._reason(request, token, stopped, request.usage.completion_tokens + taken)
            if reason:
                text += "" if stopped else request.text.finish()
                break
        usage = request.usage
        request.usage = replace(
            usage,
            completion_tokens=usage.completion_tokens + taken,
            drafted=usage.drafted + drafted,
            accepted=usage.accepted + (len(tokens) - 1 if drafted else 0),
        )
        if reason:
            request.ended = True
            self._free(slot)
        kept = tuple(logprobs[:taken]) if request.params.logprobs else None
        return request, Chunk(text, tuple(tokens[:taken]), kept, reason, request.usage)

    def _reason(self, request: Request, token: int, stopped: bool, count: int) -> str | None:
        params = request.params
        ends = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        if stopped or ends:
            return "stop"
        return "length" if count >= request.limit else None

    def _free(self, slot: int) -> None:
        self._running[slot] = None
        self._slots = release(self._slots, jnp.int32(slot))


def _sampler(params: SamplingParams) -> Sampler:
    seed = secrets.randbits(32) if params.seed is None else params.seed
    return Sampler(
        temperature=jnp.float32(params.temperature),
        top_k=jnp.int32(params.top_k),
        top_p=jnp.float32(params.top_p),
        min_p=jnp.float32(params.min_p),
        seed=jnp.uint32(seed),
    )
