"""What a user asks of the engine, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass


class RequestError(ValueError):
    """A request that cannot be served; the message names what is wrong and the remedy."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Attributes:
        max_tokens: the most tokens to generate; None for as many as the context allows.
        temperature: 0 is greedy.
        top_k: sample among the `k` likeliest; 0 for all.
        top_p: sample among the likeliest that together have this probability.
        min_p: drop tokens less likely than this fraction of the likeliest.
        seed: the same seed and prompt give the same output; None draws one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end generation, besides the checkpoint's own.
        ignore_eos: go on past the checkpoint's own end tokens.
        logprobs: return the natural log probability of each token, before temperature and filters.

    Raises ValueError that names the field and its range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        checks = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
            ("stop", all(self.stop), "strings that are not empty"),
        )
        for name, good, expected in checks:
            if not good:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated.
        drafted: tokens that speculation proposed.
        accepted: those of them that the model agreed with.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

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
        finish_reason: None until the last chunk; then "stop" or "length".
        usage: of the request up to here.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    usage: Usage


@dataclass(frozen=True)
class Completion:
    """A finished request; see `Chunk` for the fields."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    usage: Usage

    @classmethod
    def join(cls, chunks: Sequence[Chunk]) -> "Completion":
        """The completion that a whole stream adds up to."""
        last = chunks[-1]
        if last.finish_reason is None:
            raise ValueError("the stream has not finished")
        logprobs = None
        if last.logprobs is not None:
            logprobs = tuple(p for c in chunks for p in c.logprobs or ())
        return cls(
            text="".join(c.text for c in chunks),
            token_ids=tuple(t for c in chunks for t in c.token_ids),
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            usage=last.usage,
        )
