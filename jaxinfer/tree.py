"""Dataclasses as pytrees."""

from dataclasses import dataclass
from typing import dataclass_transform

import jax


@dataclass_transform(frozen_default=True)
def tree[T](cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that JAX treats as a pytree, all fields data."""
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))
