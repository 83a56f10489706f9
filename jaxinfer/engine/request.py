"""What a user asks of the engine, and what comes back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOP_LOGPROBS = 20
"""The most alternatives whose log probabilities a request may ask for."""


class RequestError(ValueError):
    """A request that cannot be served; the message names what is wrong and the remedy."""


@dataclass(frozen=True)
class StructuredOutput:
    """What the text of an answer must conform to; give exactly one of the first five.

    Attributes:
        json_schema: the text is JSON that conforms to this schema (a JSON string; a mapping is
            turned into one).
        json_object: the text is a JSON object.
        regex: the text matches this regular expression as a whole.
        lark: the text is derived from this grammar, in llguidance's dialect of Lark.
        choice: the text is one of these strings.
        after: the constraint begins after this special token, `"</think>"` for one that holds for
            the answer and not for the thoughts before it; None for from the start.

    Raises ValueError if not exactly one constraint is given.
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    lark: str | None = None
    choice: tuple[str, ...] = ()
    after: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(dict(self.json_schema)))
        object.__setattr__(self, "choice", _strings(self.choice))
        names = ("json_schema", "json_object", "regex", "lark", "choice")
        given = [name for name in names if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            raise ValueError(
                f"structured output takes exactly one of {', '.join(names)}; "
                f"{' and '.join(given) or 'none'} given"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    A token's score is the model's logit, with penalties, then `logit_bias`, then what is not
    allowed taken out; then it is divided by the temperature, and top-k, top-p and min-p apply in
    this order.

    Attributes:
        max_tokens: the most tokens to generate; None for as many as the context allows.
        min_tokens: a stop string or token ends only an answer of at least so many tokens, itself
            included.
        n: answers to each prompt; the `i`-th is what `seed + i` gives alone.
        temperature: 0 is greedy.
        top_k: sample among the `k` likeliest; 0 for all.
        top_p: sample among the likeliest that together have this probability.
        min_p: drop tokens less likely than this fraction of the likeliest.
        presence_penalty: subtracted from the scores of tokens that were generated before.
        frequency_penalty: subtracted as often as they were generated.
        repetition_penalty: divides positive, multiplies negative scores of tokens that were
            generated before or stand in the prompt.
        logit_bias: added to the scores of these token ids.
        bad_words: strings that are not generated, with or without a space before them.
        allowed_token_ids: the only tokens to choose from; None for all.
        seed: the same seed and prompt give the same output; None draws one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end generation, besides the checkpoint's own.
        ignore_eos: go on past the checkpoint's own end tokens.
        logprobs: return the natural log probability of each token, before everything above.
        top_logprobs: with `logprobs`, also that of so many likeliest tokens at each place.
        prompt_logprobs: None, or return the log probability of each token of the prompt given those
            before it, and of so many likeliest ones.
        structured: what the text must conform to.
        speculation: False decodes this request without drafts.
        prefix_cache: False neither uses nor leaves anything in the prefix cache.
        cache_salt: requests share cached prefixes only with those of the same salt.

    Raises ValueError that names the field and its range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    speculation: bool = True
    prefix_cache: bool = True
    cache_salt: str = ""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(getattr(self, name)))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        biases = dict(self.logit_bias)
        object.__setattr__(self, "logit_bias", tuple(biases.items()))
        shown, top = self.prompt_logprobs, TOP_LOGPROBS
        checks = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("n", 1 <= self.n <= 128, "from 1 to 128"),
            ("temperature", 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 10, "above 0 and at most 10"),
            (
                "logit_bias",
                all(-100 <= bias <= 100 for bias in biases.values()),
                "from -100 to 100",
            ),
            ("bad_words", all(self.bad_words), "strings that are not empty"),
            ("allowed_token_ids", self.allowed_token_ids != (), "None, or at least one id"),
            ("seed", self.seed is None or 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("top_logprobs", 0 <= self.top_logprobs <= top, f"from 0 to {top}"),
            ("prompt_logprobs", shown is None or 0 <= shown <= top, f"None, or from 0 to {top}"),
        )
        for name, good, expected in checks:
            if not good:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)!r}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=True")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, not {self.min_tokens}")
        if self.structured and self.ignore_eos:
            raise ValueError("ignore_eos cannot go with structured output, which has an end")


def _strings(given: str | Iterable[str]) -> tuple[str, ...]:
    """One string given bare is that string, not its letters."""
    return (given,) if isinstance(given, str) else tuple(given)


Alternatives = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place, likeliest first, with their log probabilities."""


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated.
        drafted: tokens that speculation proposed.
        accepted: those of them that the model agreed with.
        cached_tokens: tokens of the prompt that the prefix cache had.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0 when none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        text: new text; may be empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        logprobs: one number a new token, if asked for.
        top_logprobs: the likeliest tokens at the place of each new token, if asked for.
        prompt_logprobs: in the first chunk, if asked for: one number a token of the prompt, None
            for the first, which has nothing before it.
        prompt_top_logprobs: the likeliest tokens at those places, None for the first.
        finish_reason: None until the last chunk; then "stop" or "length".
        stop_reason: the stop string or the id of the token that ended it, else None.
        usage: of the request up to here.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    usage: Usage
    top_logprobs: tuple[Alternatives, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[Alternatives | None, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request; see `Chunk` for the fields."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    usage: Usage
    top_logprobs: tuple[Alternatives, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[Alternatives | None, ...] | None = None
    stop_reason: str | int | None = None

    @classmethod
    def join(cls, chunks: Sequence[Chunk]) -> "Completion":
        """The completion that a whole stream adds up to."""
        first, last = chunks[0], chunks[-1]
        if last.finish_reason is None:
            raise ValueError("the stream has not finished")
        logprobs = top = None
        if last.logprobs is not None:
            logprobs = tuple(p for c in chunks for p in c.logprobs or ())
        if last.top_logprobs is not None:
            top = tuple(a for c in chunks for a in c.top_logprobs or ())
        return cls(
            text="".join(c.text for c in chunks),
            token_ids=tuple(t for c in chunks for t in c.token_ids),
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            usage=last.usage,
            top_logprobs=top,
            prompt_logprobs=first.prompt_logprobs,
            prompt_top_logprobs=first.prompt_top_logprobs,
            stop_reason=last.stop_reason,
        )
