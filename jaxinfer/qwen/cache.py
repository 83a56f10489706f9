"""Keys and values in pages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.state import SCRATCH_PAGE


class Place(NamedTuple):
    """Where the tokens of a call stand in their sequences.

    Attributes:
        table: `[B, M]` pages of each sequence.
        start: `[B]` index of its first token in this call.
        valid: `[B]` how many of its tokens are to be kept.
    """

    table: jax.Array
    start: jax.Array
    valid: jax.Array


class Cache(NamedTuple):
    """One layer's view of the pages.

    Attributes:
        k, v: `[L, N, 64, Hkv, d]`, pages of all layers.
        layer: which of them.
    """

    k: jax.Array
    v: jax.Array
    layer: int

    def write(self, place: Place, k: jax.Array, v: jax.Array) -> "Cache":
        """With keys and values `[B, T, Hkv, d]` in place; past `valid`, or the table, dropped."""
        T, width = k.shape[1], place.table.shape[1]
        index = place.start[:, None] + jnp.arange(T)
        number = index // CHUNK
        page = jnp.take_along_axis(place.table, jnp.minimum(number, width - 1), axis=1)
        kept = (jnp.arange(T) < place.valid[:, None]) & (number < width)
        page = jnp.where(kept, page, SCRATCH_PAGE)
        at = (self.layer, page, index % CHUNK)
        return self._replace(
            k=self.k.at[at].set(_stored(k, self.k.dtype)),
            v=self.v.at[at].set(_stored(v, self.v.dtype)),
        )

    def read(self, pages: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[64 · n, Hkv, d]` of pages `[n]`."""
        # Layer and page in one index: the layer alone would be copied out whole.
        k, v = (a[self.layer, pages].astype(dtype) for a in (self.k, self.v))
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


def _stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` in the type of the pages; E4M3 has no infinity, and rounds what is too large to NaN."""
    if dtype == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)
