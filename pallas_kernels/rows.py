"""Computing many rows so that the bits of one do not depend on the others.

XLA chooses its loop order, vector width and matmul routine by the whole shape of an operation, so
a row of a `[5, D]` norm may differ in its last bit from the same row of a `[1, D]` one. Both
functions therefore run one program of one fixed shape, again and again, `sealed` so that XLA
does not merge it into its neighbours. `tile=None` gives all that up for speed: that is what
training wants.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def rowwise(fn: Callable[..., Any], tile: int | None, *rows: jax.Array) -> Any:
    """Apply `fn` to arrays of rows, `tile` rows at a time.

    Args:
        fn: takes arrays `[tile, ...]` and returns a pytree of arrays `[tile, ...]`; each output
            row must depend on the same input row alone.
        tile: rows a call, or None to call `fn` once on all rows.
        rows: arrays `[B, T, ...]` that share their two leading axes.

    Returns:
        The pytree that `fn` returns, leaves `[B, T, ...]`.
    """
    lead = rows[0].shape[:2]
    flat = [r.reshape(-1, *r.shape[2:]) for r in rows]
    count = flat[0].shape[0]
    if tile is None:
        out = fn(*flat)
    else:
        missing = -count % tile
        padded = [jnp.pad(r, [(0, missing)] + [(0, 0)] * (r.ndim - 1)) for r in flat]
        tiles = [r.reshape(-1, tile, *r.shape[1:]) for r in padded]
        out = lax.map(lambda t: sealed(fn, *t), tuple(tiles))
        out = jax.tree.map(lambda y: lax.collapse(y, 0, 2)[:count], out)
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), out)


def each(fn: Callable[..., Any], tile: int | None, *args: Any) -> Any:
    """Apply `fn` to every element along the leading axis of `args` (pytrees of arrays).

    One element after another with `tile` set, all at once (`vmap`) with `tile=None`.
    """
    if tile is None:
        return jax.vmap(fn)(*args)
    return lax.map(lambda a: sealed(fn, *a), args)


def sealed(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, compiled alike wherever it stands: nothing is fused across its border.

    Barriers are not enough. XLA inlines a loop of one trip and then chooses the layout of what was
    its body together with all around it, and with the layout how a sum is split among threads.
    Therefore arrays cross the border in row-major order.
    """
    return lax.optimization_barrier(_row_major(fn(*_row_major(lax.optimization_barrier(args)))))


def _row_major(tree: Any) -> Any:
    def pin(a: jax.Array) -> jax.Array:
        return with_layout_constraint(a, Layout(tuple(range(a.ndim)))) if a.ndim > 1 else a

    return jax.tree.map(pin, tree)
