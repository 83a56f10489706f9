"""The device's sampler against one written in NumPy, and its noise against statistics."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxinfer import SamplingParams
from jaxinfer.engine.sampling import Sampler, prompt_logprobs
from jaxinfer.engine.sampling_settings import LENGTH
from tests.engine.numpy_sampler import final_scores, log_softmax, scaled_survivors, softmax
from tests.engine.sampling_cases import ROOM, TOP, VOCABULARY, Case, draw, run, sampler_of

LARGE = 4096
ROWS = 4
DRAWS = 20_000

shown = jax.jit(prompt_logprobs, static_argnames=("top", "tile"))


@partial(jax.jit, static_argnums=2)
def noise_of(seed: jax.Array, index: jax.Array, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), index)
    return jax.random.gumbel(key, (size,), mode="high")


def is_highest(token: int, values: np.ndarray) -> bool:
    """Whether rounding apart it is the highest, and of equal ones the first."""
    near = values[token] >= values.max() - 1e-4 * max(1, abs(values.max()))
    return bool(near) and token == np.argmax(values == values[token])


def check_against_reference(
    case: Case, scores: np.ndarray, masks: np.ndarray | None, margin: float
) -> None:
    """Every row's choice, unless float32 may rightly fall on either side of a filter."""
    got = run(case, scores, masks)
    for t, row in enumerate(scores):
        final = final_scores(
            row,
            case.params,
            case.prompt,
            (*case.answer, *case.drafts[:t]),
            stops=case.stops,
            bad=case.bad,
            allowed=None if masks is None else set(np.flatnonzero(masks[t])),
        )
        token = int(got.tokens[0, t])
        if case.params.temperature == 0:
            assert is_highest(token, final)
            continue
        left = scaled_survivors(final, case.params, margin)
        if left is not None:
            index = len(case.prompt) + len(case.answer) + t
            noise = noise_of(jnp.uint32(case.seed), index, len(row))
            assert is_highest(token, left + np.asarray(noise, np.float64))


# Few different tokens, so that they repeat and bad words are met.
few = st.integers(0, 3) | st.integers(0, VOCABULARY - 1)
quarters = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    allowed = st.none() | st.lists(few, min_size=1, max_size=6).map(tuple)
    params = SamplingParams(
        min_tokens=draw(st.integers(0, 10)),
        temperature=draw(st.sampled_from([0.0, 0.25, 1.0, 2.0])),
        top_k=draw(st.just(0) | st.integers(1, VOCABULARY + 2)),
        top_p=draw(st.just(1.0) | st.integers(1, 99).map(lambda n: n / 100)),
        min_p=draw(st.just(0.0) | st.integers(1, 100).map(lambda n: n / 100)),
        presence_penalty=draw(quarters),
        frequency_penalty=draw(quarters),
        # Powers of two, so that float32 and float64 see the same ties.
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 2.0])),
        logit_bias=draw(st.dictionaries(few, quarters.map(lambda q: 4 * q), max_size=6)),
        allowed_token_ids=draw(allowed),
    )
    tokens = st.lists(few, max_size=ROOM).map(tuple)
    word = st.lists(few, min_size=1, max_size=4).map(tuple)
    return Case(
        params=params,
        prompt=draw(tokens.filter(bool)),
        answer=draw(tokens),
        drafts=draw(st.tuples(*[few] * (ROWS - 1))),
        stops=draw(st.lists(few, max_size=4).map(tuple)),
        bad=draw(st.lists(word, max_size=12).map(tuple)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=300)
@given(
    case=cases(),
    content=st.integers(0, 2**32),
    step=st.sampled_from([1.0, 0.5, 1e-3]),
    padding=st.sampled_from([0, 3]),
    share=st.none() | st.sampled_from([0.02, 0.1, 0.5]),
)
def test_all_parameters_at_once_choose_what_the_reference_chooses(
    case: Case, content: int, step: float, padding: int, share: float | None
) -> None:
    rng = np.random.default_rng(content)
    shape = ROWS, VOCABULARY
    # Coarse steps make ties, fine ones make close calls.
    scores = (rng.integers(-20, 21, shape) * step).astype(np.float32)
    scores[:, VOCABULARY - padding :] = -np.inf
    masks = None
    if share is not None:
        masks = rng.random(shape) < share
        masks[np.arange(ROWS), rng.integers(0, VOCABULARY - padding, ROWS)] = True
    check_against_reference(case, scores, masks, margin=1e-4)


@settings(max_examples=60)
@given(
    case=cases(),
    content=st.integers(0, 2**32),
    temperature=st.floats(0.5, 3),
    top_k=st.just(0) | st.integers(1, LARGE),
    top_p=st.just(1.0) | st.floats(0.01, 0.99),
    min_p=st.just(0.0) | st.floats(0.001, 0.5),
    penalties=st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.5, 2)),
)
def test_a_large_vocabulary_is_treated_like_a_small_one(
    case: Case,
    content: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
) -> None:
    presence, frequency, repetition = penalties
    params = replace(
        case.params,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        allowed_token_ids=None,
    )
    rng = np.random.default_rng(content)
    scores = rng.normal(0, 2, (ROWS, LARGE)).astype(np.float32)
    # Tokens that were seen are among the likeliest, or no penalty would show.
    scores[:, :4] += 8
    masks = rng.random((ROWS, LARGE)) < 0.7
    check_against_reference(replace(case, params=params), scores, masks, margin=1e-5)


def test_a_top_p_too_small_for_float32_keeps_the_likeliest() -> None:
    scores = np.random.default_rng(0).normal(size=(1, VOCABULARY)).astype(np.float32)
    assert run(Case(SamplingParams(top_p=1e-60)), scores).tokens == scores.argmax()


def many(case: Case) -> Sampler:
    """A sampler with the case in each of `DRAWS` slots."""
    return jax.tree.map(lambda a: np.repeat(np.asarray(a), DRAWS, axis=0), sampler_of(case))


@pytest.mark.parametrize("over", ["seeds", "indices"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=12),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(temperature=1.2, top_k=25, top_p=0.95, min_p=0.05),
        SamplingParams(presence_penalty=1, frequency_penalty=0.4, repetition_penalty=1.2),
        SamplingParams(logit_bias={1: 3.0, 2: -3.0, 30: 2.0}, min_tokens=6, top_k=30),
    ],
)
def test_tokens_come_as_often_as_they_should(params: SamplingParams, over: str) -> None:
    scores = np.random.default_rng(0).normal(0, 2, VOCABULARY).astype(np.float32)
    case = Case(params, (3, 9), (9, 12, 12, 35), stops=(7, 35), bad=((12, 35, 0), (5,)))
    sampler, (tokens, tail, index) = many(case), case.rows()
    index = np.repeat(index, DRAWS, axis=0)
    if over == "seeds":
        sampler = replace(sampler, seed=np.arange(DRAWS, dtype=np.uint32))
    else:
        if params.min_tokens:
            sampler = replace(sampler, earliest=sampler.earliest + DRAWS)
        index += np.arange(DRAWS)[:, None]
    raw, fed, tails = (np.repeat(a, DRAWS, axis=0) for a in (scores[None, None], tokens, tail))
    out = draw(raw, sampler, np.arange(DRAWS), fed, tails, index, None, top=0, tile=None)
    counts = np.bincount(np.ravel(out.tokens), minlength=VOCABULARY)

    final = final_scores(scores, params, case.prompt, case.answer, stops=case.stops, bad=case.bad)
    left = scaled_survivors(final, params)
    assert left is not None
    expected = DRAWS * softmax(left)
    assert (counts[expected == 0] == 0).all()
    often = expected >= 5
    pooled = [np.append(a[often], a[~often].sum() + 1e-9) for a in (counts, expected)]
    assert chisquare(*pooled).pvalue > 1e-3


@pytest.mark.parametrize("other", ["seed", "index"])
def test_another_seed_or_index_brings_other_noise(other: str) -> None:
    def tokens(seed: int, start: int) -> np.ndarray:
        rows = np.zeros((DRAWS, 1), int), np.full((DRAWS, 1, LENGTH - 1), -1)
        flat, index = np.zeros((DRAWS, 1, VOCABULARY), np.float32), np.arange(DRAWS)[:, None]
        out = draw(
            flat,
            many(Case(seed=seed)),
            np.arange(DRAWS),
            *rows,
            start + index,
            None,
            top=0,
            tile=None,
        )
        return np.asarray(out.tokens)

    second = tokens(4, 0) if other == "seed" else tokens(3, 2 * DRAWS)
    # Independent draws from 40 equally likely tokens agree one time in 40.
    assert np.mean(tokens(3, 0) == second) < 0.1


def test_temperature_zero_takes_the_likeliest_whatever_the_filters() -> None:
    scores = np.random.default_rng(0).normal(size=(1, VOCABULARY)).astype(np.float32)
    params = SamplingParams(temperature=0, top_k=5, top_p=0.1, min_p=1)
    assert run(Case(params, seed=1), scores).tokens == scores.argmax()


def test_when_bans_leave_nothing_the_weakest_give_way_first() -> None:
    scores = np.zeros((1, VOCABULARY), np.float32)
    scores[0, [5, 6, 7]] = 3, 2, 1
    greedy = SamplingParams(temperature=0, min_tokens=9)

    def token(allowed: list[int], mask: list[int]) -> int:
        case = Case(
            replace(greedy, allowed_token_ids=allowed), prompt=(1,), stops=(5,), bad=((1, 6),)
        )
        bits = np.isin(np.arange(VOCABULARY), mask)[None]
        return run(case, scores, bits).tokens.item()

    anything = list(range(VOCABULARY))
    assert token(anything, anything) == 7
    assert token([5, 6], anything) == 5
    assert token([5, 6, 7], [6]) == 6
    assert token([5], [6, 7]) == 6


def test_ids_that_only_pad_the_vocabulary_are_never_chosen() -> None:
    scores = np.zeros((1, VOCABULARY), np.float32)
    scores[0, 30:] = -np.inf
    for allowed in ([35], [29, 35]):
        params = SamplingParams(logit_bias={35: 100}, allowed_token_ids=allowed, temperature=100)
        tokens = [run(Case(params, seed=seed), scores).tokens.item() for seed in range(20)]
        assert max(tokens) < 30


@given(content=st.integers(0, 2**32), step=st.sampled_from([1.0, 1e-3]), alive=st.integers(1, 40))
def test_the_likeliest_are_those_that_come_first_in_a_sort(
    content: int, step: float, alive: int
) -> None:
    rng = np.random.default_rng(content)
    scores = (rng.integers(-20, 21, (ROWS, VOCABULARY)) * step).astype(np.float32)
    scores[:, alive:] = -np.inf
    following = rng.integers(0, VOCABULARY, (1, ROWS))
    expected = log_softmax(scores)
    first = np.argsort(-scores, axis=-1, kind="stable")[:, :TOP]
    logprobs, tokens, top = shown(scores[None], following, top=TOP, tile=8)
    np.testing.assert_array_equal(tokens[0], first)
    np.testing.assert_allclose(top[0], np.take_along_axis(expected, first, -1), atol=1e-5)
    own = expected[np.arange(ROWS), following[0]]
    np.testing.assert_allclose(logprobs[0], own, atol=1e-5)


def test_log_probabilities_are_those_of_the_raw_scores() -> None:
    rng = np.random.default_rng(3)
    scores = rng.normal(0, 2, (ROWS, VOCABULARY)).astype(np.float32)
    params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2, presence_penalty=1)
    case = Case(params, answer=(6,), drafts=(5, 5, 5), bad=((int(scores[0].argmax()),),))
    got = run(case, scores)
    same = shown(scores[None], got.tokens, top=TOP, tile=8)
    for mine, expected in zip(got[1:], same, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert got.top_tokens[0, 0, 0] == scores[0].argmax() != got.tokens[0, 0]
    empty = shown(scores[None], got.tokens, top=0, tile=8)
    np.testing.assert_array_equal(empty[0], got.logprobs)
    assert empty[1].shape == empty[2].shape == (1, ROWS, 0)
