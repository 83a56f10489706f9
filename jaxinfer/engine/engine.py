"""Requests in, tokens out: compiled calls one after another, each read while the next one runs."""

import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import batched, count, product
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from checkpoints import OnProgress
from jaxinfer.engine.answer import Answer
from jaxinfer.engine.calls import Calls
from jaxinfer.engine.draft_length import DraftLength
from jaxinfer.engine.grammar import Constraint, Grammars
from jaxinfer.engine.layout import lay_out_pieces, lay_out_rows
from jaxinfer.engine.options import Options
from jaxinfer.engine.pool import Pool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.request import TOP_LOGPROBS, Chunk, RequestError, SamplingParams, Usage
from jaxinfer.engine.running import Request, settings_of
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Phase, Piece, Schedule
from jaxinfer.engine.sequence import Sequence as Scheduled
from jaxinfer.engine.slots import Plan, init_slots
from jaxinfer.engine.stats import Counters, EngineStats
from jaxinfer.engine.steps import Committed, Prefilled, claim
from jaxinfer.engine.swap import restore, save
from jaxinfer.engine.transfer import put
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Rows

Given = list[tuple[Request, Chunk]]


class _Prefill(NamedTuple):
    """A prefill call whose result has not been read."""

    pieces: list[Piece]
    out: Prefilled


class _Decode(NamedTuple):
    """A decode call whose result has not been read.

    Attributes:
        requests: a row each.
        skipped: were planned and left out.
        drafts: that were verified, at most.
        out: its result.
        typical: nothing but decoding was done, and nothing compiled.
    """

    requests: list[Request]
    skipped: list[Request]
    drafts: int
    out: Committed
    typical: bool


_Call = _Prefill | _Decode

CLAIMS = 8
"""Requests that are given slots by one call, if there are several: the host takes as long for one,
and all of a batch's first tokens wait for it."""


class Engine:
    """Serves requests from pools of fixed size.

    A call is dispatched before the results of the one before are read, so that the device need not
    wait for the host. Not safe to use from several threads; see `AsyncLLM` for that.

    Attributes:
        plan: what is static about the steps.
        options: sizes and budgets.
    """

    def __init__(
        self,
        params: Params,
        plan: Plan,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        options: Options,
        calls: Calls | None = None,
    ) -> None:
        self.plan, self.options = plan, options
        self._params, self._tokenizer, self._eos = params, tokenizer, tuple(eos)
        self._calls = calls or Calls(plan)
        self._device = jax.devices()[0]
        self._words = -(-plan.cfg.vocab_size // 32)
        self._grammars: Grammars | None = None
        self._counters = Counters()
        self._drafts = DraftLength(options.lengths)
        self._start()

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises RequestError if it can never be served."""
        vocabulary, context = self.plan.cfg.vocab_size, self.options.context
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        if (bad := min(prompt)) < 0 or (bad := max(prompt)) >= vocabulary:
            raise RequestError(f"token id {bad} is not in the vocabulary of {vocabulary}")
        if params.n != 1:
            raise RequestError("n must be 1 here: submit one request for each answer")
        size = len(prompt)
        if size >= context:
            raise RequestError(
                f"the prompt has {size} tokens and the context holds {context}, one of "
                "them for the answer: shorten the prompt or load the model with a larger context"
            )
        limit = min(context - size, params.max_tokens or context)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        self._settings(params, seed, size)  # whatever is wrong with them is found here
        sequence = Scheduled(
            prompt=tuple(prompt),
            limit=size + limit,
            salt=params.cache_salt,
            cached=params.prefix_cache,
            reuse=params.prompt_logprobs is None,
            boundaries=tuple(i for i, t in enumerate(prompt) if t == self.options.turn),
        )
        answer = Answer(self._tokenizer, params, self._eos, limit)
        constraint = self._constrain(params)
        request = Request(params, seed, sequence, answer, constraint, Usage(prompt_tokens=size))
        self._scheduler.add(sequence)
        self._requests[sequence] = request
        self._counters.submitted += 1
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request at whatever stage it is."""
        if not request.ended:
            self._counters.cancelled += 1
            self._end(request)

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return self._scheduler.busy

    def stats(self) -> EngineStats:
        """What has been done so far, and what is in use now."""
        scheduler, cache = self._scheduler, self._cache
        return EngineStats(
            counters=replace(self._counters),
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            slots=self.options.slots,
            pages=self._pages.size,
            free_pages=self._pages.free,
            cached_pages=cache.cached if cache else 0,
            snapshots=self.options.snapshots,
            held_snapshots=cache.held if cache else 0,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.hit_tokens,
            evicted_pages=cache.evictions if cache else 0,
        )

    def step(self) -> Given:
        """Dispatch the next calls, and return what those before have brought.

        If that fails or is interrupted, all requests are lost and the engine is reset.
        """
        try:
            return self._step()
        except BaseException:
            # The slots may have been donated to a step that never returned them.
            self.reset()
            raise

    def warm_up(self, progress: OnProgress | None = None) -> None:
        """Compile and run all calls that requests without constraints need, on nobody's behalf.

        What structured output and likeliest tokens need is compiled when it is first asked for.

        Args:
            progress: called with the calls that are done and all of them.
        """
        options = self.options
        decodes = list(product(options.batches, options.lengths))
        total, done = len(options.piece_sizes) + len(decodes), count(1)

        def tell(out: Any) -> None:
            jax.block_until_ready(out)
            number = next(done)
            if progress is not None:
                progress(number, total)

        prompt = np.zeros(options.context + self.plan.rows, np.int32)
        nobody = np.int32(options.slots), prompt, np.int32(1), np.int32(1), np.bool_(False)
        for number in (1, CLAIMS):
            values = *nobody, self._settings(SamplingParams(), 0, 1)[0]
            self._claim_slots([values] * number)
        for size in options.piece_sizes:
            pieces, tokens, following = self._put(lay_out_pieces([], options, size))
            self._slots, out = self._calls.prefill(
                self._params,
                self._slots,
                pieces,
                tokens,
                following,
                self._first_masks([], size),
                top=0,
                prompt_logprobs=False,
            )
            tell(out)
        for batch, drafts in decodes:
            rows = self._put(lay_out_rows([], options, batch))
            static = {"drafts": drafts, "steps": options.steps, "top": 0}
            self._slots, out = self._calls.decode(self._params, self._slots, rows, **static)
            tell(out)

    def reset(self) -> None:
        """Forget all requests and everything cached."""
        for request in self._requests.values():
            request.ended = True
        del self._slots  # before new ones take as much memory
        self._start()

    def _start(self) -> None:
        options = self.options
        pools = 1 + options.pages, options.snapshots, options.kv_dtype
        slots = init_slots(self.plan, options.slots, options.context, *pools)
        # Committed to the device from the start, as the results of the calls are.
        self._slots = jax.device_put(slots, self._device)
        self._pages = Pool(options.pages, first=1)
        self._cache = None
        if options.prefix_cache:
            entries = Pool(options.snapshots, first=options.slots + 1)
            sizes = options.page_bytes, options.snapshot_bytes
            self._cache = PrefixCache(self._pages, entries, *sizes, options.cache_bytes)
        self._scheduler = Scheduler(
            options.slots, self._pages, self._cache, options.snapshot_interval, options.width
        )
        self._requests: dict[Scheduled, Request] = {}
        # What has been dispatched together stands together.
        self._flight: deque[deque[_Call]] = deque()
        self._rows: tuple[tuple, Rows] | None = None
        self._allowed: dict[int, jax.Array] = {}
        self._ended_at: float | None = None

    def _constrain(self, params: SamplingParams) -> Constraint | None:
        if params.structured is None:
            return None
        if self._grammars is None:
            vocabulary = self.plan.cfg.vocab_size
            self._grammars = Grammars(self._tokenizer, vocabulary, self._eos)
        return self._grammars.compile(params.structured)

    def _settings(self, params: SamplingParams, seed: int, prompt_tokens: int):
        vocabulary = self.plan.cfg.vocab_size
        return settings_of(params, seed, prompt_tokens, self._eos, self._tokenizer, vocabulary)

    def _put(self, values: Any) -> Any:
        return put(values, self._device)

    # --- one step ---------------------------------------------------------------------------------

    def _step(self) -> Given:
        given: Given = []
        if any(self._requests[s].constraint for s in self._scheduler.running):
            # What a grammar allows next depends on the tokens in flight.
            given += self._collect()
        # One call at a time, so that a first token does not wait for the decode call behind it.
        dispatched = len(self._flight) < 2 and self._dispatch(given)
        if len(self._flight) > 1 or (self._flight and not dispatched):
            given += self._read_oldest()
        return given

    def _dispatch(self, given: Given) -> bool:
        """Dispatch what comes next, if anything does; adds to `given` what had to be read first."""
        drafts = self._drafts.best()
        schedule = self._schedule(drafts)
        if schedule.victims:
            # What is in flight may end some requests, and must be known of those that go.
            given += self._collect()
            schedule = self._schedule(drafts)
            for victim in schedule.victims:
                self._preempt(self._requests[victim])
            if schedule.victims:
                schedule = self._schedule(drafts)
        self._claim([self._requests[sequence] for sequence in schedule.admitted])
        for sequence in schedule.resumed:
            self._resume(self._requests[sequence])
        calls: deque[_Call] = deque()
        if schedule.pieces:
            calls.append(self._prefill(schedule.pieces))
        if schedule.decode:
            calls.append(self._decode(schedule, drafts))
        if calls:
            self._flight.append(calls)
        return bool(calls)

    def _schedule(self, drafts: int) -> Schedule:
        options = self.options
        # Those who decode wait for a prefill call; where nobody does, it may be a longer one.
        decoding = any(s.phase is Phase.DECODE for s in self._scheduler.running)
        budget = options.prefill_budget if decoding else options.prefill_tokens
        reach = options.steps * (1 + drafts)
        if any(request.constraint for request in self._requests.values()):
            reach = max(reach, self.plan.rows)
        return self._scheduler.plan(budget, reach)

    def _claim(self, requests: list[Request]) -> None:
        plain = []
        for request in requests:
            request.usage = replace(request.usage, cached_tokens=request.sequence.hit)
            request.prompt_scores.clear()
            values, bias = self._slot_values(request)
            if bias is None:
                plain.append(values)
            else:
                self._claim_slots([values], bias)
        for some in batched(plain, CLAIMS):
            # Filled up with the last one again: there are calls for one request and for `CLAIMS`.
            self._claim_slots([*some, *some[-1:] * (CLAIMS - len(some) if len(some) > 1 else 0)])

    def _slot_values(self, request: Request) -> tuple[tuple[Any, ...], np.ndarray | None]:
        """What `claim` takes for a request, and the bias."""
        sequence, size = request.sequence, len(request.sequence.prompt)
        prompt = np.zeros(self.options.context + self.plan.rows, np.int32)
        prompt[:size] = sequence.prompt
        settings, bias = self._settings(request.params, request.seed, size)
        numbers = (np.int32(size), np.int32(sequence.limit), np.bool_(request.params.speculation))
        assert sequence.slot is not None
        return (np.int32(sequence.slot), prompt, *numbers, settings), bias

    def _claim_slots(self, values: list[tuple[Any, ...]], bias: np.ndarray | None = None) -> None:
        together = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
        self._slots = claim(self._slots, *self._put((*together, bias)))

    def _preempt(self, request: Request) -> None:
        sequence = request.sequence
        if sequence.phase is Phase.DECODE:
            assert sequence.slot is not None
            request.saved = save(self._slots, sequence.slot, sequence.pages)
        self._scheduler.preempt(sequence)

    def _resume(self, request: Request) -> None:
        sequence, saved = request.sequence, request.saved
        assert saved is not None
        assert sequence.slot is not None
        self._slots = restore(self._slots, sequence.slot, sequence.pages, saved)
        request.saved = None

    def _end(self, request: Request) -> None:
        request.ended, request.saved = True, None
        self._scheduler.end(request.sequence)
        del self._requests[request.sequence]

    # --- dispatching ------------------------------------------------------------------------------

    def _prefill(self, pieces: list[Piece]) -> _Prefill:
        laid_out, tokens, following = self._put(lay_out_pieces(pieces, self.options))
        masks = self._first_masks(pieces, len(following))
        asked = [self._requests[piece.sequence] for piece in pieces]
        self._slots, out = self._calls.prefill(
            self._params,
            self._slots,
            laid_out,
            tokens,
            following,
            masks,
            top=TOP_LOGPROBS if any(r.wants_top for r in asked) else 0,
            prompt_logprobs=any(r.params.prompt_logprobs is not None for r in asked),
        )
        self._counters.prefill_calls += 1
        self._counters.prefilled_tokens += sum(piece.valid for piece in pieces)
        return _Prefill(pieces, _on_its_way(out))

    def _first_masks(self, pieces: list[Piece], size: int) -> jax.Array:
        """What the first tokens of answers may be, `[size, words]`."""
        if size not in self._allowed:
            everything = np.full((size, self._words), 0xFFFFFFFF, np.uint32)
            self._allowed[size] = self._put(everything)
        firsts = [(row, self._requests[p.sequence]) for row, p in enumerate(pieces) if p.last]
        constrained = [(row, request) for row, request in firsts if request.constraint]
        if not constrained:
            return self._allowed[size]
        masks = np.full((size, self._words), 0xFFFFFFFF, np.uint32)
        for row, request in constrained:
            masks[row] = request.masks([], self._words)[0]
        return self._put(masks)

    def _decode(self, schedule: Schedule, drafts: int) -> _Decode:
        requests = [self._requests[s] for s in schedule.decode]
        fresh = {piece.sequence for piece in schedule.pieces if piece.last}
        # The first token of a constrained answer must be read before the next can be constrained.
        skipped = [r for r in requests if r.constraint and r.sequence in fresh]
        requests = [r for r in requests if r not in skipped]
        constrained = any(r.constraint for r in requests)
        rows = self._rows_of(requests)
        top = TOP_LOGPROBS if any(r.wants_top for r in requests) else 0
        made, counters = self._calls.made, self._counters
        if constrained:
            drafts, out = self._decode_constrained(requests, rows, top)
        else:
            counters.late_calls += bool(self._flight) and _is_ready(self._flight[-1][-1])
            static = {"drafts": drafts, "steps": self.options.steps, "top": top}
            self._slots, out = self._calls.decode(self._params, self._slots, rows, **static)
        counters.decode_calls += 1
        counters.decode_steps += 1 if constrained else self.options.steps
        typical = not (schedule.pieces or constrained) and self._calls.made == made
        return _Decode(requests, skipped, drafts, _on_its_way(out), typical)

    def _decode_constrained(
        self, requests: list[Request], rows: Rows, top: int
    ) -> tuple[int, Committed]:
        """One step; the masks are made while the model runs."""
        bound = [r.propose(self.plan.rows) if r.constraint else None for r in requests]
        free = self.plan.drafts if None in bound else 0
        longest = max([free, *(len(tokens) for tokens in bound if tokens is not None)])
        drafts = next(n for n in self.options.verify_lengths if n >= longest)
        size = rows.slot.shape[0]
        # -1: those that the device has made.
        tokens, numbers = np.zeros((size, drafts), np.int32), np.full(size, -1, np.int32)
        for row, mine in enumerate(bound):
            if mine is not None:
                tokens[row, : len(mine)], numbers[row] = mine, len(mine)
        given = self._put((tokens, numbers))
        self._slots, verified = self._calls.verify(
            self._params, self._slots, rows, given, drafts=drafts
        )
        masks = np.full((size, 1 + drafts, self._words), 0xFFFFFFFF, np.uint32)
        for row, mine in enumerate(bound):
            if mine is not None:
                masks[row, : 1 + len(mine)] = requests[row].masks(mine, self._words)
        self._slots, out = self._calls.commit(
            self._params, self._slots, rows, verified, self._put(masks), top=top
        )
        return drafts, out

    def _rows_of(self, requests: list[Request]) -> Rows:
        """Slots and pages of a decode call; what is on the device already is not sent again."""
        sequences = [request.sequence for request in requests]
        marks = tuple((s.number, s.slot, len(s.pages)) for s in sequences)
        marks = (*marks, self._scheduler.preemptions)
        if self._rows is None or self._rows[0] != marks:
            self._rows = (marks, self._put(lay_out_rows(sequences, self.options)))
        return self._rows[1]

    # --- reading ----------------------------------------------------------------------------------

    def _collect(self) -> Given:
        """Read all that is in flight."""
        given: Given = []
        while self._flight:
            given += self._read_oldest()
        return given

    def _read_oldest(self) -> Given:
        call = self._flight[0].popleft()
        if not self._flight[0]:
            self._flight.popleft()
        return self._read_prefill(call) if isinstance(call, _Prefill) else self._read(call)

    def _read_prefill(self, call: _Prefill) -> Given:
        out = jax.device_get(call.out)
        given: Given = []
        for row, piece in enumerate(call.pieces):
            request = self._requests.get(piece.sequence)
            if request is None:
                continue
            if request.params.prompt_logprobs is not None:
                request.prompt_scores.append(tuple(a[row, : piece.valid] for a in out.prompt))
            if piece.last:
                one = slice(row, row + 1)
                self._scheduler.commit(piece.sequence, 1)
                given.append(self._give(request, jax.tree.map(lambda a, s=one: a[s], out[:4])))
        return given

    def _read(self, call: _Decode) -> Given:
        waited = not _is_ready(call)
        out = jax.device_get(call.out)
        self._time(call, waited)
        given: Given = []
        for row, request in enumerate(call.requests):
            if request.ended:
                continue
            counts, T = out.count[:, row], out.tokens.shape[-1]
            new = np.arange(T) < counts[:, None]
            tokens = [a[:, row][new] for a in out[:4]]
            self._count_drafts(request, call.drafts, counts, out.drafted[:, row])
            request.proposed = out.drafts[-1, row, : out.proposed[-1, row]].tolist()
            self._scheduler.commit(request.sequence, len(tokens[0]))
            if len(tokens[0]):
                given.append(self._give(request, tokens))
        for request in call.skipped:
            self._scheduler.commit(request.sequence, 0)
        return given

    def _give(self, request: Request, new: Sequence[np.ndarray]) -> tuple[Request, Chunk]:
        """A request's new tokens, their log probabilities, and the likeliest and theirs."""
        tokens, logprobs, *top = new
        chunk = request.take(tokens.tolist(), logprobs.tolist(), *top)
        self._counters.generated_tokens += len(chunk.token_ids)
        if chunk.finish_reason:
            self._counters.finished += 1
            self._end(request)
        return request, chunk

    def _time(self, call: _Decode, waited: bool) -> None:
        """Learn what a step costs from two calls in a row that ended while they were awaited."""
        now = time.perf_counter()
        if waited and call.typical and self._ended_at is not None:
            seconds = (now - self._ended_at) / self.options.steps
            self._drafts.measured(call.drafts, seconds)
        self._ended_at = now if waited else None

    def _count_drafts(
        self, request: Request, drafts: int, counts: np.ndarray, drafted: np.ndarray
    ) -> None:
        ran = counts > 0
        offered, held = drafted[ran], np.minimum(counts[ran] - 1, drafted[ran])
        usage, counters = request.usage, self._counters
        request.usage = replace(
            usage,
            drafted=usage.drafted + int(offered.sum()),
            accepted=usage.accepted + int(held.sum()),
        )
        counters.drafted += int(offered.sum())
        counters.accepted += int(held.sum())
        counters.sequence_steps += int(ran.sum())
        if request.params.speculation and request.constraint is None:
            for accepted, offer in zip(held.tolist(), offered.tolist(), strict=True):
                self._drafts.observe(accepted, offer, drafts)


def _is_ready(call: _Call) -> bool:
    """Whether the device is done with a call."""
    leaves: list[Any] = jax.tree.leaves(call.out)
    return leaves[0].is_ready()


def _on_its_way(out: Any) -> Any:
    """Start copying results to the host, so that reading them does not wait for the next call."""
    for leaf in jax.tree.leaves(out):
        leaf.copy_to_host_async()
    return out
