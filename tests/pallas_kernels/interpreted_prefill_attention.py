"""Attention of prompts on Mosaic, which `test_interpreted` runs where there are threads enough."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.normed import Form, formed
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention_mosaic import Tiles
from pallas_kernels.weights import Fp8
from tests.pallas_kernels.attention_inputs import Case, Sizes, case, close, run

# Two heads a key head, so that both warpgroups have one.
SIZES = Sizes(H=4, Hkv=2, d=256, half=32, page=64)


def pieces() -> Case:
    """Three pieces of a sequence, of which the first has its keys already, and one of another."""
    start, valid = [64, 128, 192, 0], [0, 64, 64, 64]
    return case(SIZES, start, valid, 64, 5, own=[0, 0, 0, 1], seed=3)


def attended(c: Case, programs: int = 132, **options) -> list[np.ndarray]:
    tiles = Tiles(together=1, programs=programs)
    return run(prefill_attention, c, "interpret", kernel="mosaic", tiles=tiles, **options)


@pytest.mark.parametrize("programs", [1, 3])
def test_agrees_with_the_formula(programs: int, watched) -> None:
    """Eight pieces of work for one program, and turns of three programs of which not all work."""
    c = pieces()
    out = attended(c, programs)
    close(out, run(prefill_attention, c, "plain"))
    assert np.isfinite(out[0]).all()


def test_bits_do_not_depend_on_how_a_prompt_is_split() -> None:
    c = pieces()
    together, *pages = attended(c, 3)
    # With what the pieces before have written.
    k_pages, v_pages = (jnp.asarray(p, c.k_pages.dtype) for p in pages)
    for n in range(4):
        one = c.tokens(slice(None), slice(n, n + 1))
        one = replace(one, k_pages=k_pages, v_pages=v_pages)
        np.testing.assert_array_equal(attended(one)[0], together[n : n + 1])


def test_outputs_may_be_in_the_form_of_what_follows() -> None:
    c, form = pieces().tokens(slice(None), slice(3, 4)), Form(Fp8, jnp.array([0.5, 0.02]), 1)
    plain = jnp.asarray(attended(c)[0], jnp.bfloat16)
    np.testing.assert_array_equal(
        attended(c, form=form)[0], np.asarray(formed(plain, form), np.float32)
    )
