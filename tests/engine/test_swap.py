"""A slot and its pages are taken off the device and put back elsewhere without losing a bit."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load, resolve
from jaxinfer.engine.slots import Plan, Slots, init_slots
from jaxinfer.engine.swap import PAGES, restore, save

SLOTS, ROOM = 3, 60


@cache
def noise(seed: int, kv_dtype: str | None = None) -> Slots:
    """Slots with something different in every place, on the host."""
    config, _ = load(resolve("tiny_qwen"), vision=False)
    plan = Plan(replace(config, layer_types=config.layer_types[:4]), "mtp", 3)
    empty = jax.eval_shape(lambda: init_slots(plan, SLOTS, 256, ROOM, 2, kv_dtype))
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        values = rng.standard_normal(leaf.shape, np.float32)
        if leaf.dtype == bool:
            return values > 0
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            values = (values * 1000).astype(np.int64)
        return values.astype(leaf.dtype)

    return jax.tree.map(fill, empty)


def fresh(seed: int, kv_dtype: str | None = None) -> Slots:
    """A copy that may be donated."""
    return jax.tree.map(jnp.array, noise(seed, kv_dtype))


def held(slots: Slots, slot: int, pages: list[int]) -> list[bytes]:
    """The bits of all that belongs to a request that has this slot and these pages."""
    slots = jax.device_get(slots)
    state = slots.state
    layers = {"conv", "recurrent", "pending_x", "pending_g", "pending_beta"}
    parts = [state.k[:, pages], state.v[:, pages]]
    for name, leaf in vars(state).items():
        if name not in ("k", "v"):
            parts.append(leaf[:, slot] if name in layers else leaf[slot])
    for name, leaf in vars(slots).items():
        if name != "state":
            parts += [one[slot] for one in jax.tree.leaves(leaf)]
    return [np.asarray(part).tobytes() for part in parts]


@pytest.mark.parametrize("count", [1, 5, PAGES, PAGES + 3])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_a_request_is_the_same_in_another_slot_and_other_pages(
    count: int, kv_dtype: str | None
) -> None:
    before, after = list(range(1, 1 + count)), list(range(1 + count, 1 + 2 * count))[::-1]
    saved = save(noise(1, kv_dtype), 0, before)
    slots = restore(fresh(2, kv_dtype), 2, after, saved)
    assert held(slots, 2, after) == held(noise(1, kv_dtype), 0, before)


def test_nothing_else_is_touched() -> None:
    before, after = [1, 2, 3], [7, 8, 9]
    slots = restore(fresh(2), 1, after, save(noise(1), 0, before))
    others = [page for page in range(1, ROOM) if page not in after]
    for slot in (0, 2):
        assert held(slots, slot, others) == held(noise(2), slot, others)


def test_more_pages_than_were_saved_are_welcome() -> None:
    saved = save(noise(1), 0, [4, 5])
    slots = restore(fresh(2), 0, [10, 11, 12, 13], saved)
    assert held(slots, 0, [10, 11]) == held(noise(1), 0, [4, 5])
