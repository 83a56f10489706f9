"""A token's bits depend on its own sequence alone: not on drafts, neighbours, slots or masks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.sampling import Sampled, count
from tests.engine.sampling_cases import TOP, VOCABULARY, Case, draw, pack, sampler_of

LARGE = 4096
ROWS = 4
LENGTH = 24
FIRST = jnp.zeros(1, int)

# Everything that looks at the tokens before the one to choose.
LOOKING_BACK = Case(
    SamplingParams(
        min_tokens=12,
        temperature=0.9,
        top_k=30,
        top_p=0.97,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
    ),
    prompt=(3, 4, 5),
    stops=(0, 1, 2),
)


def generate(
    start: Case, table: np.ndarray, propose: Callable[[int], Sequence[int]]
) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of a model whose scores depend on the last token alone.

    Args:
        start: a case without an answer.
        table: `[V, V]`, scores by last token.
        propose: drafts after so many tokens of the answer.
    """
    sampler, tokens, logprobs = sampler_of(start), [], []
    while len(tokens) < LENGTH:
        now = replace(start, answer=tuple(tokens), drafts=tuple(propose(len(tokens))))
        fed, tail, index = now.rows()
        out = draw(table[fed], sampler, FIRST, fed, tail, index, None, top=TOP, tile=8)
        held = [int(a) == b for a, b in zip(out.tokens[0], now.drafts, strict=False)]
        new = [*held, False].index(False) + 1
        tokens += out.tokens[0, :new].tolist()
        logprobs += out.logprobs[0, :new].tolist()
        sampler = count(sampler, FIRST, out.tokens, jnp.array([new]))
    return tokens[:LENGTH], logprobs[:LENGTH]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_the_same_whatever_was_drafted(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    table = rng.normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)
    last = np.arange(VOCABULARY)
    likely = (7 * last + 1) % VOCABULARY
    # The answer wants to go round and round, and to end at once, and must not.
    table[last, likely] += 4
    table[:, :3] += 2
    bad = tuple(zip(last[::2].tolist(), likely[::2].tolist(), strict=True))
    params = replace(LOOKING_BACK.params, temperature=temperature)
    start = replace(LOOKING_BACK, params=params, seed=seed, bad=bad)
    alone = generate(start, table, lambda _: ())
    assert not {0, 1, 2} & set(alone[0][: params.min_tokens - 1])
    assert not set(bad) & set(zip(alone[0], alone[0][1:], strict=False))

    def propose(at: int) -> list[int]:
        """The answer to come, wrong in one place of five."""
        ahead = np.array((alone[0] + [0] * ROWS)[at : at + ROWS - 1])
        wrong = rng.integers(0, VOCABULARY, ROWS - 1)
        return np.where(rng.random(ROWS - 1) < 0.2, wrong, ahead).tolist()

    assert generate(start, table, propose) == alone


@pytest.mark.also_gpu
def test_the_bits_of_a_row_depend_on_nothing_beside_it() -> None:
    rng = np.random.default_rng(1)
    params = replace(LOOKING_BACK.params, top_k=300, min_p=0.0)
    scores = rng.normal(0, 3, (3, ROWS, LARGE)).astype(np.float32)
    cases = [
        replace(
            LOOKING_BACK,
            params=params,
            answer=(4, 5, 6)[:i],
            drafts=(5, 6 + i, 5),
            bad=((4, 5), (5, 6 + i, int(scores[i, 2].argmax()))),
            seed=i,
        )
        for i in range(3)
    ]
    slots = [2, 0, 3]
    samplers = [
        sampler_of(case, LARGE, slots=4, slot=s) for case, s in zip(cases, slots, strict=True)
    ]
    joined = samplers[0]
    for sampler, slot in zip(samplers, slots, strict=True):
        joined = jax.tree.map(lambda a, b, s=slot: a.at[s].set(b[s]), joined, sampler)
    rows = [np.concatenate(parts) for parts in zip(*(case.rows() for case in cases), strict=True)]
    together = draw(scores, joined, jnp.array(slots), *rows, None, top=TOP, tile=8)

    everything = pack(np.ones((1, 1, LARGE), bool))
    for b, case in enumerate(cases):
        for t in range(ROWS):
            one = replace(case, answer=case.answer + case.drafts[:t], drafts=())
            for masks, top in ((None, TOP), (everything, TOP), (None, 0)):
                alone = draw(
                    scores[b, t][None, None],
                    sampler_of(one, LARGE),
                    FIRST,
                    *one.rows(),
                    masks,
                    top=top,
                    tile=8,
                )
                for name in Sampled._fields[: 4 if top else 2]:
                    mine, expected = getattr(alone, name)[0, 0], getattr(together, name)[b, t]
                    np.testing.assert_array_equal(mine, expected)
