"""Many small arrays to the device at once.

A copy to a GPU costs the host tens of microseconds whatever its size, and a request needs about
forty small arrays there before its first token: that would be a tenth of the time it waits for it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class _Leaf(NamedTuple):
    """Shape and type of an array among the words of all."""

    shape: tuple[int, ...]
    dtype: np.dtype


def put(values: Any, device: Any = None) -> Any:
    """Copy a pytree of NumPy arrays to a device, in one piece.

    Args:
        values: leaves are bool, or of a type of 4 bytes, if there are several.
        device: where to; None for the default.

    Returns:
        The same pytree of JAX arrays.

    Raises:
        ValueError: a leaf is of another type.
    """
    leaves, tree = jax.tree.flatten(values)
    if len(leaves) < 2:
        return jax.device_put(values, device)
    leaves = [np.asarray(leaf) for leaf in leaves]
    layout = tuple(_Leaf(leaf.shape, leaf.dtype) for leaf in leaves)
    words = np.concatenate([_words(leaf) for leaf in leaves])
    return jax.tree.unflatten(tree, _apart(jax.device_put(words, device), layout))


def _words(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype == bool:
        leaf = leaf.astype(np.uint32)
    if leaf.dtype.itemsize != 4:
        raise ValueError(f"cannot send {leaf.dtype}: only bool and types of 4 bytes")
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint32)


@partial(jax.jit, static_argnums=1)
def _apart(words: jax.Array, layout: tuple[_Leaf, ...]) -> list[jax.Array]:
    ends = np.cumsum([np.prod(leaf.shape, dtype=int) for leaf in layout])
    found = []
    for leaf, part in zip(layout, jnp.split(words, ends[:-1]), strict=True):
        typed = part != 0 if leaf.dtype == bool else lax.bitcast_convert_type(part, leaf.dtype)
        found.append(typed.reshape(leaf.shape))
    return found
