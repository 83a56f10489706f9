"""Masks at the size of a picture, and where they begin and end, computed on the device.

Logits are interpolated bilinearly between the centres of their pixels, as
`torch.nn.functional.interpolate` does without aligned corners and antialiasing, and cut at 0. What
comes back is where the mask changes when it is read column by column, which is what COCO's run
lengths are made of: some kB instead of a MB. The size of a picture is data; only the side of the
square that it must fit in, its room, is compiled in.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.tree import tree
from pallas_kernels.mask_changes import mask_changes

ROOMS = (256, 512, 1024, 1536, 2048, 3072, 4096)
"""Sides of the squares that pictures are padded to, in pixels; multiples of `WORD`."""

WORD = 32
"""Pixels in a word of a packed mask."""


@tree
class Places:
    """Where the pixels of P pictures lie among the logits, first by rows and then by columns.

    `size`: `[P, 2]` int32, height and width; `first`: `[P, 2, R]` int32, the logit before a pixel,
    R the room; `fraction`: `[P, 2, R]` float32, the way from there to the next one.
    """

    size: Any
    first: Any
    fraction: Any


@tree
class Outlines:
    """Where K masks of each of P pictures change, read column by column from the upper left corner.

    `count`: `[P, K]` int32, the number of changes; `changes`: `[P, K, 2R]` int32, the pixels
    (x · height + y) that differ from the one before, rising, complete if `count` is at most 2R;
    `words`: `[P, K, R, R / 32]` uint32, those pixels as bits, lowest first, for what is not. What
    lies past `count`, and bits of masks without changes, may be anything.
    """

    count: Any
    changes: Any
    words: Any


def room(height: int, width: int) -> int | None:
    """The smallest room for a picture, or None if there is none that large."""
    return next((side for side in ROOMS if side >= max(height, width)), None)


def places(sizes: Sequence[tuple[int, int]], logits: int, room: int) -> Places:
    """The places of pictures of some heights and widths, for logits of that side; numpy."""
    found = [_place(size, logits, room) for size in sizes]
    first, fraction = (np.stack(part) for part in zip(*found, strict=True))
    return Places(np.array(sizes, np.int32), first, fraction)


def along(wanted: int, logits: int) -> tuple[np.ndarray, np.ndarray]:
    """For one axis of so many pixels: `first` int32 and `fraction` float32, as in `Places`.

    In whole numbers, so that a pixel that lies on a logit has a fraction of exactly 0.
    """
    place = (2 * np.arange(wanted, dtype=np.int64) + 1) * logits - wanted
    place = place.clip(0, 2 * wanted * (logits - 1))
    first, rest = np.divmod(place, 2 * wanted)
    return first.astype(np.int32), (rest / (2 * wanted)).astype(np.float32)


@lru_cache(256)
def _place(size: tuple[int, int], logits: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    axes = [along(wanted, logits) for wanted in size]
    padded = [[np.pad(part, (0, room - len(part))) for part in axis] for axis in axes]
    first, fraction = (np.stack(part) for part in zip(*padded, strict=True))
    return first, fraction


def trace(logits: jax.Array, kept: jax.Array, places: Places) -> Outlines:
    """Outlines of masks.

    Args:
        logits: `[P, K, m, m]`.
        kept: `[P]` int32; of each picture's masks the first so many count, the others are empty.
        places: of the pictures.
    """
    if jax.default_backend() == "gpu":
        return Outlines(*mask_changes(logits, kept, *_parts(places), impl="kernel"))
    counts = jnp.arange(logits.shape[1]) < kept[:, None]
    return jax.vmap(jax.vmap(traced, (0, 0, None)))(logits, counts, places)


def _parts(places: Places) -> tuple[Any, Any, Any]:
    return places.size, places.first, places.fraction


def traced(logits: jax.Array, counts: jax.Array, place: Places) -> Outlines:
    """Of one mask `[m, m]`, empty unless it `counts`."""
    # Barriers, lest the compiler put the making of the mask into each of the sums below.
    words = lax.optimization_barrier(_changed(_on(logits, place) & counts, place))
    number = lax.population_count(words).astype(jnp.int32)
    per_column = lax.optimization_barrier(number.sum(-1))
    changes = _expand(words, _before(per_column), _before(number), place.size[0])
    return Outlines(per_column.sum(), changes, words)


def _on(logits: jax.Array, place: Places) -> jax.Array:
    """The mask, bool `[R, R]` by columns and rows, off beyond the picture."""
    (top, left), (down, across) = place.first, place.fraction
    columns = logits.astype(jnp.float32).T
    last = len(logits) - 1
    upper, lower = columns[:, top], columns[:, jnp.minimum(top + 1, last)]
    between = upper + (lower - upper) * down
    before, after = between[left], between[jnp.minimum(left + 1, last)]
    on = before + (after - before) * across[:, None] > 0
    pixel = jnp.arange(len(left))
    return on & (pixel < place.size[1])[:, None] & (pixel < place.size[0])


def _changed(on: jax.Array, place: Places) -> jax.Array:
    """The pixels that differ from the one before, as words `[R, R / 32]`."""
    height, width = place.size
    packed = _pack(on)
    last = packed[:, (height - 1) // WORD] >> ((height - 1) % WORD).astype(jnp.uint32)
    above = jnp.pad(last & 1, (1, 0))[:-1, None]
    carried = jnp.concatenate([above, packed[:, :-1] >> (WORD - 1)], 1)
    changed = packed ^ (packed << 1 | carried)
    pixel = jnp.arange(len(on))
    # Past the last row and column it is the padding that differs.
    return changed & _pack((pixel < width)[:, None] & (pixel < height))


def _pack(on: jax.Array) -> jax.Array:
    """Bits to words, `[R, R]` bool to `[R, R / 32]` uint32."""
    bits = on.reshape(len(on), -1, WORD).astype(jnp.uint32)
    return (bits << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def _before(numbers: jax.Array) -> jax.Array:
    """The sum of all that come before each, along the last axis.

    Quadratic, and yet less work than the masks; a scan is a long chain of kernels on a GPU.
    """
    index = jnp.arange(numbers.shape[-1])
    return jnp.where(index < index[:, None], numbers[..., None, :], 0).sum(-1)


def _expand(words: jax.Array, start: jax.Array, within: jax.Array, height: jax.Array) -> jax.Array:
    """The first 2R pixels whose bits are set, `[2R]`.

    `start`: `[R]`, the number of those before a column; `within`: `[R, R / 32]`, the number of
    those of its column before a word.
    """
    number = jnp.arange(2 * len(words), dtype=jnp.int32)
    # Of places that start alike only the last has bits.
    column = (start <= number[:, None]).sum(-1) - 1
    number = number - start[column]
    word = (within[column] <= number[:, None]).sum(-1) - 1
    bit = _select(words[column, word], number - within[column, word])
    return column * height + word * WORD + bit


def _select(word: jax.Array, number: jax.Array) -> jax.Array:
    """The place of the set bit of a word before which lie `number` others."""
    place = jnp.zeros_like(number)
    for half in (16, 8, 4, 2, 1):
        low = word >> place.astype(jnp.uint32) & ((1 << half) - 1)
        below = lax.population_count(low).astype(jnp.int32)
        place = jnp.where(number >= below, place + half, place)
        number = jnp.where(number >= below, number - below, number)
    return place
