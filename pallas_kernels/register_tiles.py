"""Tiles of quantised weights that are loaded into the registers in which tensor cores read them.

Hopper's tensor cores take the left operand from registers: of 64 rows by 16 columns, thread
`(l, t)` of warp `w`, with `l < 8` and `t < 4`, holds columns `2t, 2t + 1, 2t + 8, 2t + 9` of rows
`16w + l` and `16w + l + 8`. Columns may come in any order if the inputs do (`in_order`), so that a
thread's are 16 neighbouring bytes of a row. Here rows come in that order too: a tile is loaded as

    [group, half, w, l] x 64 bytes          row 16w + 8 half + l, bytes 64 group … of its piece

which a compiler that gives 16 neighbouring bytes to a thread, four threads to a row and eight rows
to a warp distributes exactly as the product wants it. Otherwise every tile would go through shared
memory, where all warps wait for one another, and for the loads: nothing could be asked for ahead.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl
from pallas_kernels.matmul import CODES, convert_ordered, dequantise_ordered, words
from pallas_kernels.products import Columns
from pallas_kernels.products import fetch as fetch_any
from pallas_kernels.products import multiply as multiply_any
from pallas_kernels.weights import NVFP4_BLOCK, Dense, Fp8, Nvfp4

ROWS = (64, 128)
"""Of a tile, for four warps and for eight."""

PAIR = 2 * NVFP4_BLOCK
"""Elements of a pair of block scales, which a thread loads at once."""

Where = Callable[[jax.Array], tuple[tuple, jax.Array, jax.Array]]
"""From rows `[n]` of a tile to leading indices into the weight, its rows, and which part of K."""


UNITS: dict[type, int] = {Dense: 0, Fp8: 64, Nvfp4: 128}
"""Elements in 64 bytes of a row."""


def fits(kind: type, rows: int, size: int) -> bool:
    """Whether pieces of `size` elements of so many rows can be loaded this way."""
    return kind is not Dense and rows in ROWS and size % UNITS[kind] == 0


def prepared(w: Dense | Fp8 | Nvfp4, rows: int, size: int) -> Dense | Fp8 | Nvfp4:
    """Outside a kernel: NVFP4 codes as words of eight, block scales in pairs; the same bytes."""
    if not isinstance(w, Nvfp4) or not fits(type(w), rows, size):
        return words(w)
    q = w.q.reshape(*w.q.shape[:-1], -1, CODES // 2)
    blocks = w.block_scale.reshape(*w.block_scale.shape[:-1], -1, 2)
    return Nvfp4(
        lax.bitcast_convert_type(q, jnp.uint32),
        lax.bitcast_convert_type(lax.bitcast_convert_type(blocks, jnp.uint8), jnp.uint16),
        w.scale,
    )


def nothing(layer: jax.Array) -> jax.Array:
    """Zero, from the number of a layer, without the compiler's knowing."""
    return lax.shift_right_logical(layer, jnp.int32(31))


def fetch(
    w: Any,
    where: Where,
    rows: int,
    span: int,
    size: int,
    number: Any,
    zero: jax.Array,
    there: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """A piece of some rows of a weight as it is stored.

    Args:
        w: the weight, with references for leaves, `prepared`.
        where: see `Where`.
        rows: of the tile.
        span: elements of K in a part.
        size: elements of a piece of a part.
        number: which of the pieces.
        zero: see `nothing`.
        there: bool, whether to load at all; None: always. Otherwise what comes may be anything.
    """
    if not fits(type(w), rows, size):
        lead, row, part = where(jnp.arange(rows))
        return fetch_any(w, lead, row, part, span, size, number)
    unit = UNITS[type(w)]
    r = jnp.arange(size // unit * rows)
    warps = rows // 16
    lead, row, part = where(r // 8 % warps * 16 + r // (8 * warps) % 2 * 8 + r % 8)
    lead = tuple(i[:, None] if jnp.ndim(i) else i for i in lead)
    group = r // rows

    def load(ref: Any, each: int, hidden: jax.Array | int) -> jax.Array:
        # No divisions: the compiler has to see that addresses are multiples of 16 bytes.
        col = part * (span // each) + number * (size // each) + group * (unit // each)
        along = jnp.arange(unit // each) ^ hidden
        where = ref.at[(*lead, row[:, None], col[:, None] + along[None, :])]
        mask = None if there is None else jnp.full((r.size, unit // each), there)
        return plt.load(where, mask=mask)

    if isinstance(w, Fp8):
        return (load(w.q, 1, 0),)
    # Not seen to be neighbours, pairs of scales go to the threads that have their codes.
    return load(w.q, CODES, 0), load(w.block_scale, PAIR, zero)


def multiply(
    kind: type, raw: tuple[jax.Array, ...], rows: int, x: jax.Array, impl: Impl
) -> jax.Array:
    """What was fetched times inputs `[size, columns]` -> `[rows, columns]` float32."""
    if not fits(kind, rows, x.shape[0]):
        return multiply_any(kind, raw, x, impl)
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float16
    if kind is Fp8:
        pairs = _rows_first(raw[0].reshape(-1, 4, 8, 2), rows).transpose(0, 1, 3, 2, 4)
        tile = convert_ordered(pairs, dtype)
    else:
        codes, pairs = raw
        both = jnp.stack([pairs & 0xFF, pairs >> 8], axis=-1).astype(jnp.uint8)
        blocks = lax.bitcast_convert_type(both, jnp.float8_e4m3fn)
        blocks = jnp.broadcast_to(blocks[..., None], (*blocks.shape, 2)).reshape(-1, 4, 4)
        codes, blocks = (
            _rows_first(a, rows).transpose(0, 1, 3, 2) for a in (codes.reshape(-1, 4, 4), blocks)
        )
        tile = dequantise_ordered(codes, blocks, impl)
    return jnp.dot(tile, x.astype(dtype), preferred_element_type=jnp.float32)


def multiplied(w: Any, where: Where, t: Any, rows: int, x: Columns, impl: Impl) -> jax.Array:
    """A tile's product `[rows, columns]`: all of it is loaded before any of it is multiplied.

    Args:
        w: the weight, `prepared`.
        where: see `Where`.
        t: how it is cut: `span`, `size` and `steps`.
        rows: of the tile.
        x: inputs, see `products.columns`.
        impl: how to compute.
    """
    # The interpreter takes no Python numbers beside arrays.
    numbers = [np.int32(number) for number in range(t.steps)]
    zero = nothing(where(jnp.arange(1))[0][0])
    raw = [fetch(w, where, rows, t.span, t.size, number, zero) for number in numbers]
    return added(w, raw, rows, [x(number * t.size, t.size) for number in numbers], impl)


def added(
    w: Any, raw: list[tuple[jax.Array, ...]], rows: int, x: list[jax.Array], impl: Impl
) -> jax.Array:
    """The sum of products of what was fetched with inputs, one piece after another."""
    steps = zip(raw, x, strict=True)
    return reduce(jnp.add, (multiply(type(w), piece, rows, x, impl) for piece, x in steps))


def _rows_first(a: jax.Array, rows: int) -> jax.Array:
    """`[group · half · w · l, …]` -> `[row, group, …]`."""
    rest = a.shape[1:]
    a = a.reshape(-1, 2, rows // 16, 8, *rest)
    order = (2, 1, 3, 0, *range(4, a.ndim))
    return a.transpose(order).reshape(rows, -1, *rest)
