"""The checks find what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.contracts.checks import Subject, holds, shapes_agree
from jaxinfer.contracts.contract import Candidate, Contract, Spec, least_bytes
from jaxinfer.contracts.draws import distinct

SIZES = {"L": 3, "R": 4, "B": 8, "D": 5}


def right(x: jax.Array, pool: jax.Array, slot: jax.Array, layer: int) -> tuple:
    """Add rows to their entries of a pool, and tell what then lies there."""
    pool = pool.at[layer, slot].add(x)
    return pool[layer, slot], pool


def contract(run: Callable[..., Any], **changes: Any) -> Contract:
    made = Contract(
        name="add",
        doc="",
        arguments={
            "x": Spec("R D", "float32"),
            "pool": Spec("L B D", "float32"),
            "slot": Spec("R", "int32", distinct(1, "B-1"), index="B"),
        },
        results={"y": Spec("R D", "float32"), "pool": Spec("L B D", "float32")},
        reference=right,
        candidates={"own": Candidate(lambda *a, impl, layer: run(*a, layer))},
        shapes={"real": SIZES},
        edges={"edge": SIZES},
        tolerance=1e-5,
        overwrites={"pool": "pool"},
        stack="L",
        invariant={"R": "rows", "B": "labels"},
    )
    return replace(made, **changes)


def check(run: Callable[..., Any], **changes: Any) -> None:
    holds(Subject(contract(run, **changes), "own", SIZES, "plain"))


def test_what_is_right_holds() -> None:
    shapes_agree(contract(right), SIZES)
    check(right)


def slightly_wrong(x, pool, slot, layer):
    y, pool = right(x, pool, slot, layer)
    return y * 1.001, pool


def wrong_layer(x, pool, slot, layer):
    return right(x, pool, slot, layer - 1)


def reads_others(x, pool, slot, layer):
    y, after = right(x, pool, slot, layer)
    return y + 0 * jnp.sum(pool[layer]), after


def writes_others(x, pool, slot, layer):
    y, pool = right(x, pool, slot, layer)
    return y, pool.at[layer, 0].set(1.0)


@pytest.mark.parametrize("run", [slightly_wrong, wrong_layer, reads_others, writes_others])
def test_what_computes_something_else_is_found(run) -> None:
    with pytest.raises(AssertionError, match="add by own"):
        check(run)


def by_place(x, pool, slot, layer):
    y, pool = right(x, pool, slot, layer)
    return y + 1e-6 * jnp.arange(x.shape[0])[:, None], pool


def by_number(x, pool, slot, layer):
    y, pool = right(x, pool, slot, layer)
    return y + 1e-6 * x.shape[0], pool


@pytest.mark.parametrize("run", [by_place, by_number])
def test_rows_that_depend_on_their_company_are_found(run) -> None:
    with pytest.raises(AssertionError, match="depends on others along R"):
        check(run, tolerance=1e-3)


def by_label(x, pool, slot, layer):
    y, pool = right(x, pool, slot, layer)
    return y + 1e-6 * slot[:, None], pool


def test_entries_that_depend_on_their_numbers_are_found() -> None:
    with pytest.raises(AssertionError, match="depends on numbers along B"):
        check(by_label, tolerance=1e-3, invariant={"B": "labels"})


def test_a_row_that_sees_what_comes_behind_it_is_found() -> None:
    def all_of_them(x, pool, slot, layer):
        y, pool = right(x, pool, slot, layer)
        return y + 1e-6 * jnp.sum(x), pool

    with pytest.raises(AssertionError, match="depends on what follows along R"):
        check(all_of_them, tolerance=1e-2, invariant={"R": "prefix"})


def test_wrong_shapes_are_found() -> None:
    with pytest.raises(AssertionError, match="y is"):
        shapes_agree(
            contract(right, results={"y": Spec("R", "float32"), "pool": Spec("L B D", "float32")}),
            SIZES,
        )


def test_inputs_are_poisoned_where_nothing_may_be_read() -> None:
    _, pool, slot = contract(right).draw(SIZES, 0)
    readable = np.zeros((SIZES["L"], SIZES["B"]), bool)
    readable[-1, slot] = True
    np.testing.assert_array_equal(np.isfinite(pool).all(axis=2), readable)


def test_bytes_are_those_of_one_layer_and_of_the_entries_in_use() -> None:
    row = SIZES["R"] * SIZES["D"] * 4
    # x and y, the entries read and written, and four slot numbers.
    assert least_bytes(contract(right), SIZES) == pytest.approx(4 * row + SIZES["R"] * 4)
