"""Taking a running request off the device and putting it back, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.engine.slots import Slots
from jaxinfer.qwen.state import SCRATCH_PAGE, State

PAGES = 16
"""Pages that are copied together."""
_PER_LAYER = ("conv", "recurrent", "pending_x", "pending_g", "pending_beta")


@dataclass(frozen=True)
class Saved:
    """A request in the host's memory.

    Attributes:
        slot: what its slot held, as `Slots` of one without pages.
        k, v: `[L, n, 64, Hkv, d]`, its pages, `n` a multiple of `PAGES`.
    """

    slot: Slots
    k: np.ndarray
    v: np.ndarray


def save(slots: Slots, slot: int, pages: Sequence[int]) -> Saved:
    """Copy what slot and pages hold; waits for the device."""
    parts = [
        _read_pages(slots.state.k, slots.state.v, jax.device_put(group)) for group in _groups(pages)
    ]
    one, parts = jax.device_get((_read_slot(slots, jax.device_put(np.int32(slot))), parts))
    k, v = (np.concatenate(group, axis=1) for group in zip(*parts, strict=True))
    return Saved(one, k, v)


def restore(slots: Slots, slot: int, pages: Sequence[int], saved: Saved) -> Slots:
    """Write it back, into any slot and any pages (at least as many); `slots` is donated."""
    slots = _write_slot(slots, *jax.device_put((np.int32(slot), saved.slot)))
    for number, group in enumerate(_groups(pages[: saved.k.shape[1]])):
        part = slice(number * PAGES, (number + 1) * PAGES)
        slots = _write_pages(slots, *jax.device_put((group, saved.k[:, part], saved.v[:, part])))
    return slots


def _groups(pages: Sequence[int]) -> list[np.ndarray]:
    padded = [*pages, *[SCRATCH_PAGE] * (-len(pages) % PAGES)]
    return [np.array(padded[i : i + PAGES], np.int32) for i in range(0, len(padded), PAGES)]


def _without_pages(slots: Slots) -> Slots:
    # None has no leaves, so that everything else can be mapped over.
    return replace(slots, state=replace(slots.state, k=None, v=None))


def _axes(slots: Slots) -> Slots:
    """The axis of slots in every leaf."""
    axes = jax.tree.map(lambda _: 0, _without_pages(slots))
    return replace(axes, state=replace(axes.state, **dict.fromkeys(_PER_LAYER, 1)))


@jax.jit
def _read_slot(slots: Slots, slot: jax.Array) -> Slots:
    def read(leaf: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(leaf, slot, 1, axis)

    return jax.tree.map(read, _without_pages(slots), _axes(slots))


@partial(jax.jit, donate_argnums=0)
def _write_slot(slots: Slots, slot: jax.Array, one: Slots) -> Slots:
    def write(leaf: jax.Array, axis: int, part: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(leaf, part, slot, axis)

    out = jax.tree.map(write, _without_pages(slots), _axes(slots), one)
    return replace(out, state=replace(out.state, k=slots.state.k, v=slots.state.v))


@jax.jit
def _read_pages(k: jax.Array, v: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.take(k, pages, axis=1), jnp.take(v, pages, axis=1)


@partial(jax.jit, donate_argnums=0)
def _write_pages(slots: Slots, pages: jax.Array, k: jax.Array, v: jax.Array) -> Slots:
    state: State = slots.state
    state = replace(state, k=state.k.at[:, pages].set(k), v=state.v.at[:, pages].set(v))
    return replace(slots, state=state)
