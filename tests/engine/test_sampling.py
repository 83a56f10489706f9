"""The device's sampler against one written in NumPy, and its noise against statistics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxinfer.engine.sampling import Sampler, keep, sample

VOCABULARY = 40
DRAWS = 20_000

kept = jax.jit(keep)
draw = jax.jit(partial(sample, tile=None))
draw_in_tiles = jax.jit(partial(sample, tile=8))


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max())
    return e / e.sum()


def survivors(
    scores: np.ndarray, top_k: int, top_p: float, min_p: float, margin: float = 0.0
) -> np.ndarray | None:
    """Sort, cut at k, cut at mass p; what ties with the last one stays. None if within a margin."""
    scores = scores.astype(np.float64)
    ranked = np.sort(scores)[::-1]
    least = ranked[min(top_k or ranked.size, ranked.size) - 1]
    if top_p < 1:
        mass = np.cumsum(softmax(np.where(scores >= least, scores, -np.inf))[np.argsort(-scores)])
        if np.any(np.abs(mass - top_p) < margin):
            return None
        least = max(least, ranked[np.argmax(mass >= top_p)])
    relative = np.exp(scores - scores.max())
    if np.any(np.abs(relative - min_p) < margin * (relative < 1)):
        return None
    return (scores >= least) & (relative >= min_p)


def sampler(
    count: int = 1,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Sampler:
    """The same parameters for `count` sequences, with seeds that count up."""
    return Sampler(
        temperature=jnp.full(count, temperature, jnp.float32),
        top_k=jnp.full(count, top_k, jnp.int32),
        top_p=jnp.full(count, top_p, jnp.float32),
        min_p=jnp.full(count, min_p, jnp.float32),
        seed=jnp.uint32(seed) + jnp.arange(count, dtype=jnp.uint32),
    )


@pytest.fixture
def scores() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 2, VOCABULARY).astype(np.float32)


# Coarse steps make ties, fine ones make close calls.
logits = st.sampled_from([1.0, 0.5, 1e-3]).flatmap(
    lambda step: st.lists(
        st.integers(-20, 20).map(lambda n: n * step), min_size=VOCABULARY, max_size=VOCABULARY
    )
)


@given(
    logits=logits,
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.just(1.0) | st.integers(1, 99).map(lambda n: n / 100),
    min_p=st.just(0.0) | st.integers(1, 100).map(lambda n: n / 100),
)
def test_filters_keep_what_a_sort_would_keep(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    scores = np.array(logits, np.float32)
    # Where a cumulative probability all but equals the limit, float32 may fall on either side.
    expected = survivors(scores, top_k, top_p, min_p, margin=1e-5)
    assume(expected is not None)
    got = kept(scores, jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))
    np.testing.assert_array_equal(got, expected)


def test_scores_that_tie_with_the_last_survivor_survive() -> None:
    scores = np.array([3, 1, 2, 2, 2, 0], np.float32)
    assert kept(scores, 2, 1.0, 0.0).tolist() == [True, False, True, True, True, False]
    assert kept(scores, 0, 0.7, 0.0).tolist() == [True, False, True, True, True, False]
    assert kept(scores, 1, 1.0, 0.0).tolist() == [True, False, False, False, False, False]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept(scores, 0, 0.6, 0.0).tolist() == [True, True, False, False]
    assert kept(scores, 2, 0.55, 0.0).tolist() == [True, False, False, False]


def test_no_filter_keeps_everything_even_at_a_probability_of_zero() -> None:
    scores = np.array([100.0, 0.0, -100.0, -np.inf], np.float32)
    assert kept(scores, 0, 1.0, 0.0).all()


def test_temperature_zero_takes_the_likeliest_whatever_the_filters(scores: np.ndarray) -> None:
    batch = jnp.broadcast_to(scores, (3, 2, VOCABULARY))
    tokens, _ = draw(batch, sampler(3, temperature=0.0, top_k=5, seed=1), jnp.ones((3, 2), int))
    assert (tokens == scores.argmax()).all()


def test_logprobs_are_those_of_the_raw_scores(scores: np.ndarray) -> None:
    batch = jnp.broadcast_to(scores, (64, 1, VOCABULARY))
    tokens, logprobs = draw(batch, sampler(64, temperature=0.5, top_k=7), jnp.ones((64, 1), int))
    expected = np.log(softmax(scores.astype(np.float64)))[tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (2.0, 0, 0.9, 0.0),
        (1.3, 12, 1.0, 0.0),
        (1.0, 20, 0.8, 0.0),
        (1.5, 0, 1.0, 0.2),
        (1.2, 25, 0.95, 0.05),
    ],
)
@pytest.mark.parametrize("over", ["seeds", "indices"])
def test_tokens_come_as_often_as_they_should(
    scores: np.ndarray, over: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    shape = (DRAWS, 1) if over == "seeds" else (1, DRAWS)
    index = jnp.full(shape, 17) if over == "seeds" else jnp.arange(DRAWS)[None]
    parameters = sampler(
        shape[0], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11
    )
    tokens, _ = draw(jnp.broadcast_to(scores, (*shape, VOCABULARY)), parameters, index)
    counts = np.bincount(np.ravel(tokens), minlength=VOCABULARY)

    scaled = scores.astype(np.float64) / temperature
    alive = survivors(scaled, top_k, top_p, min_p)
    assert alive is not None
    assert (counts[~alive] == 0).all()
    expected = DRAWS * softmax(np.where(alive, scaled, -np.inf))
    often = expected >= 5
    pooled = [np.append(a[often], a[~often].sum() + 1e-9) for a in (counts, expected)]
    assert chisquare(*pooled).pvalue > 1e-3


def test_a_token_depends_on_seed_and_index_not_on_place_or_neighbours() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(4, 3, VOCABULARY)).astype(np.float32)
    index = rng.integers(0, 1000, (4, 3))
    parameters = sampler(4, temperature=1.5, top_k=30, top_p=0.95, min_p=0.01, seed=5)
    tokens, logprobs = draw_in_tiles(scores, parameters, index)
    for b in range(4):
        own = jax.tree.map(lambda a, b=b: a[b : b + 1], parameters)
        for t in range(3):
            alone = draw_in_tiles(scores[b, t][None, None], own, index[b, t][None, None])
            assert (alone[0].item(), alone[1].item()) == (tokens[b, t], logprobs[b, t])


@pytest.mark.parametrize("other", ["seed", "index"])
def test_another_seed_or_index_brings_other_noise(other: str) -> None:
    flat = jnp.zeros((1, 400, VOCABULARY))
    index = jnp.arange(400)[None]
    first, _ = draw(flat, sampler(seed=3), index)
    if other == "seed":
        second, _ = draw(flat, sampler(seed=4), index)
    else:
        second, _ = draw(flat, sampler(seed=3), index + 1000)
    # Independent draws from 40 equally likely tokens agree one time in 40.
    assert np.mean(np.asarray(first == second)) < 0.1
