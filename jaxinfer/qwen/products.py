"""Products with weights around the layers' cores, as kernels or in plain JAX."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxinfer.qwen.mode import Mode
from jaxinfer.qwen.norms import rms_norm
from pallas_kernels import Dense, Fp8, Observed, Weight, linear, rowwise
from pallas_kernels.matmul import matmul, matmuls, place
from pallas_kernels.normed import Form, formed, normed
from pallas_kernels.normed_rows import normed_rows
from pallas_kernels.products import shape
from pallas_kernels.projection import project

SMALL = 256
"""Rows of an unquantised weight up to which decode steps multiply with it where they norm."""


def norm(x: jax.Array, weight: jax.Array, eps: float, mode: Mode) -> jax.Array:
    """The zero-centred norm of rows `[B, T, D]`; `weight` is `[D]`."""
    impl = mode.impl("projection")
    if impl == "plain":
        return rowwise(lambda x: rms_norm(x, weight, eps), mode.tile, x)
    return _normed(x, weight[None], 0, eps, mode).reshape(x.shape)


def product(x: jax.Array, w: Weight, dtype: Any, mode: Mode) -> jax.Array:
    """`x Wᵀ` in a given type, for `x [B, T, D]` and one matrix `[N, D]`."""
    impl = mode.impl("projection")
    if impl == "plain" or isinstance(w, Observed):
        return rowwise(lambda x: linear(x, w, dtype=dtype), mode.tile, x)
    rows = x.reshape(-1, x.shape[-1])
    if mode.chunked:
        y = matmul(rows, w, None, dtype=dtype, impl=impl)
    else:
        stack = jax.tree.map(lambda a: a[None], w)
        y = project([formed(rows, form(stack, 0))], [stack], 0, dtype=dtype, impl=impl)[0]
    return y.reshape(*x.shape[:2], -1)


def normed_products(
    x: jax.Array,
    norm: jax.Array,
    weights: Sequence[Weight],
    layer: int,
    eps: float,
    mode: Mode,
) -> tuple[jax.Array, list[jax.Array]]:
    """`h = norm(x)` and `h Wᵀ` for several weights.

    Args:
        x: `[B, T, D]`.
        norm: stack of norm weights `[L, D]`.
        weights: stacks `[L, N_i, D]`.
        layer: which of them.
        eps: of the norm.
        mode: see `Mode`.

    Returns:
        `h [B, T, D]` and for each weight `[B, T, N_i]`.
    """
    impl = mode.impl("projection")
    if impl == "plain" or any(isinstance(w, Observed) for w in weights):

        def rows(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            h = rms_norm(x, norm[layer], eps)
            return h, [linear(h, w, layer) for w in weights]

        return rowwise(rows, mode.tile, x)
    lead, flat = x.shape[:2], x.reshape(-1, x.shape[-1])
    if mode.chunked:
        h, *inputs = norm_for(flat, norm, layer, weights, eps, mode)
        out = matmuls(inputs, weights, layer, dtype=x.dtype, impl=impl)
        return h.reshape(x.shape), [y.reshape(*lead, -1) for y in out]

    small: dict[int, tuple[Dense, int]] = {}
    for i, w in enumerate(weights):
        one, at = place(w, layer)
        if isinstance(one, Dense) and shape(one)[0] <= SMALL:
            small[i] = one, at
    large = [i for i in range(len(weights)) if i not in small]
    forms = [form(weights[i], layer) for i in large]
    first = normed(flat, norm, layer, [Form(Dense), *forms], [*small.values()], eps=eps, impl=impl)
    out = dict(zip(small, first.products, strict=True))
    if large:
        chosen = [weights[i] for i in large]
        products = project(first.h[1:], chosen, layer, dtype=x.dtype, impl=impl)
        out.update(zip(large, products, strict=True))
    return first.h[0].reshape(x.shape), [out[i].reshape(*lead, -1) for i in range(len(weights))]


def norm_for(
    x: jax.Array, norm: jax.Array, layer: int, weights: Sequence[Weight], eps: float, mode: Mode
) -> list[jax.Array]:
    """Many rows `[M, D]` normed: as they are, then as each weight's product wants them."""
    wanted = [Form(Dense), *(form(w, layer) for w in weights)]
    # Without a scale the form is the kind's.
    places = [(f.kind, i if f.scale is not None else None) for i, f in enumerate(wanted)]
    distinct = dict(zip(reversed(places), reversed(wanted), strict=True))
    impl = mode.impl("projection")
    rows = normed_rows(x, norm, layer, list(distinct.values()), eps=eps, impl=impl)
    made = dict(zip(distinct, rows, strict=True))
    return [made[place] for place in places]


def add_product(
    x: jax.Array, y: jax.Array, w: Weight, layer: int, mode: Mode, ready: bool = False
) -> jax.Array:
    """`x + y Wᵀ` for `x [B, T, D]` and `y [B, T, K]`; `y` is `ready` if it is in `form_after`."""
    impl = mode.impl("projection")
    if impl == "plain" or isinstance(w, Observed):
        return rowwise(lambda x, y: x + linear(y, w, layer, x.dtype), mode.tile, x, y)
    flat, rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    if mode.chunked and ready:
        how: Any = {"residual": flat, "dtype": x.dtype, "impl": impl}
        return matmuls([rows], [w], layer, **how)[0].reshape(x.shape)
    if mode.chunked:
        return matmul(rows, w, layer, residual=flat, impl=impl).reshape(x.shape)
    rows = rows if ready else formed(rows, form(w, layer))
    out = project([rows], [w], layer, residual=flat, dtype=x.dtype, impl=impl)
    return out[0].reshape(x.shape)


def form_after(w: Weight, layer: int, mode: Mode) -> Form | None:
    """The form in which a kernel may leave its result for `add_product`; None: as it is."""
    kernel = mode.impl("projection") != "plain"
    if not kernel or isinstance(w, Observed):
        return None
    return form(w, layer)


def form(w: Weight, layer: int) -> Form:
    """How products with a weight want their inputs."""
    one, at = place(w, layer)
    if isinstance(one, Fp8) and one.input_scale is not None:
        # The tensor cores that multiply E4M3 take both sides from shared memory, in any order.
        return Form(Dense, one.input_scale, at)
    return Form(type(one), None, at)


def _normed(x: jax.Array, norm: jax.Array, layer: int, eps: float, mode: Mode) -> jax.Array:
    rows, impl = x.reshape(-1, x.shape[-1]), mode.impl("projection")
    return normed(rows, norm, layer, [Form(Dense)], eps=eps, impl=impl).h[0]
