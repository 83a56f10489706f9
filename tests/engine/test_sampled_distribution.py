"""Sampled tokens follow the model's distribution, and drafts do not change which they are."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from jaxinfer import LLM, SamplingParams
from tests.engine.helpers import bits
from tests.engine.numpy_sampler import softmax
from tests.engine.plain_model import plain_scores

SEEDS = 400


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.3, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    ],
    ids=["cool", "warm"],
)
def test_drafts_change_no_sampled_token(
    tiny_llm: LLM, code: list[int], params: SamplingParams
) -> None:
    drafting = [
        replace(params, seed=seed, max_tokens=12, logprobs=True, ignore_eos=True)
        for seed in range(40)
    ]
    without = [replace(one, speculation=False) for one in drafting]
    plain = tiny_llm.generate([code[100:140]] * 40, without)
    drafted = tiny_llm.generate([code[100:140]] * 40, drafting)
    assert bits(drafted) == bits(plain)
    assert sum(c.usage.drafted for c in plain) == 0
    accepted = sum(c.usage.accepted for c in drafted)
    assert 40 < accepted < sum(c.usage.drafted for c in drafted)
    assert len({c.token_ids for c in plain}) > 30


def p_value(tokens: list[int], probabilities: np.ndarray) -> float:
    """Of a chi-square test; tokens that are expected less than five times are taken together."""
    counts = Counter(tokens)
    assert all(probabilities[token] > 0 for token in counts)
    expected = probabilities * len(tokens)
    common = np.flatnonzero(expected >= 5)
    observed = [counts[int(token)] for token in common]
    wanted = [*expected[common], len(tokens) - expected[common].sum()]
    observed.append(len(tokens) - sum(observed))
    if wanted[-1] < 5:
        wanted[-2:], observed[-2:] = [sum(wanted[-2:])], [sum(observed[-2:])]
    return float(stats.chisquare(observed, wanted).pvalue)


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """Probabilities of the `k` likeliest, zero for the others."""
    return softmax(np.where(scores >= np.sort(scores)[-k], scores, -np.inf))


def test_first_and_second_tokens_are_distributed_as_the_plain_model_says(
    tiny_llm: LLM, code: list[int]
) -> None:
    # By the plain model, neither this place nor the next is nearly settled.
    prompt = code[:38]
    params = SamplingParams(temperature=1.5, top_k=8, max_tokens=2, ignore_eos=True)
    completions = tiny_llm.generate(
        [prompt] * SEEDS, [replace(params, seed=seed) for seed in range(SEEDS)]
    )
    pairs = [completion.token_ids for completion in completions]
    first = [pair[0] for pair in pairs]
    assert p_value(first, top(plain_scores(prompt)[-1] / 1.5, 8)) > 0.001
    likeliest = Counter(first).most_common(1)[0][0]
    # These were chosen where drafts were verified.
    second = [pair[1] for pair in pairs if pair[0] == likeliest]
    assert len(second) > 100
    assert sum(completion.usage.drafted for completion in completions) >= SEEDS / 2
    assert p_value(second, top(plain_scores([*prompt, likeliest])[-1] / 1.5, 8)) > 0.001


def test_the_test_of_the_distribution_can_fail(code: list[int]) -> None:
    scores = plain_scores(code[:38])[-1]
    right, wrong = top(scores / 1.5, 8), top(scores / 1.0, 8)
    tokens = np.random.default_rng(0).choice(len(scores), SEEDS, p=wrong).tolist()
    assert p_value(tokens, wrong) > 0.001 > p_value(tokens, right)
