"""Attention of prompt pieces: the formula, and the same bits however a prompt is split."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.normed import Form, formed
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.weights import Fp8
from tests.pallas_kernels.attention_inputs import REAL, SMALL, Case, Sizes, case, close, run

FEW = {"heads": 2, "block": 8}
WHOLE = slice(None)


def pieces(sizes: Sizes, kv_dtype: jax.typing.DTypeLike = jnp.bfloat16, first: int = 1) -> Case:
    """Three pieces of a sequence that goes on at page `first`, which others have filled; and one
    of a sequence that begins.
    """
    page = sizes.page
    start = [page * (first + n) for n in range(3)] + [0]
    valid = [0, page, page, page]
    return case(
        sizes, start, valid, page, first + 3, kv_dtype=kv_dtype, own=[0, 0, 0, 1], seed=first
    )


def filled_up(c: Case) -> Case:
    """With a piece that only fills up the call."""
    names = ("q_gate", "k", "v", "cos", "sin")
    return replace(
        c,
        **{n: jnp.concatenate([getattr(c, n), getattr(c, n)[:1]]) for n in names},
        table=jnp.concatenate([c.table, jnp.zeros_like(c.table[:1])]),
        start=jnp.append(c.start, 0),
        valid=jnp.append(c.valid, 0),
    )


def in_calls_of_one(c: Case, impl: str, **options: Any) -> np.ndarray:
    """`y` of all pieces, each computed in a call of its own."""
    rows = []
    for n in range(c.k.shape[0]):
        y, *pages = run(prefill_attention, c.tokens(WHOLE, slice(n, n + 1)), impl, **options)
        k_pages, v_pages = (jnp.asarray(p, c.k_pages.dtype) for p in pages)
        c = replace(c, k_pages=k_pages, v_pages=v_pages)
        rows.append(y)
    return np.concatenate(rows)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_agrees_with_the_formula(kv_dtype) -> None:
    c = pieces(SMALL, kv_dtype)
    out = run(prefill_attention, c, "interpret", **FEW)
    close(out, run(prefill_attention, c, "plain"))
    assert np.isfinite(out[0]).all()


def test_bits_do_not_depend_on_how_a_prompt_is_split() -> None:
    c = pieces(SMALL)
    together, *pages = run(prefill_attention, filled_up(c), "interpret", **FEW)
    np.testing.assert_array_equal(in_calls_of_one(c, "interpret", **FEW), together[:4])
    assert np.isnan(pages[0][:, 0]).all()


def test_outputs_may_be_in_the_form_of_what_follows() -> None:
    c, form = pieces(SMALL), Form(Fp8, jnp.array([0.5, 0.02]), 1)
    y = run(prefill_attention, c, "interpret", form=form, **FEW)[0]
    plain = jnp.asarray(run(prefill_attention, c, "interpret", **FEW)[0], jnp.bfloat16)
    np.testing.assert_array_equal(y, np.asarray(formed(plain, form), np.float32))


def test_a_piece_that_is_not_a_page_is_refused() -> None:
    c = pieces(SMALL)
    with pytest.raises(ValueError, match="8 tokens, a page 16"):
        run(prefill_attention, c.tokens(slice(0, 8)), "plain")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("first", [1, 30])
def test_kernel_agrees_on_real_shapes(kv_dtype, first: int) -> None:
    c = pieces(REAL, kv_dtype, first)
    out = run(prefill_attention, c, "kernel", kernel="triton")
    close(out, run(prefill_attention, c, "plain"), 2e-2)
    assert np.isfinite(out[0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_kernel_has_the_same_bits_however_a_prompt_is_split(kv_dtype) -> None:
    c = pieces(REAL, kv_dtype, 30)
    ours = partial(prefill_attention, kernel="triton")
    together = run(ours, filled_up(c), "kernel")[0]
    np.testing.assert_array_equal(in_calls_of_one(c, "kernel", kernel="triton"), together[:4])
    wider = replace(c, table=jnp.pad(c.table, ((0, 0), (0, 100))))
    np.testing.assert_array_equal(run(ours, wider, "kernel")[0], together[:4])
