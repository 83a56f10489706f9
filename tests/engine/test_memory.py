"""Pools that fit the device they are for, and errors that say what would."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import load, resolve
from jaxinfer.engine.memory import GPU_FRACTION, Pools, TooSmallError, fit, host_memory, shapes
from jaxinfer.engine.slots import Plan

MB = 2**20


@dataclass
class Device:
    """Says of itself what a GPU would."""

    limit: int
    used: int = 0
    device_kind: str = "GPU of cardboard"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


class Host:
    device_kind = "cpu"

    def memory_stats(self) -> None:
        return None


@cache
def plan() -> Plan:
    config, _ = load(resolve("tiny_qwen"), vision=False)
    return Plan(replace(config, layer_types=config.layer_types[:4]), "mtp", 3)


ASKED: dict[str, Any] = {
    "slots": 4,
    "context": 1000,
    "kv_dtype": None,
    "prefix_cache": True,
    "workspace": 3 * MB,
}


def fitted(device: Any, **changed: Any) -> Pools:
    """`fit` for what is asked, some of it changed."""
    asked: dict[str, Any] = ASKED | changed
    return fit(plan(), device, **asked)


def size(pools: Pools, **asked: Any) -> int:
    """Bytes of all that an engine with these pools keeps on its device."""
    slots = shapes(
        plan(), asked["slots"], asked["context"], pools.pages, pools.snapshots, asked["kv_dtype"]
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots))


@settings(max_examples=25)
@given(
    limit=st.integers(1, 400),
    used=st.integers(0, 20),
    slots=st.integers(1, 16),
    context=st.integers(2, 4000),
    kv_dtype=st.sampled_from([None, "float8_e4m3fn"]),
    prefix_cache=st.booleans(),
)
def test_everything_together_fits_the_device(
    limit: int, used: int, slots: int, context: int, kv_dtype: str | None, prefix_cache: bool
) -> None:
    asked = ASKED | {
        "slots": slots,
        "context": context,
        "kv_dtype": kv_dtype,
        "prefix_cache": prefix_cache,
    }
    try:
        pools = fitted(Device(limit * MB, used * MB), **asked)
    except TooSmallError:
        return
    total = used * MB + asked["workspace"] + size(pools, **asked)
    assert total <= GPU_FRACTION * limit * MB
    assert pools.pages * 64 >= context
    if prefix_cache:
        # Less than a page and a snapshot are left over: nothing is wasted.
        assert total + pools.page_bytes + pools.snapshot_bytes > GPU_FRACTION * limit * MB - 1
    else:
        assert pools.snapshots == 0
        assert pools.pages <= slots * -(-context // 64)


def test_more_memory_gives_more_pages() -> None:
    pools = [fitted(Device(limit * MB)) for limit in (60, 120, 240, 480)]
    pages, snapshots = ([getattr(p, name) for p in pools] for name in ("pages", "snapshots"))
    assert pages == sorted(set(pages))
    assert snapshots == sorted(set(snapshots))


def test_a_page_of_8_bits_is_half_a_page_of_16() -> None:
    half, whole = (
        fitted(Device(200 * MB), kv_dtype=kv_dtype) for kv_dtype in ("float8_e4m3fn", "bfloat16")
    )
    assert 2 * half.page_bytes == whole.page_bytes
    assert half.pages > whole.pages


def smallest(**asked: Any) -> int:
    """The least memory, in bytes, that does."""
    low, high = 0, 2**32
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fitted(Device(middle), **asked)
            high = middle
        except TooSmallError:
            low = middle
    return high


def test_a_context_that_is_named_fits() -> None:
    asked = ASKED | {"context": 4096}
    device = Device(smallest(**asked) - MB)
    with pytest.raises(TooSmallError, match=r"a context of (\d+) tokens would fit") as refused:
        fitted(device, **asked)
    assert "GPU of cardboard" in str(refused.value)
    named = re.search(r"a context of (\d+) tokens would fit", str(refused.value))
    assert named is not None
    context = int(named[1])
    assert 64 <= context < 4096
    assert fitted(device, **asked | {"context": context}).pages * 64 >= context


def test_fewer_slots_are_advised_where_they_help() -> None:
    asked = ASKED | {"slots": 64, "context": 64}
    device = Device(smallest(**asked) - 2 * MB)
    with pytest.raises(TooSmallError, match=r"fewer slots \(max_batch\) would fit"):
        fitted(device, **asked)
    assert fitted(device, **asked | {"slots": 32}).pages >= 1


def test_weights_that_leave_no_room_are_blamed() -> None:
    with pytest.raises(TooSmallError, match=r"parameters take 0\.10 GB.*smaller weights \(NVFP4\)"):
        fitted(Device(100 * MB, 99 * MB))


@pytest.mark.parametrize("device", [Device(400 * MB), Host()], ids=["GPU", "host"])
def test_too_few_pages_for_one_request_are_refused(device: Any) -> None:
    with pytest.raises(
        TooSmallError, match=r"15 pages of 64 tokens cannot hold .* 1000 tokens; give at least 16"
    ):
        fitted(device, pages=15)
    assert fitted(device, pages=16, snapshots=3).pages == 16


def test_more_pages_than_fit_are_refused() -> None:
    with pytest.raises(TooSmallError, match=r"100000 pages and 3 snapshots take .* give fewer"):
        fitted(Device(400 * MB), pages=100_000, snapshots=3)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_host_has_pages_for_all_slots(prefix_cache: bool) -> None:
    pools = fitted(Host(), prefix_cache=prefix_cache)
    assert pools.pages == (2 if prefix_cache else 1) * 4 * 16
    assert (pools.snapshots > 0) == prefix_cache


@pytest.mark.parametrize("device", [Device(400 * MB), Host()], ids=["GPU", "host"])
def test_a_smaller_part_of_the_memory_is_all_that_is_used(device: Any) -> None:
    limit = 400 * MB if isinstance(device, Device) else host_memory()
    fraction = 100 * MB / limit
    pools = fitted(device, fraction=fraction)
    assert ASKED["workspace"] + size(pools, **ASKED) <= 100 * MB
    with pytest.raises(TooSmallError):
        fitted(device, fraction=ASKED["workspace"] / limit)
