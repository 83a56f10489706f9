"""Paged attention: the formula, garbage that must not show, and the same bits in every company."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rotary_cache import rotary_cache
from tests.pallas_kernels.attention_inputs import REAL, SMALL, Case, case, close, run

FEW = {"tile": 16, "runs": 2, "programs": 1}
"""Two runs of pages at most, so that little sequences are cut into longer and shorter ones."""


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_agrees_with_the_formula(kv_dtype) -> None:
    # From the first page on, across the border of a page, across that where runs get longer,
    # inactive, and out of its table.
    c = case(SMALL, [0, 14, 31, 20, 62], [3, 3, 3, 0, 3], 3, 4, kv_dtype=kv_dtype)
    out = run(paged_attention, c, "interpret", **FEW)
    close(out, run(paged_attention, c, "plain"))
    assert np.isfinite(out[0]).all()
    assert not out[0][3].any()
    assert not out[0][4, 2].any()
    assert out[0][4, :2].all()


def test_agrees_in_float32_and_only_valid_tokens_are_written() -> None:
    c = case(SMALL, [17], [2], 3, 2, jnp.float32)
    out = run(paged_attention, c, "interpret", **FEW)
    close(out, run(paged_attention, c, "plain"), 1e-5)
    page = int(c.table[0, 1])
    for pages in out[1:]:
        assert np.isfinite(pages[0, page, :3]).all()
        assert np.isnan(pages[0, page, 3:]).all()
        assert np.isnan(pages[1, page]).sum() == np.isnan(pages[1, page, 1:]).sum()


def test_bits_do_not_depend_on_drafts_company_or_table() -> None:
    c = case(SMALL, [31, 5], [3, 3], 3, 3)
    together, *pages = run(paged_attention, c, "interpret", **FEW)
    for t in range(3):
        one = c.tokens(slice(t, t + 1), slice(0, 1))
        one = replace(one, table=jnp.pad(one.table, ((0, 0), (0, 2))))
        # Its predecessors are in the pages already: those of the whole call, of which it sees no
        # more than it should.
        one = replace(one, k_pages=pages[0].astype(c.k.dtype), v_pages=pages[1].astype(c.k.dtype))
        alone = run(paged_attention, one, "interpret", **{**FEW, "programs": 2})[0]
        np.testing.assert_array_equal(alone[0, 0], together[0, t])


def test_pages_that_cannot_be_addressed_are_refused() -> None:
    c = case(SMALL, [0], [1], 1, 1)
    pages = jax.ShapeDtypeStruct((1, 2**31 // 1024 + 1, 16, 2, 32), jnp.float8_e4m3fn)

    def call(k_pages: jax.Array, v_pages: jax.Array) -> object:
        inputs = (c.q_gate, c.k, c.v, c.cos, c.sin, c.q_norm, c.k_norm)
        where = (c.table, c.start, c.valid)
        return rotary_cache(*inputs, 0, 0, k_pages, v_pages, *where, eps=1e-6, impl="kernel")

    with pytest.raises(ValueError, match="larger than 4 GiB"):
        jax.eval_shape(call, pages, pages)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_kernel_agrees_on_real_shapes(kv_dtype) -> None:
    # The last one crosses the border at which 64 runs of a page no longer suffice.
    c = case(REAL, [0, 126, 1000, 77, 4093], [5, 5, 5, 0, 5], 5, 68, kv_dtype=kv_dtype)
    out = run(paged_attention, c, "kernel")
    close(out, run(paged_attention, c, "plain"), 2e-2)
    assert np.isfinite(out[0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_kernel_has_the_same_bits_in_every_company(kv_dtype) -> None:
    start = [0, 63, 700, 4093]
    c = case(REAL, start, [5] * 4, 5, 68, kv_dtype=kv_dtype)
    together, *pages = run(paged_attention, c, "kernel")
    k_pages, v_pages = (jnp.asarray(p, kv_dtype) for p in pages)
    written = replace(c, k_pages=k_pages, v_pages=v_pages)
    for T in (1, 2, 3):
        for t in range(0, 6 - T):
            some = written.tokens(slice(t, t + T))
            np.testing.assert_array_equal(
                run(paged_attention, some, "kernel")[0], together[:, t : t + T]
            )
    for s in range(4):
        alone = written.tokens(slice(0, 1), slice(s, s + 1))
        alone = replace(alone, table=jnp.pad(alone.table, ((0, 0), (0, 2000))))
        for programs in (4, 64):
            y = run(paged_attention, alone, "kernel", programs=programs)[0]
            np.testing.assert_array_equal(y[0, 0], together[s, 0])
    many = _repeated(written, 16)
    np.testing.assert_array_equal(
        run(paged_attention, many, "kernel")[0], np.concatenate([together] * 16)
    )


def _repeated(c: Case, times: int) -> Case:
    """The same sequences several times; that they write the same does no harm."""
    names = ("q_gate", "k", "v", "cos", "sin", "table", "start", "valid")
    return replace(c, **{n: jnp.concatenate([getattr(c, n)] * times) for n in names})
