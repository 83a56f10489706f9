"""Where an answer ends: which of the tokens that were generated belong to it, and why no more."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.text import TextStream


class Taken(NamedTuple):
    """What an answer took of the tokens it was offered.

    Attributes:
        text: what became certain with them; never has to be taken back.
        count: how many belong to the answer, from the first on.
        finish_reason: "stop" or "length" if the last of these ended the answer, else None.
        stop_reason: the stop string or the id among `stop_token_ids` that ended it, else None.
    """

    text: str
    count: int
    finish_reason: str | None
    stop_reason: str | int | None


class Answer:
    """One answer as it grows, the same however its tokens are grouped.

    A token of `stop_token_ids`, or an end token of the checkpoint unless `ignore_eos`, is the last
    token of the answer and counts as one; what it says, if anything, is text. A stop string is no
    text, nor is what follows it, but the token that completes it is counted. Both end an answer of
    `min_tokens` tokens or more: a token or string that comes before is like any other. If one token
    does several of these, the text is cut at the stop string and `stop_reason` names it; "length"
    is the reason only where nothing else is.

    Attributes:
        finished: whether it has ended.
        tokens: how many it has so far.

    Args:
        tokenizer: of a byte-level vocabulary.
        params: whose `stop`, `stop_token_ids`, `ignore_eos` and `min_tokens` count here.
        eos: the checkpoint's own end tokens.
        limit: the most tokens, at least 1, once `max_tokens` and the context are weighed.

    Raises ValueError for a limit below 1.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, eos: Collection[int], limit: int
    ) -> None:
        if limit < 1:
            raise ValueError(f"an answer has at least one token, not limit={limit}")
        self.finished, self.tokens = False, 0
        self._text = TextStream(tokenizer, params.stop)
        self._own = frozenset(params.stop_token_ids)
        self._ends = self._own if params.ignore_eos else self._own | frozenset(eos)
        self._least, self._limit = params.min_tokens, limit

    def take(self, tokens: Sequence[int]) -> Taken:
        """Take tokens one by one until one of them ends the answer; the rest is dropped.

        Raises RuntimeError if the answer has finished before.
        """
        if self.finished:
            raise RuntimeError("this answer has finished; begin another one to take more tokens")
        text, count = "", 0
        for count, token in enumerate(tokens, 1):
            piece, finish_reason, stop_reason = self._take(token)
            text += piece
            if self.finished:
                return Taken(text, count, finish_reason, stop_reason)
        return Taken(text, count, None, None)

    def _take(self, token: int) -> tuple[str, str | None, str | int | None]:
        """The text that one token settles, and the two reasons."""
        self.tokens += 1
        may_stop = self.tokens >= self._least
        ends = may_stop and token in self._ends
        full = self.tokens == self._limit
        text, stop = self._text.feed(token, last=ends or full, stops=may_stop)
        self.finished = ends or full or stop is not None
        if stop is not None:
            return text, "stop", stop
        if ends:
            return text, "stop", token if token in self._own else None
        return text, "length" if full else None, None
