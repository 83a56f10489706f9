"""Structured output: which tokens an answer may have at each place.

What is allowed at a place is a function of the answer's tokens before it alone, so speculation
cannot change an answer. Where the grammar leaves one way to go on, the tokens of that way, spelt
as the tokenizer would, are all that is allowed: they can be verified as drafts, several in one
step, and choosing them one by one gives the same.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from llguidance import (
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    regex_to_lark,
)
from tokenizers import Tokenizer

from jaxinfer.engine.request import RequestError, StructuredOutput
from jaxinfer.engine.vocabulary import Vocabulary

CACHED = 32
"""The most compiled grammars that are kept for requests to come."""
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""How much a grammar may ask for before it is an error; a state of a lexer takes 1 to 2 kB."""


class GrammarError(RuntimeError):
    """A constraint that cannot go on; the answer it holds for must end with this error."""


class Constraint:
    """What one answer may still become; made by `Grammars.compile`."""

    def __init__(self, grammar: "_Grammar", vocabulary: Vocabulary, after: int | None) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._matcher = grammar.matcher()
        self._consumed: list[int] = []
        self._awaited = after
        self._forced: list[int] = []
        self._ended = False
        if after is None:
            self._persist(self._force)

    @property
    def ended(self) -> bool:
        """Whether an end token was chosen; nothing follows it."""
        return self._ended

    def propose(self, drafts: Sequence[int], rows: int) -> list[int]:
        """The tokens to verify in the next step; the state stays as it is.

        Args:
            drafts: tokens that are proposed to come next.
            rows: the most places that the step can choose a token for, at least 1.

        Returns:
            Fewer than `rows` tokens: those that the grammar forces, and the proposed ones that it
            allows as long as all before them were as proposed; none is an end token.
        """
        start, taken = self._place(), []
        try:
            while len(taken) + 1 < rows and (token := self._draft(drafts, taken)) is not None:
                self._take(token)
                taken.append(token)
        except GrammarError:
            # The answer's only if it comes this way; then it is met again.
            pass
        finally:
            self._return(*start)
        return taken

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """What may be chosen after the first 0, 1 … D of these drafts; the state stays as it is.

        Args:
            drafts: `D` tokens from `propose`.

        Returns:
            `[1 + D, W]` uint32: token `i` is allowed if bit `i % 32` of word `i // 32` is set.

        Raises:
            GrammarError: nothing can follow what was committed, though it is not complete.
        """
        start = self._place()
        masks = [self._persist(self._mask)]
        try:
            for token in drafts:
                self._persist(partial(self._take, token))
                masks.append(self._persist(self._mask))
        except GrammarError:
            # A dead end: if the drafts that lead there hold, the next step meets it.
            masks += [self._vocabulary.all] * (1 + len(drafts) - len(masks))
        finally:
            self._return(*start)
        return np.stack(masks)

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens.

        Raises:
            GrammarError: a token is not allowed at its place; the state is undefined then.
        """
        for token in tokens:
            if self._ended:
                raise GrammarError(f"token {token} comes after the end of the answer")
            if token in self._vocabulary.eos:
                if not _allows(self._persist(self._mask), token):
                    raise GrammarError(f"end token {token} comes before the text is complete")
                self._ended = True
            else:
                self._persist(partial(self._take, token))

    def _draft(self, drafts: Sequence[int], taken: list[int]) -> int | None:
        """The token to verify behind those taken."""
        if self._forced:
            return self._forced[0]
        if len(taken) >= len(drafts) or taken != list(drafts[: len(taken)]):
            return None
        token = drafts[len(taken)]
        # An end token is chosen from the last mask just as well.
        if self._ended or token in self._vocabulary.eos:
            return None
        free = self._awaited is not None
        return token if free or self._matcher.validate_tokens([token]) else None

    def _mask(self) -> np.ndarray:
        """`[W]`, what may come next."""
        if self._ended:
            return self._vocabulary.ends
        if self._awaited is not None:
            return self._vocabulary.all
        if self._forced:
            return self._vocabulary.only(self._forced[:1])
        mask = np.empty(self._vocabulary.words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(self._matcher)
        return mask

    def _take(self, token: int) -> None:
        """Move on by a token that is no end token."""
        if self._awaited is not None:
            if token != self._awaited:
                return
            self._awaited = None
        else:
            if self._forced[:1] not in ([], [token]):
                raise GrammarError(f"token {token} comes where {self._forced[0]} must")
            if not self._matcher.consume_token(token):
                raise GrammarError(f"token {token} is not allowed: {_error(self._matcher)}")
            self._consumed.append(token)
            self._forced = self._forced[1:]
        self._force()

    def _force(self) -> None:
        """Find the tokens that must come next, unless some are left of those found before.

        Asked again in the middle, the tokenizer might spell the rest another way.
        """
        if not self._forced:
            self._forced = self._matcher.compute_ff_tokens()
            _check(self._matcher)

    def _place(self) -> tuple[int, int | None, list[int]]:
        return len(self._consumed), self._awaited, self._forced

    def _return(self, count: int, awaited: int | None, forced: list[int]) -> None:
        """Go back to a place."""
        steps = len(self._consumed) - count
        del self._consumed[count:]
        self._awaited, self._forced = awaited, forced
        if self._matcher.is_error():  # for good
            self._grammar.renew()
            self._matcher = self._grammar.matcher(self._consumed)
        else:
            self._matcher.rollback(steps)

    def _persist[T](self, act: Callable[[], T]) -> T:
        """Try again if it fails: it may be others that brought the common lexer to its limit."""
        start = self._place()
        try:
            return act()
        except GrammarError:
            self._return(*start)
            return act()


class Grammars:
    """Compiles constraints for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: Sequence[int]) -> None:
        """Prepare for a model.

        Args:
            tokenizer: a byte-level BPE.
            vocabulary: the model's logits at a place; masks have `W = ceil(vocabulary / 32)` words.
            eos: tokens that end an answer.

        Raises:
            ValueError: the tokenizer is of another kind or larger than the vocabulary, or `eos` is
                empty.
        """
        self._vocabulary = Vocabulary(tokenizer, vocabulary, eos)
        wrapped = TokenizerWrapper(self._vocabulary)
        self._tokenizer = LLTokenizer(wrapped, n_vocab=vocabulary, eos_token=list(eos))
        self._grammar = lru_cache(CACHED)(partial(_Grammar, self._tokenizer))

    def compile(self, spec: StructuredOutput) -> Constraint:
        """A constraint for an answer that is about to begin.

        JSON is without white space between its tokens, unless the schema asks for it by
        `"x-guidance": {"whitespace_flexible": true}`. In a regex `\\d` is an ASCII digit. A control
        token can be part of an answer only where a Lark grammar names it.

        Raises:
            RequestError: the constraint cannot be held, or not as a whole; the message says why.
        """
        after = None
        if spec.after is not None:
            after = self._vocabulary.special.get(spec.after)
            if after is None or after in self._vocabulary.eos:
                raise RequestError(
                    f"structured output cannot begin after {spec.after!r}; name a special token "
                    "that does not end the answer, such as '</think>'"
                )
        name, grammar_from, source = _source(spec)
        try:
            return Constraint(self._grammar(grammar_from(source)), self._vocabulary, after)
        except (GrammarError, ValueError) as error:
            raise RequestError(f"structured output cannot follow this {name}: {error}") from None


class _Grammar:
    """A compiled grammar. Its matchers share a lexer, which is slow only on what is new to it."""

    def __init__(self, tokenizer: LLTokenizer, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self.renew()

    def renew(self) -> None:
        """Begin with a new lexer."""
        fresh = LLMatcher(self._tokenizer, self._text, log_level=0, limits=LIMITS)
        _check(fresh)
        # Whether any text can begin is known only then.
        fresh.compute_bitmask()
        _check(fresh)
        self._fresh = fresh

    def matcher(self, tokens: Sequence[int] = ()) -> LLMatcher:
        """A matcher that has consumed these tokens."""
        matcher = self._fresh.deep_copy()
        matcher.consume_tokens(list(tokens))
        return matcher


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def _check(matcher: LLMatcher) -> None:
    """Raise where a matcher that is lost would only allow the end."""
    if matcher.is_stopped() and not matcher.is_accepting():
        error = _error(matcher)
        dead_end = error in ("", "NoExtensionBias")
        raise GrammarError("nothing that conforms can follow" if dead_end else error)


def _error(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("\n<non-verbose/>")


def _source(spec: StructuredOutput) -> tuple[str, Callable[[Any], str], Any]:
    """What a constraint is called, what makes llguidance's grammar of it, and of what."""
    if spec.json_schema is not None:
        return "json_schema", _json_grammar, spec.json_schema
    if spec.json_object:
        return "json_object", _json_grammar, {"type": "object"}
    if spec.lark is not None:
        return "lark", LLMatcher.grammar_from_lark, spec.lark
    if spec.regex is not None:
        return "regex", _regex_grammar, spec.regex
    ways = ("".join(f"\\u{{{ord(c):x}}}" for c in text) for text in spec.choice)
    return "choice", _regex_grammar, f"(?:{'|'.join(ways)})"


def _regex_grammar(regex: str) -> str:
    ascii_digits = regex_to_lark(regex, "d")
    return LLMatcher.grammar_from_lark(f"start: /{ascii_digits}/")


def _json_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": False}, overrides={"lenient": False}
    )
