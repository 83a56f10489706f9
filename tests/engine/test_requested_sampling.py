"""What a request says about choosing tokens, held against the plain model and a plain sampler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, Completion, SamplingParams
from tests.engine.helpers import EOS, bits
from tests.engine.numpy_sampler import final_scores
from tests.engine.plain_model import CLOSE, plain_logprobs, plain_scores

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=True, ignore_eos=True)


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Completion:
    return llm.generate([prompt], params)[0]


def spellings(llm: LLM, words: Sequence[str]) -> list[list[int]]:
    """The words as tokens, with and without a space before them."""
    texts = [text for word in words for text in (word, " " + word)]
    return [llm.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": 0.8, "max_tokens": 32},
        {"presence_penalty": 2.0, "frequency_penalty": -0.3},
        {"logit_bias": {13: 6.0, 198: -100.0, 40: 3.0}},
        {"bad_words": ("self", "return", "\n")},
        {"min_tokens": 16, "ignore_eos": False, "logit_bias": dict.fromkeys(EOS, 8.0)},
    ],
    ids=lambda asked: "-".join(asked) or "nothing",
)
def test_each_token_is_the_best_by_the_scores_that_were_asked_for(
    tiny_llm: LLM, code: list[int], asked: dict[str, Any]
) -> None:
    params = replace(GREEDY, **asked)
    prompt = code[200:240]
    tokens = answer(tiny_llm, prompt, params).token_ids
    scores = plain_scores([*prompt, *tokens])[len(prompt) - 1 :]
    stops, bad = () if params.ignore_eos else EOS, spellings(tiny_llm, params.bad_words)
    for number, token in enumerate(tokens):
        final = final_scores(scores[number], params, prompt, tokens[:number], stops=stops, bad=bad)
        assert final[token] >= final.max() - 2 * CLOSE


@pytest.mark.parametrize(
    "asked", [{"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
def test_penalties_against_repetition_make_an_answer_more_varied(
    tiny_llm: LLM, code: list[int], asked: dict[str, float]
) -> None:
    params = replace(GREEDY, max_tokens=48)
    plain = answer(tiny_llm, code[200:240], params).token_ids
    varied = answer(tiny_llm, code[200:240], replace(params, **asked)).token_ids
    assert len(set(varied)) > len(set(plain))


def test_bad_words_are_never_generated(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, top_k=20)
    seeds = [replace(params, seed=seed) for seed in range(12)]
    prompt = "class Queue:\n    def __init__(self, name):\n"
    bad = ("self", "return", "def", "None", "name")
    plain = "".join(c.text for c in tiny_llm.generate([prompt] * 12, seeds))
    assert all(word in plain for word in bad)
    clean = tiny_llm.generate([prompt] * 12, [replace(p, bad_words=bad) for p in seeds])
    for completion in clean:
        tokens = list(completion.token_ids)
        for word in spellings(tiny_llm, bad):
            assert not any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def test_only_allowed_tokens_are_generated(tiny_llm: LLM, code: list[int]) -> None:
    allowed = (5, 198, 220, 700, 4000)
    params = replace(GREEDY, allowed_token_ids=allowed)
    greedy, hot = tiny_llm.generate(
        [code[:50]] * 2, [params, replace(params, temperature=50, seed=1)]
    )
    assert {*greedy.token_ids, *hot.token_ids} <= {*allowed}
    assert len({*hot.token_ids}) > 2
    first = plain_logprobs(code[:50])[-1]
    assert greedy.token_ids[0] == max(allowed, key=lambda token: first[token])


def test_a_bias_of_a_hundred_forces_a_token_and_its_opposite_forbids_it(
    tiny_llm: LLM, code: list[int]
) -> None:
    plain = answer(tiny_llm, code[:50], replace(GREEDY, top_logprobs=2))
    assert plain.top_logprobs is not None
    first, second = (token for token, _ in plain.top_logprobs[0])
    hot = replace(GREEDY, temperature=2, seed=5)
    forced = answer(tiny_llm, code[:50], replace(hot, logit_bias={1234: 100.0}))
    assert {*forced.token_ids} == {1234}
    forbidden = answer(tiny_llm, code[:50], replace(GREEDY, logit_bias={first: -100.0}))
    assert forbidden.token_ids[0] == second
    assert first not in forbidden.token_ids


def test_top_log_probabilities_are_sorted_and_those_of_the_plain_model(
    tiny_llm: LLM, code: list[int]
) -> None:
    prompt = code[:50]
    completion = answer(tiny_llm, prompt, replace(GREEDY, top_logprobs=20))
    places = plain_logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 :]
    assert completion.logprobs is not None
    assert completion.top_logprobs is not None
    assert len(completion.top_logprobs) == 16
    rows = zip(
        completion.token_ids, completion.logprobs, completion.top_logprobs, places, strict=False
    )
    for token, logprob, top, place in rows:
        assert top[0] == (token, logprob)  # greedy: the likeliest was chosen
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert len({other for other, _ in top}) == 20
        for other, value in top:
            assert np.exp(value) == pytest.approx(np.exp(place[other]), abs=CLOSE / 2)


def test_log_probabilities_are_those_before_temperature_and_penalties(
    tiny_llm: LLM, code: list[int]
) -> None:
    params = replace(GREEDY, temperature=3.0, seed=3, top_k=50, presence_penalty=1.0)
    completion = answer(tiny_llm, code[:50], replace(params, top_logprobs=20))
    assert completion.logprobs is not None
    assert completion.top_logprobs is not None
    beyond = 0
    for token, logprob, top in zip(
        completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True
    ):
        assert dict(top).get(token, logprob) == logprob
        assert sum(np.exp(value) for _, value in top) <= 1 + 1e-5
        beyond += top[0][0] != token
    assert beyond > 4


def test_a_short_list_of_alternatives_begins_a_long_one(tiny_llm: LLM, code: list[int]) -> None:
    long = answer(tiny_llm, code[:50], replace(GREEDY, top_logprobs=20))
    short = answer(tiny_llm, code[:50], replace(GREEDY, top_logprobs=3))
    none = answer(tiny_llm, code[:50], GREEDY)
    assert long.top_logprobs is not None
    assert short.top_logprobs == tuple(top[:3] for top in long.top_logprobs)
    assert none.top_logprobs is None
    assert none.logprobs == short.logprobs == long.logprobs


def test_the_log_probabilities_of_a_prompt_are_those_of_the_plain_model(
    tiny_llm: LLM, code: list[int]
) -> None:
    prompt = code[:150]
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=2)
    scored = answer(tiny_llm, prompt, params)
    own, top = scored.prompt_logprobs, scored.prompt_top_logprobs
    assert own is not None
    assert top is not None
    assert len(own) == len(top) == 150
    assert own[0] is top[0] is None
    places = plain_logprobs(prompt)
    expected = places[np.arange(149), prompt[1:]]
    # Where two experts are all but equally likely rounding decides between them, and not alike on
    # all machines; there are places like that.
    far = np.abs(np.exp(np.array(own[1:], float)) - np.exp(expected)) > CLOSE
    assert np.mean(far) < 0.05
    assert np.mean(np.abs(np.array(own[1:], float) - expected)) < CLOSE / 2
    for place, alternatives in zip(places[:-1], top[1:], strict=True):
        assert alternatives is not None
        (first, best), (_, next_best) = alternatives
        assert best >= next_best
        assert place[first] >= place.max() - 2 * CLOSE


def test_scoring_a_prompt_is_the_same_with_a_warm_cache_and_in_company(
    tiny_llm: LLM, code: list[int]
) -> None:
    tiny_llm.engine.reset()
    scoring = replace(GREEDY, prompt_logprobs=2, max_tokens=8)
    plain = replace(GREEDY, max_tokens=8)
    cold = answer(tiny_llm, code[:150], scoring)
    warm, beside = tiny_llm.generate([code[:150]] * 2, [scoring, plain])
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.prompt_top_logprobs == cold.prompt_top_logprobs
    assert bits([warm]) == bits([cold]) == bits([beside])
    assert beside.prompt_logprobs is None
    assert (warm.usage.cached_tokens, beside.usage.cached_tokens) == (0, 128)


def test_a_prompt_of_one_token_has_nothing_to_score(tiny_llm: LLM, code: list[int]) -> None:
    scored = answer(tiny_llm, code[:1], replace(GREEDY, max_tokens=2, prompt_logprobs=2))
    assert scored.prompt_logprobs == (None,)
    assert scored.prompt_top_logprobs == (None,)
