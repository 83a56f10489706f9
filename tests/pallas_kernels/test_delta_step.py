"""The Gated DeltaNet step: kernel against reference, and bits that must not depend on company."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.contracts.checks import AS_WRITTEN
from pallas_kernels.backend import Impl
from pallas_kernels.delta_step import Step, delta_step

EPS = 1e-6
TAPS = 4


def inputs(
    seqs: int,
    T: int,
    P: int,
    heads: tuple[int, int, int, int],
    dtype: str = "float32",
    layers: int = 2,
    entries: int = 6,
) -> dict[str, jax.Array]:
    """Random arguments of `delta_step`; slots are chosen from the back, all rows are pending."""
    Hk, Hv, dk, dv = heads
    C = 2 * Hk * dk + Hv * dv
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0, dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    return {
        "x": normal(seqs, T, C),
        "a": normal(seqs, T, Hv),
        "b": normal(seqs, T, Hv),
        "z": normal(seqs, T, Hv * dv),
        "conv_weight": normal(layers, C, TAPS, scale=0.5),
        "A_log": normal(layers, Hv, scale=0.5, dtype="float32"),
        "dt_bias": normal(layers, Hv, dtype="float32"),
        "o_norm": 1 + normal(layers, dv, scale=0.1),
        "conv": normal(layers, entries, TAPS - 1, C),
        "recurrent": normal(layers, entries, Hv, dk, dv, dtype="float32"),
        "pending_x": normal(layers, entries, P, C),
        "pending_g": -jnp.abs(normal(layers, entries, P, Hv, dtype="float32")),
        "pending_beta": jnp.abs(normal(layers, entries, P, Hv, scale=0.3, dtype="float32")),
        "pending": jnp.full(entries, P, jnp.int32),
        "slot": jnp.arange(entries - 1, entries - 1 - seqs, -1, dtype=jnp.int32),
    }


@partial(jax.jit, static_argnames=("impl", "layer", "tile_v", "warps"), compiler_options=AS_WRITTEN)
def step(
    args: dict[str, jax.Array],
    impl: Impl,
    layer: int = 1,
    tile_v: int = 64,
    warps: int = 4,
) -> Step:
    return delta_step(**args, layer=layer, eps=EPS, impl=impl, tile_v=tile_v, warps=warps)


def assert_close(out: Step, expected: Step, tolerance: float = 2e-5) -> None:
    for name, a, b in zip(Step._fields, out, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_same(a: jax.Array, b: jax.Array) -> None:
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


HEADS = (1, 2, 16, 32)


def rows(args: dict[str, jax.Array], begin: int, end: int) -> dict[str, jax.Array]:
    return args | {name: args[name][:, begin:end] for name in ("x", "a", "b", "z")}


def after(args: dict[str, jax.Array], out: Step, accepted: int) -> dict[str, jax.Array]:
    """The pools after a step with these arguments, of whose rows so many were accepted."""
    return out.pools() | {"pending": args["pending"].at[args["slot"]].set(accepted)}


def check_replay(args: dict[str, jax.Array], impl: Impl, **how: int) -> None:
    """Rows verified together give the bits of rows run one by one, and so do their replays."""
    T = args["x"].shape[1]
    together = step(args, impl, **how)
    pools: dict[str, jax.Array] = {}
    for t in range(T):
        one = rows(args | pools, t, t + 1)
        out = step(one, impl, **how)
        assert_same(together.y[:, t], out.y[:, 0])
        pools = after(one, out, 1)
    # Of the one, all rows are pending; of the other, only the last is.
    following = rows(args, 0, 1)
    out = step(following | after(args, together, T), impl, **how)
    expected = step(following | pools, impl, **how)
    assert_same(out.y, expected.y)
    assert_same(out.recurrent, expected.recurrent)


def check_company(args: dict[str, jax.Array], impl: Impl, **how: int) -> None:
    """A sequence alone gives the bits it gives among others."""
    together = step(args, impl, **how)
    for i in range(len(args["slot"])):
        alone = {name: args[name][i : i + 1] for name in ("x", "a", "b", "z", "slot")}
        out = step(args | alone, impl, **how)
        assert_same(out.y[0], together.y[i])
        at = args["slot"][i]
        assert_same(out.recurrent[1, at], together.recurrent[1, at])


def test_kernel_is_the_reference() -> None:
    args = inputs(2, 2, 2, HEADS)
    args["pending"] = jnp.array([0, 0, 0, 0, 1, 2], jnp.int32)
    assert_close(step(args, "interpret"), step(args, "plain"))


def test_part_of_the_state_a_program() -> None:
    args = inputs(1, 1, 1, HEADS)
    args["pending"] = jnp.zeros(6, jnp.int32)
    assert_close(step(args, "interpret", tile_v=16), step(args, "plain"))


def test_bfloat16_rounds_where_the_reference_does() -> None:
    args = inputs(1, 1, 1, HEADS, "bfloat16")
    out, expected = step(args, "interpret"), step(args, "plain")
    assert out.y.dtype == expected.y.dtype == jnp.bfloat16
    assert_close(out._replace(y=expected.y), expected)
    assert_close(out, expected, 1e-2)


@pytest.mark.parametrize("impl", ["plain", "interpret"])
def test_replayed_rows_leave_what_they_left(impl: Impl) -> None:
    check_replay(inputs(2, 2, 2, HEADS), impl)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"tile_v": 32, "warps": 4}])
@pytest.mark.parametrize("seqs", [1, 5])
def test_on_a_gpu(seqs: int, how: dict[str, int]) -> None:
    args = inputs(seqs, 5, 5, (16, 32, 128, 128), "bfloat16")
    out, expected = step(args, "kernel", **how), step(args, "plain")
    # Where the kernel rounds a convolution to the bfloat16 next door, a row of the state moves.
    a, b = (np.asarray(one.recurrent, np.float64) for one in (out, expected))
    assert np.linalg.norm(a - b) < 4e-4 * np.linalg.norm(b)
    out = out._replace(recurrent=expected.recurrent)
    assert_close(out._replace(y=expected.y), expected, 1e-4)
    assert_close(out, expected, 2e-2)
    check_replay(args, "kernel", **how)
    check_company(args, "kernel", **how)
