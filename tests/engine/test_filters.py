import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.filters import keep, penalise, restrict
from tests.engine.numpy_sampler import survivors
from tests.engine.sampling_cases import VOCABULARY

kept = jax.jit(keep)


@given(
    content=st.integers(0, 2**32),
    step=st.sampled_from([1.0, 0.5, 1e-3]),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.just(1.0) | st.integers(1, 99).map(lambda n: n / 100),
    min_p=st.just(0.0) | st.integers(1, 100).map(lambda n: n / 100),
)
def test_filters_keep_what_a_sort_would_keep(
    content: int, step: float, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(content)
    scores = (rng.integers(-20, 21, VOCABULARY) * step).astype(np.float32)
    expected = survivors(scores, top_k, top_p, min_p, margin=1e-5)
    got = kept(scores, jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))
    if expected is not None:
        np.testing.assert_array_equal(got, expected)


def test_scores_that_tie_with_the_last_survivor_survive() -> None:
    scores = np.array([3, 1, 2, 2, 2, 0], np.float32)
    assert kept(scores, 2, 1.0, 0.0).tolist() == [True, False, True, True, True, False]
    assert kept(scores, 0, 0.7, 0.0).tolist() == [True, False, True, True, True, False]
    assert kept(scores, 1, 1.0, 0.0).tolist() == [True, False, False, False, False, False]
    zeros = np.array([-0.0, 0.0, -1, -2, -0.0, -3], np.float32)
    assert kept(zeros, 1, 1.0, 0.0).tolist() == [True, True, False, False, True, False]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept(scores, 0, 0.6, 0.0).tolist() == [True, True, False, False]
    assert kept(scores, 2, 0.55, 0.0).tolist() == [True, False, False, False]


def test_no_filter_keeps_everything_even_at_a_probability_of_zero() -> None:
    scores = np.array([100.0, 0.0, -100.0, -np.inf], np.float32)
    assert kept(scores, 0, 1.0, 0.0).all()


def test_neutral_parameters_leave_every_bit() -> None:
    rng = np.random.default_rng(2)
    scores = rng.normal(0, 5, VOCABULARY).astype(np.float32)
    scores[-3:] = -np.inf
    counts, prompted = rng.integers(0, 5, VOCABULARY), rng.random(VOCABULARY) < 0.5
    neutral = jnp.float32(0), jnp.float32(0), jnp.float32(1)
    got = jax.jit(penalise)(scores, counts, prompted, *neutral)
    everything, nothing = np.ones(VOCABULARY, bool), np.zeros(VOCABULARY, bool)
    got = restrict(got, np.zeros(VOCABULARY, np.float32), everything, nothing)
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), scores.view(np.int32))
