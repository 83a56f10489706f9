from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import triton_call
from pallas_kernels.expert_choice import Order, list_pairs, order_shapes, placed, put_in_order
from pallas_kernels.routing import route
from tests.pallas_kernels.few_rows import draw_rows

E, K, ROWS = 16, 4, 8


def draw_logits(rows: int) -> jax.Array:
    """Coarse enough for some to be equal."""
    return jnp.abs(jnp.round(2 * draw_rows(rows, E, seed=rows)))


@pytest.mark.parametrize("count", [1, 5, 32, 40])
def test_lists_the_pairs_of_each_expert(count: int) -> None:
    logits = draw_logits(count)
    chosen, weights = (np.asarray(a) for a in route(logits, K))
    pairs, (busy, sizes), ours = (np.asarray(a) for a in list_pairs(logits, K, "interpret"))
    assert np.allclose(ours.reshape(count, K), weights, atol=1e-6)
    there = sizes > 0
    assert np.array_equal(busy[there], np.unique(chosen))
    for expert, size in zip(busy[there], sizes[there], strict=True):
        assert np.array_equal(pairs[expert, :size], np.flatnonzero(chosen.ravel() == expert))


@pytest.mark.parametrize("count", [1, 5, 32, 40])
def test_places_pairs_in_groups_of_one_expert(count: int) -> None:
    logits, n = draw_logits(count), count * K

    def first(logits: Any, *out: Any) -> None:
        put_in_order(logits, K, ROWS, Order(*out))

    def then(logits: Any, sent: Any, start: Any, *out: Any) -> None:
        pair = jnp.arange(pl.next_power_of_2(n))
        found = placed(logits, Order(sent, start), K, ROWS, pair, pair < n)
        for ref, each in zip(out, found, strict=True):
            plt.store(ref.at[pair], each, mask=pair < n)

    how: dict[str, Any] = {"grid": (1,), "impl": "interpret", "name": "order"}
    order = triton_call(first, logits, out_shape=order_shapes(count, E, K), **how)
    kinds = [jax.ShapeDtypeStruct((n,), kind) for kind in (jnp.int32, jnp.int32, jnp.float32)]
    expert, place, weight = map(
        np.asarray, triton_call(then, logits, *order, out_shape=kinds, **how)
    )

    chosen, weights = (np.asarray(a).ravel() for a in route(logits, K))
    assert np.array_equal(expert, chosen)
    assert np.allclose(weight, weights, atol=1e-6)
    sizes = np.bincount(chosen, minlength=E)
    start = np.concatenate([[0], np.cumsum(-(-sizes // ROWS))])
    assert np.array_equal(np.asarray(order.start), start)
    for one in range(E):
        assert np.array_equal(place[chosen == one], start[one] * ROWS + np.arange(sizes[one]))
