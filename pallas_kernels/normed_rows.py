"""The norm before products of many rows, whose inputs it leaves as they are multiplied.

    h = x / sqrt(mean(x²) + eps) · (1 + g)
    h as each kind of weight wants it: rounded to E4M3 at a static scale, in the order of its kind

Unlike `normed`, which makes the inputs of decode steps, it multiplies nothing. A program is a row.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.matmul import source
from pallas_kernels.normed import Form, formed
from pallas_kernels.weights import quantise


def reference(
    x: jax.Array, norm: jax.Array, layer: int, forms: Sequence[Form], eps: float
) -> list[jax.Array]:
    """See `normed_rows`."""
    wide = x.astype(jnp.float32)
    grow = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    h = (wide * grow * (1.0 + norm[layer].astype(jnp.float32))).astype(x.dtype)
    return [formed(h, form) for form in forms]


def normed_rows(
    x: jax.Array,
    norm: jax.Array,
    layer: int,
    forms: Sequence[Form],
    *,
    eps: float,
    impl: Impl,
    warps: int = 4,
) -> list[jax.Array]:
    """The norm of rows, as inputs of products.

    Args:
        x: `[M, K]`, `K` a power of two.
        norm: zero-centred weights `[L, K]`.
        layer: which of them.
        forms: in which the normed rows are wanted.
        eps: of the norm.
        impl: how to compute.
        warps: a program.

    Returns:
        For each form `[M, K]`.
    """
    if impl == "plain":
        return reference(x, norm, layer, forms, eps)
    index = as_data(layer, *(form.index for form in forms))
    scales, kinds = [form.scale for form in forms], tuple(form.kind for form in forms)
    return _launch(index, x, norm, scales, kinds=kinds, eps=eps, impl=impl, warps=warps)


@partial(jax.jit, static_argnames=("kinds", "eps", "impl", "warps"))
def _launch(
    index: jax.Array,
    x: jax.Array,
    norm: jax.Array,
    scales: list[jax.Array | None],
    *,
    kinds: tuple[type, ...],
    eps: float,
    impl: Impl,
    warps: int,
) -> list[jax.Array]:
    (M, K), args = x.shape, (index, x, norm, scales)
    flat, tree = jax.tree.flatten(args)

    def body(*refs: Any) -> None:
        index, x, norm, scales = jax.tree.unflatten(tree, refs[: len(flat)])
        r, place = pl.program_id(0), jnp.arange(K)
        wide = plt.load(x.at[r, place]).astype(jnp.float32)
        grow = jax.lax.rsqrt(jnp.sum(wide * wide) / K + eps)
        for i, (kind, scale, out) in enumerate(zip(kinds, scales, refs[len(flat) :], strict=True)):
            k = source(kind, place, K)
            gain = 1.0 + plt.load(norm.at[index[0], k]).astype(jnp.float32)
            h = (plt.load(x.at[r, k]).astype(jnp.float32) * grow * gain).astype(x.dtype)
            if scale is not None:
                h = quantise(h, scale[index[1 + i]])
            plt.store(out.at[r, place], h.astype(out.dtype))

    types = [x.dtype if scale is None else jnp.float8_e4m3fn for scale in scales]
    out = [jax.ShapeDtypeStruct((M, K), kind) for kind in types]
    done = triton_call(
        body, *flat, grid=(M,), out_shape=out, impl=impl, name="normed_rows", warps=warps
    )
    return list(done)
