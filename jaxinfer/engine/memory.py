"""How much fits: pools sized by the device's memory and by what the compiled steps need of it."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.slots import Plan, Slots, init_slots
from jaxinfer.qwen.config import CHUNK

GPU_FRACTION, HOST_FRACTION = 0.95, 0.5
"""The part of its memory that is used. The rest of a GPU's is for graphs and the allocator, the
rest of the host's for others."""
SNAPSHOT_SHARE = 0.25
"""The snapshots' part of what is left for pages and snapshots."""
SPARE = 2
"""On a CPU, pages for so many times what the slots can hold at once: the rest is for the cache."""


class TooSmallError(ValueError):
    """A device on which the model, or one request as long as the context, does not fit."""


@dataclass(frozen=True)
class Pools:
    """What fits.

    Attributes:
        pages: pages of 64 tokens, without scratch.
        snapshots: copies of Gated DeltaNet's memory.
        page_bytes: size of a page.
        snapshot_bytes: size of a snapshot.
    """

    pages: int
    snapshots: int
    page_bytes: int
    snapshot_bytes: int


def device_memory(device: Any) -> tuple[int, int] | None:
    """Bytes that the process may use on a device, and those in use; None for the host."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"], stats["bytes_in_use"]


def host_memory() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shapes(
    plan: Plan, slots: int, context: int, pages: int, snapshots: int, kv_dtype: str | None
) -> Slots:
    """`init_slots` without the memory."""
    return jax.eval_shape(lambda: init_slots(plan, slots, context, 1 + pages, snapshots, kv_dtype))


def fit(
    plan: Plan,
    device: Any,
    *,
    slots: int,
    context: int,
    kv_dtype: str | None,
    prefix_cache: bool,
    workspace: int,
    fraction: float | None = None,
    pages: int | None = None,
    snapshots: int | None = None,
) -> Pools:
    """Size the pools.

    Args:
        plan: static properties of the steps.
        device: where the parameters are already.
        slots: requests that run together.
        context: tokens of the longest request.
        kv_dtype: see `init_state`.
        prefix_cache: without it there are no snapshots, and no more pages than slots can fill.
        workspace: bytes that the compiled steps need.
        fraction: the part of the memory to use; None for what is usual.
        pages: so many, instead of what fits.
        snapshots: the same for them.

    Raises:
        TooSmallError: says what is lacking and what would help.
    """

    def size(pages: int, snapshots: int) -> int:
        leaves = jax.tree.leaves(shapes(plan, slots, context, pages, snapshots, kv_dtype))
        return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in leaves)

    fixed = size(0, 0)
    page, snapshot = size(1, 0) - fixed, size(0, 1) - fixed
    width = -(-context // CHUNK)
    memory = device_memory(device)
    if memory is None:
        limit, used = int((fraction or HOST_FRACTION) * host_memory()), 0
    else:
        limit, used = int((fraction or GPU_FRACTION) * memory[0]), memory[1]
    left = limit - used - fixed - workspace
    if left < width * page:
        raise TooSmallError(
            f"{device.device_kind} has {_gb(limit)} to use; the parameters take {_gb(used)}, the "
            f"compiled steps {_gb(workspace)}, {slots} slots {_gb(fixed)}, and a request of "
            f"{context} tokens {_gb(width * page)}: {_remedy(left, slots, fixed, width, page)}"
        )
    wanted = slots * width
    if memory is None:
        # The host's memory is there for others too.
        pages = pages or min(left // page, (SPARE if prefix_cache else 1) * wanted)
        snapshots = snapshots if snapshots is not None else max(8, pages // 8)
    elif prefix_cache:
        share = 0 if snapshots is not None else int(SNAPSHOT_SHARE * (left - width * page))
        snapshots = snapshots if snapshots is not None else share // snapshot
        pages = pages or (left - snapshots * snapshot) // page
    pages = pages or min(left // page, wanted)
    snapshots = (snapshots or 0) if prefix_cache else 0
    if pages < width:
        raise TooSmallError(
            f"{pages} pages of {CHUNK} tokens cannot hold one request of {context} tokens; give at "
            f"least {width}, or a smaller context"
        )
    asked = pages * page + snapshots * snapshot
    if asked > left:
        raise TooSmallError(
            f"{pages} pages and {snapshots} snapshots take {_gb(asked)}, and {_gb(left)} are left "
            f"on {device.device_kind}: give fewer, or leave them out"
        )
    return Pools(pages, snapshots, page, snapshot)


def _remedy(left: int, slots: int, fixed: int, width: int, page: int) -> str:
    if left >= page:
        return f"a context of {left // page * CHUNK} tokens would fit"
    if slots > 1 and left + fixed - fixed // slots >= width * page:
        return "fewer slots (max_batch) would fit"
    return "use a checkpoint with smaller weights (NVFP4), or a GPU with more memory"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
