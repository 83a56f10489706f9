from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.pool import Pool
from jaxinfer.engine.prefix_cache import Node, PrefixCache, page_keys
from jaxinfer.qwen.config import CHUNK as PAGE


def prompt(*pages: int) -> tuple[int, ...]:
    """A prompt with one number a page."""
    return tuple(number for number in pages for _ in range(PAGE))


def make(
    pages: int = 8, snapshots: int = 4, snapshot_bytes: int = 0, budget: int | None = None
) -> PrefixCache:
    return PrefixCache(Pool(pages, first=1), Pool(snapshots), 1, snapshot_bytes, budget)


def feed(cache: PrefixCache, *pages: int, snapshot: bool = True) -> list[Node]:
    """What a sequence does that runs its whole prompt; the nodes are still used."""
    nodes: list[Node] = []
    for key in page_keys(prompt(*pages)):
        page = cache.pages.take()
        nodes.append(cache.insert(key, page))
        if nodes[-1].page != page:
            cache.pages.give(page)
    if snapshot:
        cache.attach_snapshot(nodes[-1])
    return nodes


def hit(cache: PrefixCache, *pages: int) -> int:
    """How many pages of a longer prompt would be skipped."""
    return len(cache.match(page_keys(prompt(*pages)), PAGE * len(pages)))


def test_a_pool_hands_out_each_number_once_until_it_is_given_back() -> None:
    pool = Pool(3, first=1)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    pool.give(2)
    assert (pool.free, pool.take(), pool.free) == (1, 2, 0)


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_pool_refuses_what_is_free_already_or_was_never_its_own(number: int) -> None:
    pool = Pool(3, first=1)
    pool.give(pool.take())
    with pytest.raises(ValueError, match=f"{number} is not taken"):
        pool.give(number)


def test_an_empty_pool_says_so() -> None:
    with pytest.raises(IndexError, match="all 0 of the pool are taken"):
        Pool(0).take()


@given(
    a=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3 * PAGE),
    at=st.integers(0, 3 * PAGE - 1),
)
def test_keys_agree_exactly_up_to_the_page_in_which_two_prompts_differ(
    a: list[int], at: int
) -> None:
    b = [token ^ 1 if place == at else token for place, token in enumerate(a)]
    same = [x == y for x, y in zip(page_keys(a), page_keys(b), strict=True)]
    assert same == [page < at // PAGE or at >= len(a) for page in range(len(a) // PAGE)]


def test_keys_under_two_salts_have_nothing_in_common() -> None:
    tokens = prompt(1, 2)
    assert not set(page_keys(tokens, "a")) & set(page_keys(tokens, "b"))


def test_a_prefix_is_skipped_up_to_its_deepest_snapshot() -> None:
    cache = make()
    nodes = feed(cache, 1, 2, 3, 4, snapshot=False)
    assert hit(cache, 1, 2, 3, 4, 5) == 0
    cache.attach_snapshot(nodes[1])
    assert hit(cache, 1, 2, 3, 4, 5) == 2
    cache.attach_snapshot(nodes[2])
    assert hit(cache, 1, 2, 3, 4, 5) == 3
    assert hit(cache, 1, 2, 9) == 2
    assert hit(cache, 9, 2, 3) == 0


def test_no_more_is_skipped_than_was_asked_for() -> None:
    cache = make()
    for node in feed(cache, 1, 2, 3):
        cache.attach_snapshot(node)
    keys = page_keys(prompt(1, 2, 3))
    assert [len(cache.match(keys, longest)) for longest in (63, 64, 191, 192)] == [0, 1, 2, 3]


def test_known_pages_are_counted_without_a_snapshot() -> None:
    cache = make()
    feed(cache, 1, 2, snapshot=False)
    assert cache.known(page_keys(prompt(1, 2, 3))) == 2
    assert cache.known(page_keys(prompt(3, 2, 1))) == 0


def test_a_page_that_is_cached_already_stays_the_callers() -> None:
    cache = make()
    first = feed(cache, 1)[0]
    key, page = page_keys(prompt(1))[0], cache.pages.take()
    again = cache.insert(key, page)
    assert again is first
    assert (again.references, again.page != page, cache.cached) == (2, True, 1)


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_start() -> None:
    cache = make()
    old, new = feed(cache, 1, 2), feed(cache, 3, 4)
    cache.release(old)
    cache.release(new)
    used = cache.match(page_keys(prompt(1, 2)), 2 * PAGE)
    cache.acquire(used)
    cache.release(used)
    order = [new[1].page, new[0].page, old[1].page, old[0].page]
    for gone, _ in enumerate(order, 1):
        assert cache.evict(1) == 1
        left = [hit(cache, *pages) for pages in ((1, 2), (3, 4))]
        assert left == [2 if gone < 3 else 0, 2 if gone < 1 else 0]
        known = [cache.known(page_keys(prompt(*pages))) for pages in ((1, 2), (3, 4))]
        assert known == [min(2, 4 - gone), max(0, 2 - gone)]
    assert [cache.pages.take() for _ in order] == order[::-1]


def test_a_page_in_use_is_never_evicted() -> None:
    cache = make()
    nodes = feed(cache, 1, 2)
    other = feed(cache, 1, 2, 3)
    cache.release(other)
    assert cache.evictable == 1
    assert cache.evict(8) == 1
    assert hit(cache, 1, 2, 3) == 2
    cache.release(nodes)
    assert cache.evict(-1) == 0
    assert cache.evict(8) == 2
    assert cache.evictions == 3
    assert (cache.pages.free, cache.snapshots.free) == (8, 4)


def test_the_least_recently_used_snapshot_makes_room_unless_it_is_pinned() -> None:
    cache = make(snapshots=2)
    nodes = feed(cache, 1, 2, 3, 4, snapshot=False)
    entries = [cache.attach_snapshot(node) for node in nodes[:2]]
    cache.pin(nodes[0])
    assert cache.attach_snapshot(nodes[2]) == entries[1]
    assert [node.snapshot for node in nodes] == [entries[0], None, entries[1], None]
    cache.pin(nodes[2])
    assert cache.attach_snapshot(nodes[3]) is None
    cache.unpin(nodes[0])
    assert cache.attach_snapshot(nodes[3]) == entries[0]


def test_a_snapshot_that_was_started_from_outlives_one_that_was_not() -> None:
    cache = make(snapshots=2)
    first, second, third = (feed(cache, n, snapshot=False) for n in (1, 2, 3))
    cache.attach_snapshot(first[0])
    cache.attach_snapshot(second[0])
    cache.acquire(cache.match(page_keys(prompt(1)), PAGE))
    cache.attach_snapshot(third[0])
    assert [n.snapshot is None for n in (first[0], second[0], third[0])] == [False, True, False]


def test_a_node_gets_one_snapshot_only() -> None:
    cache = make()
    node = feed(cache, 1)[0]
    assert node.snapshot is not None
    assert cache.attach_snapshot(node) is None
    assert cache.held == 1


def test_the_budget_counts_snapshots_and_unused_pages_and_drops_the_oldest() -> None:
    cache = make(snapshot_bytes=2, budget=5)
    first, second = feed(cache, 1, 2), feed(cache, 3)
    assert cache.spent == 4
    cache.release(second)
    assert cache.spent == 5
    cache.release(first)
    # First the oldest snapshot, which is that of (1, 2); what is left fits.
    assert (cache.spent, hit(cache, 1, 2), hit(cache, 3)) == (5, 0, 1)
    cache.acquire(second)
    cache.release(second)
    third = feed(cache, 5)
    assert (cache.spent <= 5, hit(cache, 3), hit(cache, 5)) == (True, 1, 1)
    assert cache.known(page_keys(prompt(1, 2))) < 2
    cache.release(third)
    assert cache.spent <= 5


def test_a_budget_too_small_for_a_snapshot_keeps_none() -> None:
    cache = make(snapshot_bytes=2, budget=1)
    nodes = feed(cache, 1, 2)
    assert (cache.held, cache.snapshots.free) == (0, 4)
    cache.release(nodes)
    assert cache.cached == 1


def test_clear_drops_all_but_what_is_in_use() -> None:
    cache = make()
    kept, gone = feed(cache, 1), feed(cache, 2, 3)
    cache.release(gone)
    cache.clear()
    assert (cache.cached, cache.held, hit(cache, 2, 3)) == (1, 0, 0)
    cache.release(kept)
    cache.clear()
    assert (cache.pages.free, cache.snapshots.free) == (8, 4)


def test_one_release_too_many_is_refused() -> None:
    cache = make()
    nodes = feed(cache, 1)
    cache.release(nodes)
    with pytest.raises(ValueError, match="released more often"):
        cache.release(nodes)


@dataclass
class Step:
    """One prompt that runs and ends, or is cut short."""

    pages: tuple[int, ...]
    snapshot: int


EVERY = [page_keys(prompt(*pages)) for pages in product((1, 2), repeat=4)]
"""The keys of every prompt that a step may have, or of one that it begins."""

STEPS = st.lists(
    st.builds(
        Step,
        st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple),
        st.integers(0, 3),
    ),
    max_size=30,
)


@settings(max_examples=100)
@given(steps=STEPS, budget=st.none() | st.integers(0, 12))
def test_pages_and_snapshots_are_neither_lost_nor_left_without_what_comes_before(
    steps: Sequence[Step], budget: int | None
) -> None:
    cache = make(pages=5, snapshots=2, snapshot_bytes=2, budget=budget)
    for step in steps:
        keys = page_keys(prompt(*step.pages))
        nodes = cache.match(keys, PAGE * len(keys))
        assert not nodes or nodes[-1].snapshot is not None
        cache.acquire(nodes)
        for key in keys[len(nodes) :]:
            if not cache.pages.free:
                assert cache.evict(1) == 1
            page = cache.pages.take()
            nodes.append(cache.insert(key, page))
            if nodes[-1].page != page:
                cache.pages.give(page)
        cache.attach_snapshot(nodes[min(step.snapshot, len(nodes) - 1)])
        cache.release(nodes)
        assert budget is None or cache.spent <= budget
        assert cache.evictable == cache.cached == 5 - cache.pages.free
        assert cache.held == 2 - cache.snapshots.free
        # A binary search finds only prefixes, so a page whose start is gone would be missed.
        found = {key for keys in EVERY for key in keys[: cache.known(keys)]}
        assert len(found) == cache.cached
    cache.clear()
    assert (cache.pages.free, cache.snapshots.free) == (5, 2)
