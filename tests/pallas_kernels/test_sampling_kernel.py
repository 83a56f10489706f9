"""The sampler's kernels choose what its plain form chooses, whatever else is in the call."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.filters import keep, likeliest
from jaxinfer.engine.sampling import Sampled, Sampler, sample
from pallas_kernels.backend import Impl
from pallas_kernels.gumbel import gumbel, noise_key
from pallas_kernels.likeliest import BLOCK, argmax_rows, likeliest_rows
from pallas_kernels.thresholds import GROUP, LOWEST, NARROW, Filters, Scaled, ordered, thresholds
from tests.engine.sampling_cases import Case, pack, sampler_of

SIZE = GROUP * NARROW + 500
"""More groups than fit the short way, and parts that do not come out even."""
T, TOP = 3, 4

draw = jax.jit(sample, static_argnames=("top", "tile", "impl"))

NEUTRAL = SamplingParams(temperature=0)
WARM = SamplingParams(temperature=0.8)
CASES = [
    Case(NEUTRAL, drafts=(5, 6)),
    Case(SamplingParams(temperature=0, presence_penalty=1, frequency_penalty=0.5), (1,), (7, 7, 9)),
    Case(SamplingParams(temperature=0, repetition_penalty=2), (1, 2), (3,), drafts=(5, 5)),
    Case(SamplingParams(temperature=0, logit_bias={4000: 30.0, 17: -9.0})),
    Case(WARM, seed=3, drafts=(8, 9)),
    Case(replace(WARM, top_k=20, top_p=0.9), drafts=(8, 9), seed=2**32 - 1),
    Case(replace(WARM, top_k=3000), seed=5),
    Case(replace(WARM, temperature=3.0, top_p=0.95), seed=6),
    Case(replace(WARM, temperature=3.0, top_k=5000, top_p=0.7), seed=7),
    Case(replace(WARM, temperature=2.0, min_p=0.05, repetition_penalty=0.5), (1, 2, 3), seed=8),
]


def batch(cases: Sequence[Case], size: int) -> tuple[Sampler, list[np.ndarray]]:
    """A sampler with a slot a case, and the arguments of `sample` from `slots` to `index`."""
    samplers = [sampler_of(case, size) for case in cases]
    sampler = jax.tree.map(lambda *a: jnp.concatenate(a), *samplers)
    rows = [replace(case, drafts=(*case.drafts, 0, 0)[: T - 1]).rows() for case in cases]
    return sampler, [np.arange(len(cases)), *(np.concatenate(a) for a in zip(*rows, strict=True))]


def scores_of(rows: tuple[int, ...], size: int, seed: int = 0) -> np.ndarray:
    """Logits of which the highest few are one step apart or alike, and the last are padding."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.normal(0, 3, (*rows, size)), 1).astype(np.float32)
    scores += rng.uniform(-1e-3, 1e-3, scores.shape).astype(np.float32) * (scores < 6)
    scores[..., -40:] = -np.inf
    return scores


def assert_alike(got: Sampled, expected: Sampled) -> None:
    for name in ("tokens", "top_tokens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=2e-5)


def both(impl: Impl, cases: Sequence[Case], scores: np.ndarray, allowed: np.ndarray) -> None:
    sampler, rows = batch(cases, scores.shape[-1])
    got, expected = (
        draw(scores, sampler, *rows, pack(allowed), top=TOP, tile=None, impl=each)
        for each in (impl, "plain")
    )
    assert_alike(got, expected)


def test_noise_is_that_of_jax_random() -> None:
    ids = np.array([0, 1, 77, 4095, 248_319])
    for seed, index in ((0, 0), (2**32 - 1, 5), (123, 262_143)):
        key = jax.random.fold_in(jax.random.key(np.uint32(seed)), index)
        expected = jax.random.gumbel(key, (248_320,), mode="high")[ids]
        got = gumbel(noise_key(jnp.uint32(seed), jnp.int32(index)), jnp.asarray(ids), 248_320)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_every_kind_of_request_gets_its_token() -> None:
    everything = np.ones((len(CASES), T, SIZE), bool)
    both("interpret", CASES, scores_of((len(CASES), T), SIZE), everything)


def test_masks_and_bans_apply_and_give_way_when_nothing_is_left() -> None:
    shape = len(CASES), T, SIZE
    scores = scores_of(shape[:2], SIZE, seed=1)
    allowed = np.random.default_rng(1).random(shape) < 0.3
    early = SamplingParams(temperature=0, min_tokens=9)
    best = int(scores[0, 0].argmax())
    cases = [
        Case(early, (1,), (best,), stops=(best, 3)),
        Case(NEUTRAL, (1, 2), (3,), drafts=(4, 5), bad=((2, 3, best), (4, 6), (9, 7))),
        Case(replace(early, allowed_token_ids=(6, 7)), stops=(6, 7)),
        Case(replace(WARM, min_tokens=9, allowed_token_ids=(6, 7)), stops=(6, 7)),
        Case(replace(WARM, allowed_token_ids=(6,))),
        *CASES[5:],
    ]
    allowed[0], allowed[2:4, :, 6:8], allowed[4, :, 6] = True, True, False
    both("interpret", cases, scores, allowed)


def test_thresholds_keep_what_the_plain_filters_keep() -> None:
    settings = [(0, 1.0, 0.0), (20, 1.0, 0.0), (20, 0.5, 0.0), (0, 0.3, 0.01), (4000, 1.0, 0.0)]
    settings += [(0, 0.9, 0.0), (6000, 0.8, 1e-5), (SIZE + 3, 1.0, 0.2)]
    top_k, top_p, min_p = (jnp.asarray(a) for a in zip(*settings, strict=True))
    slots = np.arange(len(settings))
    scores = scores_of((len(slots),), SIZE, seed=2) / 2
    scores[3] *= 3  # so that few tokens decide
    parts = np.pad(scores, [(0, 0), (0, -SIZE % BLOCK)], constant_values=-np.inf)
    peaks = parts.reshape(len(slots), -1, BLOCK).max(-1)
    masses = np.exp(parts.reshape(len(slots), -1, BLOCK) - peaks[..., None]).sum(-1)
    groups = np.asarray(ordered(parts)).reshape(len(slots), -1, GROUP)
    inside = (np.arange(parts.shape[1]) < SIZE).reshape(-1, GROUP)
    groups = np.where(inside, groups, LOWEST).max(-1)
    scaled = Scaled(*map(jnp.asarray, (scores, groups, peaks, masses)))
    filters = Filters(jnp.ones(len(slots)), top_k, top_p, min_p, jnp.asarray(slots))
    least = jax.jit(lambda *a: thresholds(*a, impl="interpret"))(scaled, filters)
    kept = np.asarray(ordered(jnp.asarray(scores))) >= np.asarray(least)[:, None]
    for row, limits in enumerate(settings):
        expected = np.asarray(jax.jit(keep)(scores[row], *limits))
        # The last one in may be another by rounding.
        assert abs(int(kept[row].sum()) - int(expected.sum())) <= (limits[1] < 1)
        assert (kept[row] != expected).sum() <= (limits[1] < 1)


def test_of_equal_scores_the_lower_id_comes_first() -> None:
    scores = np.full((3, 2 * BLOCK + 70), -5, np.float32)
    scores[0, [9, 64, 70, BLOCK + 3]], scores[0, BLOCK] = 2, 3
    scores[1] = -np.inf
    scores[1, [BLOCK, 5]] = 0.0, -0.0
    scores[2, -1] = 1
    got = argmax_rows(jnp.asarray(scores), impl="interpret")
    assert got.tolist() == [BLOCK, 5, 2 * BLOCK + 69] == argmax_rows(jnp.asarray(scores)).tolist()
    tokens, logprobs = likeliest_rows(scores, jnp.zeros(3), 6, impl="interpret")
    expected = [likeliest(row, 6) for row in jnp.asarray(scores)]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(logprobs, np.take_along_axis(scores, np.asarray(tokens), 1))


LARGE = 248_320


@pytest.mark.gpu
def test_on_a_gpu_every_kind_of_request_gets_its_token() -> None:
    shape = len(CASES), T, LARGE
    for seed in range(4):
        allowed = np.random.default_rng(seed).random(shape) < (0.5 if seed % 2 else 2)
        both("kernel", CASES, scores_of(shape[:2], LARGE, seed), allowed)


@pytest.mark.gpu
def test_on_a_gpu_a_row_has_the_same_bits_in_any_company() -> None:
    scores = scores_of((len(CASES), T), LARGE, seed=9)
    sampler, (slots, tokens, tail, index) = batch(CASES, LARGE)
    everything = pack(np.ones(scores.shape, bool))

    def run(at: Sequence[int], masks: np.ndarray | None, top: int = TOP) -> Sampled:
        b = np.asarray(at)
        rows = slots[b], tokens[b], tail[b], index[b]
        masks = None if masks is None else masks[b]
        return draw(scores[b], sampler, *rows, masks, top=top, tile=None, impl="kernel")

    whole = jax.device_get(run(range(len(CASES)), None))
    many = [*range(len(CASES))] * 6
    for company in ([3], [5], [7, 0], [8, 8, 6, 1], many[::-1]):
        for masks in (None, everything):
            got = jax.device_get(run(company, masks))
            for mine, expected in zip(got, whole, strict=True):
                np.testing.assert_array_equal(mine, expected[np.asarray(company)])
    # A row alone, as without speculation: drafts before it count as generated.
    for case in (0, 4, 5, 7):
        one = scores[case : case + 1, :1], sampler, slots[case : case + 1]
        rest = (a[case : case + 1, :1] for a in (tokens, tail, index))
        got = jax.device_get(draw(*one, *rest, None, top=0, tile=None, impl="kernel"))
        assert got.tokens[0, 0] == whole.tokens[case, 0]
        assert got.logprobs[0, 0] == whole.logprobs[case, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_on_a_gpu_argmax_is_that_of_jax(rows: int) -> None:
    scores = jnp.asarray(scores_of((rows,), LARGE, rows))
    got = jax.jit(lambda s: argmax_rows(s, impl="kernel"))(scores)
    np.testing.assert_array_equal(got, np.argmax(np.asarray(scores), axis=-1))
