from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.request import RequestError
from jaxinfer.engine.sampling import count, set_slots
from jaxinfer.engine.sampling_settings import LENGTH, STOPS, WORDS, settings
from tests.engine.sampling_cases import VOCABULARY, Case, sampler_of


def test_a_slot_is_set_and_counted_without_touching_the_others() -> None:
    params = SamplingParams(top_k=3, min_tokens=4, frequency_penalty=1)
    case = Case(params, prompt=(3, 4, 5), answer=(4, 4), stops=(0, 1), bad=((1,), (2, 3)), seed=7)
    before = sampler_of(case, slots=3, slot=1)
    assert before.counts[1].tolist() == [0, 0, 0, 0, 2] + [0] * (VOCABULARY - 5)
    own, bias = settings(
        SamplingParams(), seed=1, prompt_tokens=2, stops=(), bad=(), vocabulary=VOCABULARY
    )
    assert bias is None
    own = jax.tree.map(lambda value: value[None], own)
    prompt = jnp.array([[8, 9, 3]]), jnp.array([2])
    after = set_slots(before, jnp.array([2]), own, None, *prompt)
    after = count(after, jnp.array([2, 0]), jnp.array([[7, 7, 6], [1, 1, 1]]), jnp.array([2, 0]))
    assert np.flatnonzero(after.prompted[2]).tolist() == [8, 9]
    assert after.counts[2, 7] == 2
    assert after.counts[2].sum() == 2
    for slot in (0, 1):
        jax.tree.map(
            lambda a, b, slot=slot: np.testing.assert_array_equal(a[slot], b[slot]), before, after
        )
    fresh = set_slots(after, jnp.array([1]), own, None, *prompt)
    assert not fresh.biased[1]
    # A bias of nothing but zeros counts as one.
    expected = sampler_of(Case(prompt=(8, 9), seed=1), slots=3, slot=1)
    expected = replace(expected, biased=fresh.biased)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), fresh, expected)


def test_slots_are_set_together_as_one_by_one() -> None:
    size = {"stops": (), "bad": (), "vocabulary": VOCABULARY}
    prompts = jnp.array([[8, 9, 3], [4, 4, 1], [4, 4, 1]])
    slots, lengths = jnp.array([2, 0, 0]), jnp.array([2, 3, 3])
    owns = [
        settings(SamplingParams(top_k=n, min_tokens=n), seed=n, prompt_tokens=n, **size)[0]
        for n in (2, 3, 3)
    ]
    own = jax.tree.map(lambda *values: jnp.stack(values), *owns)
    before = sampler_of(Case(prompt=(3, 4, 5), answer=(4, 4)), slots=3, slot=1)
    together = set_slots(before, slots, own, None, prompts, lengths)
    for n in range(2):
        row = jnp.array([n])
        own_row = jax.tree.map(lambda values, row=row: values[row], own)
        before = set_slots(before, slots[row], own_row, None, prompts[row], lengths[row])
    jax.tree.map(np.testing.assert_array_equal, together, before)


@pytest.mark.parametrize(
    ("field", "params", "stops", "bad"),
    [
        ("stop_token_ids", {}, (VOCABULARY,), ()),
        ("logit_bias", {"logit_bias": {-1: 1.0}}, (), ()),
        ("allowed_token_ids", {"allowed_token_ids": (1, VOCABULARY)}, (), ()),
        ("bad_words", {}, (), ((1, VOCABULARY),)),
        ("bad_words", {}, (), ((1,) * (LENGTH + 1),)),
        ("bad_words", {}, (), tuple((1, i) for i in range(WORDS + 1))),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    field: str, params: dict, stops: Sequence[int], bad: Sequence[Sequence[int]]
) -> None:
    with pytest.raises(RequestError, match=field):
        settings(
            SamplingParams(**params),
            seed=0,
            prompt_tokens=1,
            stops=stops,
            bad=bad,
            vocabulary=VOCABULARY,
        )


def test_as_much_as_fits_is_taken() -> None:
    words = [tuple(range(LENGTH)), *((1, i) for i in range(WORDS - 1)), (1, 0), (5,), (6,)]
    own, bias = settings(
        SamplingParams(top_k=2**40, min_tokens=2**40),
        seed=2**32 - 1,
        prompt_tokens=1,
        stops=range(STOPS + 3),
        bad=words,
        vocabulary=VOCABULARY,
    )
    assert {tuple(w[w >= 0].tolist()) for w in own.bad} == {w for w in words if len(w) > 1}
    assert own.stops.tolist() == list(range(STOPS))
    assert bias is not None
    assert np.flatnonzero(bias == -np.inf).tolist() == [5, 6]
