"""What `SamplingParams` promises, in NumPy: whole sequences, float64, sorts."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer import SamplingParams


def final_scores(
    scores: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    stops: Sequence[int] = (),
    bad: Sequence[Sequence[int]] = (),
    allowed: Collection[int] | None = None,
) -> np.ndarray:
    """Scores `[V]` of the token after prompt and answer; minus infinity where not allowed."""
    known, size = [*prompt, *answer], len(scores)
    penalised = scores.astype(np.float64)
    for token in set(known):
        if penalised[token] > 0:
            penalised[token] /= params.repetition_penalty
        else:
            penalised[token] *= params.repetition_penalty
    for token, times in Counter(answer).items():
        penalised[token] -= params.presence_penalty + params.frequency_penalty * times

    biased = penalised.copy()
    for token, value in dict(params.logit_bias).items():
        biased[token] += value
    for token in range(size):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            biased[token] = -np.inf
    strict = biased.copy()
    for word in map(list, bad):
        if len(word) == 1:
            biased[word[0]] = strict[word[0]] = -np.inf
        elif known[-(len(word) - 1) :] == word[:-1]:
            strict[word[-1]] = -np.inf
    if len(answer) + 1 < params.min_tokens:
        strict[list(stops)] = -np.inf

    masked = np.array([allowed is not None and token not in allowed for token in range(size)])
    for attempt in (strict, biased, penalised):
        attempt[masked] = -np.inf
        if attempt.max() > -np.inf:
            return attempt
    return penalised


def survivors(
    scores: np.ndarray, top_k: int, top_p: float, min_p: float, margin: float = 0.0
) -> np.ndarray | None:
    """Sort, cut at k, cut at mass p; what ties with the last one stays. None if within a margin."""
    scores = scores.astype(np.float64)
    ranked = np.sort(scores)[::-1]
    k = min(top_k or ranked.size, ranked.size)
    least = ranked[k - 1]
    if k < ranked.size and ranked[k] < least < ranked[k] + margin:
        return None
    if top_p < 1:
        mass = np.cumsum(softmax(np.where(scores >= least, scores, -np.inf))[np.argsort(-scores)])
        if np.any(np.abs(mass - top_p) < margin):
            return None
        least = max(least, ranked[np.argmax(mass >= top_p)])
    relative = np.exp(scores - scores.max())
    if np.any(np.abs(relative - min_p) < margin * (relative < 1)):
        return None
    return (scores >= least) & (relative >= min_p)


def scaled_survivors(
    scores: np.ndarray, params: SamplingParams, margin: float = 0.0
) -> np.ndarray | None:
    """Final scores `[V]` over the temperature, minus infinity where filtered; None: close call."""
    scaled = scores / params.temperature
    alive = survivors(scaled, params.top_k, params.top_p, params.min_p, margin)
    return None if alive is None else np.where(alive, scaled, -np.inf)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities `[V]`."""
    e = np.exp(scores - scores.max())
    return e / e.sum()


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Natural log probabilities along the last axis."""
    shifted = scores.astype(np.float64) - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
