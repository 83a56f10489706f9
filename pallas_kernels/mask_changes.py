"""Where masks change when they are read column by column, from logits of less resolution.

A pixel of the picture lies between four logits `l`, and is on if what is between them is positive:

    at(x, y) = u + (v − u) a_x,   u = l[t, s] + (l[t + 1, s] − l[t, s]) d_y,   v the same at s + 1

with `t, d_y` the logit above row y and the way from there to the next, `s, a_x` those of column x.
It is a change if it differs from the pixel before it: the one above, or for the first of a column
the last one of the column before. See `jaxinfer.sam.outlines` for what becomes of them.

Two kernels, a program of each being some columns of a mask: one finds the changes and packs them
into words, the other lists them. Masks that do not count, columns beyond the picture, and columns
without a change are passed over.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call

WORD = 32
"""Pixels in a word."""
COLUMNS = 8
"""Of a mask, a program."""
WORDS = 8
"""Of each column, that are worked on together."""


def reference(
    logits: jax.Array, kept: jax.Array, size: jax.Array, first: jax.Array, fraction: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `mask_changes`."""

    def one(
        logits: jax.Array, counts: jax.Array, size: jax.Array, first: jax.Array, fraction: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        (height, width), (top, left), (down, across) = size, first, fraction
        columns, last, pixel = logits.astype(jnp.float32).T, len(logits) - 1, jnp.arange(len(top))
        upper, lower = columns[:, top], columns[:, jnp.minimum(top + 1, last)]
        between = upper + (lower - upper) * down
        before, after = between[left], between[jnp.minimum(left + 1, last)]
        inside = counts & (pixel < width)[:, None] & (pixel < height)
        on = inside & (before + (after - before) * across[:, None] > 0)
        above = jnp.concatenate([jnp.pad(on[:-1, height - 1], (1, 0))[:, None], on[:, :-1]], 1)
        changed = inside & (on != above)
        x, y = jnp.nonzero(changed, size=2 * len(top), fill_value=0)
        bits = changed.reshape(len(on), -1, WORD).astype(jnp.uint32)
        words = (bits << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
        return changed.sum(dtype=jnp.int32), (x * height + y).astype(jnp.int32), words

    counts = jnp.arange(logits.shape[1]) < kept[:, None]
    each = jax.vmap(one, (0, 0, None, None, None))
    return jax.vmap(each)(logits, counts, size, first, fraction)


def mask_changes(
    logits: jax.Array,
    kept: jax.Array,
    size: jax.Array,
    first: jax.Array,
    fraction: jax.Array,
    *,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Changes of K masks of each of P pictures in rooms of R x R pixels.

    Args:
        logits: `[P, K, m, m]`, rows first.
        kept: `[P]` int32, how many masks of a picture count; the others have no changes.
        size: `[P, 2]` int32, height and width of the picture.
        first: `[P, 2, R]` int32, the logit before each row and each column, R a multiple of 256.
        fraction: `[P, 2, R]` float32, the way from there to the next one.
        impl: see `Impl`.

    Returns:
        How many there are, `[P, K]` int32; the first 2R of them, `x · height + y`, rising,
        `[P, K, 2R]` int32, which past their number may be anything; all of them as bits, lowest
        first, `[P, K, R, R / 32]` uint32, which may be anything where nothing counts.
    """
    if impl == "plain":
        return reference(logits, kept, size, first, fraction)
    (P, K), R = logits.shape[:2], first.shape[-1]
    shape, grid = partial(jax.ShapeDtypeStruct, dtype=jnp.int32), (R // COLUMNS, K, P)
    words, per_column = triton_call(
        _find,
        *(logits, kept, size, first, fraction),
        grid=grid,
        out_shape=(shape((P, K, R, R // WORD)), shape((P, K, R))),
        impl=impl,
        name="mask_changes_find",
    )
    count, changes = triton_call(
        _list,
        *(words, per_column, size),
        grid=grid,
        out_shape=(shape((P, K)), shape((P, K, 2 * R))),
        impl=impl,
        name="mask_changes_list",
    )
    return count, changes, lax.bitcast_convert_type(words, jnp.uint32)


def _find(
    logits: Any, kept: Any, size: Any, first: Any, fraction: Any, words: Any, per_column: Any
) -> None:
    block, k, p = (pl.program_id(axis) for axis in range(3))
    height, width = size[p, 0], size[p, 1]
    R, last = first.shape[-1], logits.shape[-1] - 1
    x = (block * COLUMNS + jnp.arange(COLUMNS))[:, None, None]
    bit = jnp.arange(WORD)[None, None, :]
    counts = (k < kept[p]) & (block * COLUMNS < width)

    def is_on(x: jax.Array, y: jax.Array) -> jax.Array:
        inside = (x >= 0) & (x < width) & (y < height)
        across = jnp.clip(x, 0, R - 1)
        top, left = plt.load(first.at[p, y * 0, y]), plt.load(first.at[p, 1 + 0 * across, across])

        def between(column: jax.Array) -> jax.Array:
            upper, lower = (
                plt.load(logits.at[p, k, row, column], mask=inside, other=0.0).astype(jnp.float32)
                for row in (top + 0 * column, jnp.minimum(top + 1, last) + 0 * column)
            )
            return upper + (lower - upper) * plt.load(fraction.at[p, 0 * y, y])

        column = left + 0 * top
        before, after = between(column), between(jnp.minimum(column + 1, last))
        way = plt.load(fraction.at[p, 1 + 0 * across, across])
        return inside & (before + (after - before) * way > 0)

    def some_words(i: jax.Array, total: jax.Array) -> jax.Array:
        word = (i * WORDS + jnp.arange(WORDS))[None, :, None]
        y = word * WORD + bit
        # Before the first of a column is the last one of the column before.
        above = is_on(x - (y == 0).astype(jnp.int32), jnp.where(y == 0, height - 1, y - 1))
        changed = (is_on(x, y) != above) & (x < width) & (y < height)
        packed = jnp.sum(lax.shift_left(changed.astype(jnp.int32), bit + 0 * x + 0 * word), axis=2)
        at = words.at[p, k, x[:, :, 0], word[:, :, 0]]
        plt.store(at, packed)
        return total + jnp.sum(lax.population_count(packed), axis=1)

    column = pl.ds(block * COLUMNS, COLUMNS)
    nothing = jnp.zeros(COLUMNS, jnp.int32)

    @pl.when(counts)
    def _() -> None:
        total = lax.fori_loop(0, R // (WORD * WORDS), some_words, nothing)
        plt.store(per_column.at[p, k, column], total)

    pl.when(~counts)(lambda: plt.store(per_column.at[p, k, column], nothing))


def _list(words: Any, per_column: Any, size: Any, count: Any, changes: Any) -> None:
    block, k, p = (pl.program_id(axis) for axis in range(3))
    height, (R, most) = size[p, 0], (per_column.shape[-1], changes.shape[-1])
    every = plt.load(per_column.at[p, k, jnp.arange(R)])
    number = jnp.arange(R)
    x = block * COLUMNS + jnp.arange(COLUMNS)
    start = jnp.sum(jnp.where(number[None, :] < x[:, None], every[None, :], 0), axis=1)
    mine = (number >= block * COLUMNS) & (number < (block + 1) * COLUMNS)
    bit = jnp.arange(WORD)[None, None, :]

    def some_words(i: jax.Array, before: jax.Array) -> jax.Array:
        word = i * WORDS + jnp.arange(WORDS)
        packed = plt.load(words.at[p, k, x[:, None], word[None, :]])
        each = lax.population_count(packed)
        rank = before[:, None] + jnp.cumsum(each, axis=1) - each
        packed, bits = packed[:, :, None] + 0 * bit, lax.shift_left(jnp.ones_like(bit), bit)
        rank = rank[:, :, None] + lax.population_count(packed & (bits - 1))
        there = ((packed & bits) != 0) & (rank < most)
        pixel = x[:, None, None] * height + word[None, :, None] * WORD + bit
        # Interpreted, a masked store writes back what it found: let that be outside.
        plt.store(changes.at[p, k, jnp.where(there, rank, most)], pixel, mask=there)
        return before + jnp.sum(each, axis=1)

    @pl.when(jnp.sum(jnp.where(mine, every, 0)) > 0)
    def _() -> None:
        lax.fori_loop(0, R // (WORD * WORDS), some_words, start)

    @pl.when(block == 0)
    def _() -> None:
        count[p, k] = jnp.sum(every)
