"""What the device must know of a request to sample for it, checked and laid out on the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.request import RequestError, SamplingParams

STOPS = 16
"""Ids that the device knows to end a request."""
WORDS = 32
"""Bad words of several tokens that a request may have."""
LENGTH = 8
"""The most tokens of a bad word."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Settings:
    """How one request samples; see `SamplingParams`. Scalars but for `stops` and `bad`.

    Attributes:
        temperature: float32.
        top_k: int32.
        top_p: float32.
        min_p: float32.
        seed: uint32.
        presence: float32.
        frequency: float32.
        repetition: float32.
        stops: `[STOPS]` int32, ids that end generation; -1 pads.
        earliest: int32, the index in the sequence from which on one of them may be chosen: that of
            the last of `min_tokens` tokens.
        bad: `[WORDS, LENGTH]` int32, token sequences that must not be completed, right-aligned;
            -1 pads, and a row of nothing else is no word.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    stops: jax.Array
    earliest: jax.Array
    bad: jax.Array


def settings(
    params: SamplingParams,
    *,
    seed: int,
    prompt_tokens: int,
    stops: Sequence[int],
    bad: Sequence[Sequence[int]],
    vocabulary: int,
) -> tuple[Settings, np.ndarray | None]:
    """What `set_slots` takes for a request, as NumPy arrays.

    Args:
        params: the request's; its `seed`, `stop_token_ids` and `bad_words` are not read.
        seed: of the noise.
        prompt_tokens: length of the prompt.
        stops: ids that end generation. Only the first `STOPS` are known to the device.
        bad: the bad words as token sequences.
        vocabulary: number of logits.

    Returns:
        The settings, and the bias `[vocabulary]` float32 or None if it is zero everywhere.

    Raises:
        RequestError: names the field with an id outside the vocabulary, or with more or longer bad
            words than fit.
    """
    _check_ids("stop_token_ids", stops, vocabulary)
    _check_ids("bad_words", (token for word in bad for token in word), vocabulary)
    _check_ids("logit_bias", dict(params.logit_bias), vocabulary)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocabulary)
    singles = [word[0] for word in bad if len(word) == 1]
    words = sorted({tuple(word) for word in bad if len(word) > 1})
    if len(words) > WORDS:
        raise RequestError(
            f"bad_words make {len(words)} sequences of several tokens; give fewer, at most {WORDS}"
        )
    latest = np.iinfo(np.int32).max
    values: dict[str, Any] = {
        "temperature": np.float32(params.temperature),
        "top_k": np.int32(min(params.top_k, vocabulary)),
        # A limit that rounds to zero would keep nothing.
        "top_p": np.maximum(np.float32(params.top_p), np.finfo(np.float32).tiny),
        "min_p": np.float32(params.min_p),
        "seed": np.uint32(seed),
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "repetition": np.float32(params.repetition_penalty),
        "stops": np.full(STOPS, -1, np.int32),
        "earliest": np.int32(min(prompt_tokens + params.min_tokens - 1, latest)),
        "bad": np.full((WORDS, LENGTH), -1, np.int32),
    }
    known = list(dict.fromkeys(stops))[:STOPS]
    values["stops"][: len(known)] = known
    for row, word in zip(values["bad"], words, strict=False):
        if len(word) > LENGTH:
            raise RequestError(
                f"bad_words has a word of {len(word)} tokens; shorten it to at most {LENGTH}"
            )
        row[-len(word) :] = word
    return Settings(**values), _bias(params, singles, vocabulary)


def _check_ids(field: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise RequestError(f"{field}: {token} is no token id; give 0 to {vocabulary - 1}")


def _bias(params: SamplingParams, singles: Sequence[int], vocabulary: int) -> np.ndarray | None:
    if not (params.logit_bias or params.allowed_token_ids or singles):
        return None
    bias = np.zeros(vocabulary, np.float32)
    for token, value in dict(params.logit_bias).items():
        bias[token] = value
    if params.allowed_token_ids is not None:
        others = np.ones(vocabulary, bool)
        others[list(params.allowed_token_ids)] = False
        bias[others] = -np.inf
    bias[list(singles)] = -np.inf
    return bias
