"""What comes before a layer's large products: its norm, and the products that are too small.

    h = x / sqrt(mean(x²) + eps) · (1 + g)
    h as each kind of weight wants it: rounded to E4M3 at a static scale, in the order of its kind
    y_i = h W_iᵀ                   for unquantised weights of few rows: routers, gates

One program takes a row of one weight; the norm is done again by each, which takes less time than
waiting for another kernel. Each row of `x` is treated as if it were alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.matmul import in_order, placed_at, source
from pallas_kernels.weights import Dense, linear, quantise


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
    warps: int = 4,
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
        warps: a program.
    """
    if impl == "plain":
        return reference(x, norm, layer, forms, small, eps)
    index = as_data(layer, *(f.index for f in forms), *(at for _, at in small))
    scales, weights = [f.scale for f in forms], [w.w for w, _ in small]
    kinds = tuple(f.kind for f in forms)
    return _launch(index, x, norm, scales, weights, kinds=kinds, eps=eps, impl=impl, warps=warps)


@partial(jax.jit, static_argnames=("kinds", "eps", "impl", "warps"))
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
    warps: int,
) -> Normed:
    R, K = x.shape
    heights = [w.shape[-2] for w in weights]
    flat, tree = jax.tree.flatten((index, x, norm, scales, weights))
    shape = jax.ShapeDtypeStruct
    types = [x.dtype if scale is None else jnp.float8_e4m3fn for scale in scales]
    out = [shape((R, K), kind) for kind in types] + [shape((R, n), x.dtype) for n in heights]
    formed_rows = len(kinds)

    def body(*refs: Any) -> None:
        index, x, norm, scales, weights = jax.tree.unflatten(tree, refs[: len(flat)])
        outs = refs[len(flat) :]
        hs, products = outs[:formed_rows], outs[formed_rows:]
        number, r, place = pl.program_id(0), pl.program_id(1), jnp.arange(K)
        layer = index[0]
        wide = plt.load(x.at[r, place]).astype(jnp.float32)
        grow = jax.lax.rsqrt(jnp.sum(wide * wide) / K + eps)

        def rows(k: jax.Array) -> jax.Array:
            gain = 1.0 + plt.load(norm.at[layer, k]).astype(jnp.float32)
            return (plt.load(x.at[r, k]).astype(jnp.float32) * grow * gain).astype(x.dtype)

        for i, kind in enumerate(kinds):

            @pl.when(number == i)
            def _(i: int = i, kind: type = kind) -> None:
                h = rows(source(kind, place, K))
                if scales[i] is not None:
                    h = quantise(h, scales[i][index[1 + i]])
                plt.store(hs[i].at[r, place], h)

        before = formed_rows
        for i, (w, target, n) in enumerate(zip(weights, products, heights, strict=True)):
            at = index[1 + formed_rows + i]
            pl.when((number >= before) & (number < before + n))(
                partial(_one, rows, w, at, target, number - before, r, K)
            )
            before += n

    done = triton_call(
        body,
        *flat,
        grid=(formed_rows + sum(heights), R),
        out_shape=out,
        impl=impl,
        name="normed",
        warps=warps,
    )
    return Normed(list(done[:formed_rows]), list(done[formed_rows:]))


def _one(rows: Any, w: Any, at: jax.Array, out: Any, n: jax.Array, r: jax.Array, K: int) -> None:
    k = jnp.arange(K)
    weight = plt.load(w.at[at, n, k]).astype(jnp.float32)
    y = jnp.sum(weight * rows(k).astype(jnp.float32))
    plt.store(out.at[r, n + jnp.arange(1)], jnp.broadcast_to(y.astype(out.dtype), (1,)))
