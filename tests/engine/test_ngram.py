from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.ngram import LONGEST, SHORTEST, ngram_drafts

ROOM = 48
COUNT = 3

lookup = jax.jit(partial(ngram_drafts, count=COUNT))


def drafts(tokens: Sequence[int], rubbish: int = 0) -> tuple[list[int], int]:
    history = jnp.array([*tokens, *[rubbish] * (ROOM - len(tokens))], jnp.int32)
    proposed, found, size = lookup(history, jnp.int32(len(tokens)))
    return proposed[:found].tolist(), int(size)


def brute_force(tokens: Sequence[int]) -> tuple[list[int], int]:
    """Try every suffix from the longest on, against every earlier place from the latest on."""
    tokens = list(tokens)
    for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + COUNT], size
    return [], 0


@given(
    tokens=st.integers(1, 4).flatmap(
        lambda kinds: st.lists(st.integers(0, kinds), min_size=1, max_size=ROOM)
    ),
    rubbish=st.integers(0, 4),
)
def test_drafts_are_those_of_a_brute_force_search(tokens: list[int], rubbish: int) -> None:
    proposed, size = drafts(tokens, rubbish)
    expected, expected_size = brute_force(tokens)
    assert proposed == expected
    if expected:
        assert size == expected_size


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    assert drafts([7, 1, 2, 50, 9, 1, 2, 60, 7, 1, 2]) == ([50, 9, 1], 3)


def test_of_equally_long_suffixes_the_latest_wins() -> None:
    assert drafts([1, 2, 50, 1, 2, 60, 61, 62, 1, 2]) == ([60, 61, 62], 2)


def test_a_suffix_may_overlap_itself() -> None:
    assert drafts([5, 5, 5, 5]) == ([5], 3)


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 3, 1]])
def test_nothing_is_drafted_without_a_repeated_pair(tokens: list[int]) -> None:
    assert drafts(tokens)[0] == []
