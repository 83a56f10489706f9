"""One request on its way through the engine: what it has so far, and what it is told next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tokenizers import Tokenizer

from jaxinfer.engine.answer import Answer
from jaxinfer.engine.grammar import Constraint, GrammarError
from jaxinfer.engine.request import Alternatives, Chunk, SamplingParams, Usage
from jaxinfer.engine.sampling_settings import Settings, settings
from jaxinfer.engine.sequence import Sequence as Scheduled
from jaxinfer.engine.swap import Saved


@dataclass(eq=False)
class Request:
    """One prompt and its answer.

    Attributes:
        params: what the user asked for.
        seed: of its noise.
        sequence: how the scheduler sees it.
        answer: what of it is there.
        constraint: what its text must conform to, or None.
        usage: counted so far.
        ended: finished or cancelled.
        saved: its state while it is preempted.
        proposed: drafts that the device has made for its next step, as far as they are known.
        prompt_scores: for each piece of its prompt, what is told of the prompt's tokens.
        failure: why its constraint cannot go on, or None.
    """

    params: SamplingParams
    seed: int
    sequence: Scheduled
    answer: Answer
    constraint: Constraint | None
    usage: Usage
    ended: bool = False
    saved: Saved | None = None
    proposed: list[int] = field(default_factory=list)
    prompt_scores: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    failure: str | None = None

    @property
    def wants_top(self) -> bool:
        """Whether likeliest tokens are to be told."""
        return bool(self.params.top_logprobs or self.params.prompt_logprobs)

    def propose(self, rows: int) -> list[int]:
        """The tokens to verify in the next step of at most so many rows."""
        assert self.constraint is not None
        try:
            return self.constraint.propose(self.proposed, rows)
        except GrammarError as error:
            self.failure = str(error)
            return []

    def masks(self, drafts: Sequence[int], words: int) -> np.ndarray:
        """What may be chosen before, between and after these drafts, `[1 + D, words]`."""
        assert self.constraint is not None
        try:
            return self.constraint.masks(drafts)
        except GrammarError as error:
            self.failure = str(error)
            return np.full((1 + len(drafts), words), 0xFFFFFFFF, np.uint32)

    def take(
        self,
        tokens: list[int],
        logprobs: list[float],
        top_tokens: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> Chunk:
        """Add new tokens, up to the one that ends the answer.

        Args:
            tokens: `n` of them.
            logprobs: one each.
            top_tokens: `[n, top]`, the likeliest at each place.
            top_logprobs: the same of their log probabilities.
        """
        first = self.answer.tokens == 0
        if self.failure is None and self.constraint is not None:
            try:
                self.constraint.advance(tokens)
            except GrammarError as error:
                self.failure = str(error)
        if self.failure is not None:
            return Chunk("", (), None, "error", self.usage, stop_reason=self.failure)
        taken = self.answer.take(tokens)
        done = self.usage.completion_tokens + taken.count
        self.usage = replace(self.usage, completion_tokens=done)
        likeliest = None
        if count := self.params.top_logprobs:
            pairs = zip(top_tokens[: taken.count], top_logprobs[: taken.count], strict=True)
            likeliest = tuple(_alternatives(*pair, count) for pair in pairs)
        own, alternatives = self._prompt_logprobs() if first else (None, None)
        return Chunk(
            text=taken.text,
            token_ids=tuple(tokens[: taken.count]),
            logprobs=tuple(logprobs[: taken.count]) if self.params.logprobs else None,
            finish_reason=taken.finish_reason,
            usage=self.usage,
            top_logprobs=likeliest,
            prompt_logprobs=own,
            prompt_top_logprobs=alternatives,
            stop_reason=taken.stop_reason,
        )

    def _prompt_logprobs(
        self,
    ) -> tuple[tuple[float | None, ...] | None, tuple[Alternatives | None, ...] | None]:
        asked = self.params.prompt_logprobs
        if asked is None:
            return None, None
        parts = zip(*self.prompt_scores, strict=True)
        # The last row speaks of the first token of the answer.
        own, tokens, logprobs = (np.concatenate(part)[:-1] for part in parts)
        if not asked:
            return (None, *own.tolist()), None
        pairs = zip(tokens, logprobs, strict=True)
        return (None, *own.tolist()), (None, *(_alternatives(*pair, asked) for pair in pairs))


def settings_of(
    params: SamplingParams,
    seed: int,
    prompt_tokens: int,
    eos: Sequence[int],
    tokenizer: Tokenizer,
    vocabulary: int,
) -> tuple[Settings, np.ndarray | None]:
    """What the device must know of a request, see `settings`. Raises RequestError."""
    # A word is spelt by other tokens where a space comes before it.
    words = sorted({w for word in params.bad_words for w in (word, " " + word.lstrip())})
    return settings(
        params,
        seed=seed,
        prompt_tokens=prompt_tokens,
        stops=params.stop_token_ids + (() if params.ignore_eos else tuple(eos)),
        bad=[tokenizer.encode(word, add_special_tokens=False).ids for word in words],
        vocabulary=vocabulary,
    )


def _alternatives(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> Alternatives:
    return tuple(zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True))
