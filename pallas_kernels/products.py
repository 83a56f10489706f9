"""Products of a weight with few rows of inputs, on tensor cores, in one step.

A tensor core multiplies with sixteen columns whether there are sixteen rows of inputs or one. Where
there are few the idle columns let a program share the length of a product among its warps: `parts`
pieces of a row of the weight become that many rows of the tile, each meets every column, and column
`p` holds the inputs of part `p` only.

    tile[(p, n), k] = w[n, p·K/P + k]      columns[k, (p, r)] = x[r, p·K/P + k]
    y[n, r] = Σ_p (tile · columns)[(p, n), (p, r)]

What lies off that diagonal is computed and dropped. Parts are added up in a tree that is written
out here, so that no compiler's choice shows in the bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl
from pallas_kernels.matmul import CODES, convert, dequantise
from pallas_kernels.weights import NVFP4_BLOCK, Dense, Fp8, Nvfp4

COLUMNS = 16
"""The fewest columns of a tensor core's product."""

Columns = Callable[[Any, int], jax.Array]
"""From an offset along K and a count to inputs `[count, columns]`."""


def width(parts: int, rows: int) -> int:
    """Columns for so many parts of so many rows."""
    return max(COLUMNS, parts * rows)


def columns(
    x: Any,
    rows: jax.Array | int,
    count: jax.Array | int,
    together: int,
    parts: int,
    stride: int,
    lead: tuple = (),
) -> Columns:
    """Inputs laid out as columns.

    Args:
        x: reference to `[…, R, K]`.
        rows: number of the first row.
        count: rows of `x` that exist.
        together: rows side by side.
        parts: parts of each.
        stride: elements from one part to the next.
        lead: leading indices into `x`.
    """
    c = jnp.arange(width(parts, together))
    part, row = c // together, rows + c % together
    real = (part < parts) & (row < count)

    def load(offset: Any, size: int) -> jax.Array:
        k = offset + jnp.arange(size)
        at = x.at[*lead, row[None, :], (part * stride)[None, :] + k[:, None]]
        mask = jnp.broadcast_to(real[None, :], (size, c.shape[0]))
        return plt.load(at, mask=mask, other=jnp.zeros((), x.dtype))

    return load


def gathered(x: Any, row: jax.Array, start: jax.Array, there: jax.Array) -> Columns:
    """Inputs laid out as columns, each of a row of its own.

    Args:
        x: reference to `[R, K]`.
        row: `[columns]` int32, which row.
        start: `[columns]` int32, where in it.
        there: `[columns]` bool, which columns are not zero.
    """

    def load(offset: Any, size: int) -> jax.Array:
        k = offset + jnp.arange(size)
        at = x.at[row[None, :], start[None, :] + k[:, None]]
        mask = jnp.broadcast_to(there[None, :], (size, there.shape[0]))
        return plt.load(at, mask=mask, other=jnp.zeros((), x.dtype))

    return load


def product(
    w: Any,
    lead: tuple,
    rows: jax.Array,
    part: jax.Array,
    span: int,
    steps: int,
    inputs: Columns,
    impl: Impl,
) -> jax.Array:
    """`[M, columns]` float32: rows of a weight times inputs, before `scales`.

    Args:
        w: the weight, with references for leaves, NVFP4 codes as `words`.
        lead: leading indices into it, scalars or `[M]`.
        rows: `[M]` int32, its rows.
        part: `[M]` int32, which part of K each is multiplied over.
        span: elements of K in a part.
        steps: pieces in which they are loaded.
        inputs: see `columns`; they are in the order of the weight's kind (`in_order`).
        impl: how the kernel runs.
    """
    size = span // steps

    def step(number: Any) -> jax.Array:
        raw = fetch(w, lead, rows, part, span, size, number)
        return multiply(type(w), raw, inputs(number * size, size), impl)

    if steps == 1:
        return step(jnp.int32(0))
    start = jnp.zeros((rows.shape[0], inputs(0, 16).shape[1]), jnp.float32)
    return lax.fori_loop(0, steps, lambda i, total: total + step(i), start)


def fetch(
    w: Any, lead: tuple, rows: jax.Array, part: jax.Array, span: int, size: int, number: Any
) -> tuple[jax.Array, ...]:
    """A piece of some rows of a weight as it is stored: `size` elements of each row's part.

    Args:
        w: see `product`.
        lead: the same.
        rows: the same.
        part: the same.
        span: the same.
        size: elements of a piece.
        number: which of the pieces.
    """
    lead = tuple(i[:, None] if jnp.ndim(i) else i for i in lead)

    def load(ref: Any, each: int) -> jax.Array:
        # No divisions: the compiler has to see that addresses are multiples of 16 bytes.
        col = (part * (span // each))[:, None] + number * (size // each)
        return plt.load(ref.at[(*lead, rows[:, None], col + jnp.arange(size // each)[None, :])])

    match w:
        case Dense():
            return (load(w.w, 1),)
        case Fp8():
            return (load(w.q, 1),)
        case _:
            return load(w.q, CODES), load(w.block_scale, NVFP4_BLOCK)


def product_at_once(
    w: Any,
    lead: tuple,
    rows: jax.Array,
    part: jax.Array,
    span: int,
    steps: int,
    inputs: Columns,
    impl: Impl,
) -> jax.Array:
    """`product` that has all pieces of the weight in registers before it multiplies the first."""
    # The interpreter takes no Python numbers beside arrays.
    size, numbers = span // steps, [np.int32(number) for number in range(steps)]
    pieces = [fetch(w, lead, rows, part, span, size, number) for number in numbers]
    total = multiply(type(w), pieces[0], inputs(numbers[0], size), impl)
    for number in numbers[1:]:
        total = total + multiply(type(w), pieces[number], inputs(number * size, size), impl)
    return total


def multiply(kind: type, raw: tuple[jax.Array, ...], x: jax.Array, impl: Impl) -> jax.Array:
    """What was fetched times inputs `[size, columns]` -> `[M, columns]` float32."""
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float16
    if kind is Dense:
        tile = raw[0].astype(dtype)
    elif kind is Fp8:
        tile = convert(raw[0], dtype)
    else:
        codes, blocks = raw
        tile = dequantise(codes, blocks, impl)
    return jnp.dot(tile, x.astype(dtype), preferred_element_type=jnp.float32)


def diagonal(products: jax.Array, parts: int, together: int) -> jax.Array:
    """`[parts·n, columns]` -> `[n, together]`: the parts of each row's own columns, added up."""
    c = products.shape[1]
    y = products.reshape(parts, -1, c)
    own = jnp.arange(c)[None, None, :] // together == jnp.arange(parts)[:, None, None]
    # All but one of the terms are zero, so the order of these sums is no matter.
    y = jnp.sum(jnp.where(own, y, 0.0).reshape(parts, y.shape[1], -1, together), axis=2)
    return tree_sum(y)


def tree_sum(y: jax.Array) -> jax.Array:
    """`[P, …]` -> `[…]`, `P` a power of two, by pairs of neighbours: two terms have no order."""
    while y.shape[0] > 1:
        y = jnp.sum(y.reshape(y.shape[0] // 2, 2, *y.shape[1:]), axis=1)
    return y.reshape(y.shape[1:])


def tree_of(y: list[jax.Array]) -> jax.Array:
    """`tree_sum` of a list."""
    while len(y) > 1:
        y = [a + b for a, b in zip(y[::2], y[1::2], strict=True)]
    return y[0]


def shape(w: Dense | Fp8 | Nvfp4) -> tuple[int, int]:
    """Output and input features (N, K)."""
    match w:
        case Dense():
            return w.w.shape[-2], w.w.shape[-1]
        case Fp8():
            return w.q.shape[-2], w.q.shape[-1]
        case Nvfp4():
            return w.q.shape[-2], 2 * w.q.shape[-1]
