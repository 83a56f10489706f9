"""What comes before a layer's large products: its norm, and the products that are too small.

    h = x / sqrt(mean(x²) + eps) · (1 + g)
    h as each kind of weight wants it: rounded to E4M3 at a static scale, in the order of its kind
    y_i = h W_iᵀ                   for unquantised weights of few rows: routers, gates

A program takes some rows of one weight, and some of the inputs; the norm is done again by each,
which takes less time than waiting for another kernel. The rows of `x` are added up side by side:
all warps share each of them, however many there are, so that a row has the bits it has alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.matmul import in_order, placed_at
from pallas_kernels.weights import Dense, linear, quantise

HEIGHT = 4
"""Rows of a small weight that a program multiplies at once."""
FEW = 8
"""Rows of the inputs that are shared out among more programs."""


@dataclass(frozen=True)
class Form:
    """How a product wants its inputs.

    Attributes:
        kind: of weight, in whose order they are.
        scale: stack of static input scales `[L]`; None to stay in the model's type.
        index: which of them.
    """

    kind: type
    scale: jax.Array | None = None
    index: int = 0


class Normed(NamedTuple):
    """Normed rows.

    Attributes:
        h: in each form that was asked for, `[R, K]`.
        products: for each small weight `[R, N_i]` in the type of the input.
    """

    h: list[jax.Array]
    products: list[jax.Array]


def reference(
    x: jax.Array,
    norm: jax.Array,
    layer: int,
    forms: Sequence[Form],
    small: Sequence[tuple[Dense, int]],
    eps: float,
) -> Normed:
    """See `normed`."""
    wide = x.astype(jnp.float32)
    grow = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    h = (wide * grow * (1.0 + norm[layer].astype(jnp.float32))).astype(x.dtype)
    return Normed([formed(h, f) for f in forms], [linear(h, w, i) for w, i in small])


def normed_tile(x: Any, r: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Inside a kernel: rows `r` of a reference to `[R, K]` over their root mean square, times
    `gain [K]` float32."""
    K = x.shape[-1]
    wide = plt.load(x.at[r[:, None], jnp.arange(K)[None, :]]).astype(jnp.float32)
    grow = lax.rsqrt(jnp.sum(wide * wide, axis=1) / K + eps)
    return (wide * grow[:, None] * gain[None, :]).astype(x.dtype)


def formed(h: jax.Array, form: Form) -> jax.Array:
    """Rows in the form that a product wants."""
    h = h if form.scale is None else quantise(h, form.scale[form.index])
    return in_order(h, form.kind)


def store(
    out: Any, lead: tuple, k: jax.Array, value: jax.Array, form: Form | None, scale: Any, at: Any
) -> None:
    """Inside a kernel: store elements `k` of rows in a form; None for as they are.

    Args:
        out: reference to `[…, K]`.
        lead: leading indices.
        k: their places along K as the model has them.
        value: what they are.
        form: see `Form`.
        scale: reference to the form's scales, if it has any.
        at: which of them.
    """
    if form is not None:
        k = placed_at(form.kind, k, out.shape[-1])
        if scale is not None:
            value = quantise(value, scale[at])
    plt.store(out.at[*lead, k], value.astype(out.dtype))


def form_type(form: Form | None, dtype: Any) -> Any:
    """The type of rows in a form that are of another type without it."""
    return jnp.float8_e4m3fn if form is not None and form.scale is not None else dtype


def normed(
    x: jax.Array,
    norm: jax.Array,
    layer: int,
    forms: Sequence[Form],
    small: Sequence[tuple[Any, int]] = (),
    *,
    eps: float,
    impl: Impl,
    rows: int | None = None,
    warps: int = 8,
) -> Normed:
    """The norm of rows, and what else reads them.

    Args:
        x: `[R, K]`, `K` a power of two.
        norm: zero-centred weights `[L, K]`.
        layer: which of them.
        forms: in which the normed rows are wanted.
        small: stacks of weights `[L, N_i, K]`, and which of each.
        eps: of the norm.
        impl: how to compute.
        rows: of the inputs, a program of products; None for what was fastest of those tried.
        warps: a program; another number adds up in another order.
    """
    if impl == "plain":
        return reference(x, norm, layer, forms, small, eps)
    index = as_data(layer, *(f.index for f in forms), *(at for _, at in small))
    scales, weights = [f.scale for f in forms], [w.w for w, _ in small]
    kinds = tuple(f.kind for f in forms)
    count = x.shape[0]
    rows = min(rows or (2 if count <= FEW else 8), 1 << (count - 1).bit_length())
    static = {"kinds": kinds, "eps": eps, "impl": impl, "rows": rows, "warps": warps}
    return _launch(index, x, norm, scales, weights, **static)


@partial(jax.jit, static_argnames=("kinds", "eps", "impl", "rows", "warps"))
def _launch(
    index: jax.Array,
    x: jax.Array,
    norm: jax.Array,
    scales: list[jax.Array | None],
    weights: list[jax.Array],
    *,
    kinds: tuple[type, ...],
    eps: float,
    impl: Impl,
    rows: int,
    warps: int,
) -> Normed:
    R, K = x.shape
    heights = [w.shape[-2] for w in weights]
    blocks = -(-R // rows)
    counts = [R] * len(scales) + [-(-height // HEIGHT) * blocks for height in heights]
    flat, tree = jax.tree.flatten((index, x, norm, scales, weights))
    shape = jax.ShapeDtypeStruct
    types = [x.dtype if scale is None else jnp.float8_e4m3fn for scale in scales]
    out = [shape((R, K), kind) for kind in types] + [shape((R, n), x.dtype) for n in heights]
    forms = [Form(kind, scale) for kind, scale in zip(kinds, scales, strict=True)]

    def body(*refs: Any) -> None:
        index, x, norm, scales, weights = jax.tree.unflatten(tree, refs[: len(flat)])
        outs = refs[len(flat) :]
        program, k = pl.program_id(0), jnp.arange(K)
        gain = 1.0 + plt.load(norm.at[index[0], k]).astype(jnp.float32)

        def whole(out: Any, form: Form, scale: Any, at: jax.Array, number: jax.Array) -> None:
            r = number + jnp.arange(1)
            h = normed_tile(x, r, gain, eps)
            store(out, (r[:, None],), k[None, :], h, form, scale, at)

        def product(out: Any, w: Any, at: jax.Array, number: jax.Array) -> None:
            height = w.shape[-2]
            first = lax.div(number, blocks) * HEIGHT
            # Rows past the end are the last one over again.
            r = jnp.minimum(lax.rem(number, blocks) * rows + jnp.arange(rows), R - 1)
            numbers = [first + i for i in range(HEIGHT)]
            some = [plt.load(w.at[at, n % height, k]) for n in numbers]
            h = normed_tile(x, r, gain, eps).astype(jnp.float32)
            for n, row in zip(numbers, some, strict=True):
                y = jnp.sum(row.astype(jnp.float32)[None, :] * h, axis=1)
                there = jnp.broadcast_to(n < height, r.shape)
                plt.store(out.at[r, n], y.astype(out.dtype), mask=there)

        # Forms of single rows, whose scattered stores take long; then the products.
        jobs = [partial(whole, outs[i], f, scales[i], index[1 + i]) for i, f in enumerate(forms)]
        for i, w in enumerate(weights, start=len(forms)):
            jobs.append(partial(product, outs[i], w, index[1 + i]))
        before = 0
        for job, count in zip(jobs, counts, strict=True):
            here = (program >= before) & (program < before + count)
            pl.when(here)(partial(job, program - before))
            before += count

    done = triton_call(
        body,
        *flat,
        grid=(sum(counts),),
        out_shape=out,
        impl=impl,
        name="normed",
        warps=warps,
    )
    return Normed(list(done[: len(forms)]), list(done[len(forms) :]))
