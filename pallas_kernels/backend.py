"""How a kernel is run: as plain JAX, compiled for a GPU, or interpreted on a CPU."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

Impl = Literal["plain", "kernel", "interpret"]
"""The plain-jnp reference, the kernel on a GPU, or the kernel's interpretation on any device."""

# Pallas' Triton backend launches cheaply and will go one day; each kernel stands behind a function
# with a reference, so that it can be written anew.
warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning, module="jax")


def as_data(*numbers: int) -> jax.Array:
    """Numbers of layers, as an argument: what is traced and compiled for one layer is for all.

    A number more keeps XLA from filling an array of equal ones with a kernel of its own.
    """
    return jnp.asarray(np.array([*numbers, -1], np.int32))


def triton_call(
    body: Callable[..., None],
    *args: jax.Array,
    grid: Sequence[int],
    out_shape: Any,
    impl: Impl,
    name: str,
    warps: int = 4,
    stages: int = 2,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """Run a Pallas kernel over whole arrays: `body` is given a reference to each, uncut.

    Args:
        body: takes references to `args`, then to the outputs.
        args: arrays in device memory.
        grid: programs along each axis.
        out_shape: pytree of `jax.ShapeDtypeStruct`.
        impl: "kernel" or "interpret".
        name: what it is called in a profile.
        warps: warps a program.
        stages: loads kept in flight in a loop around `pl.dot`.
        aliases: arguments that are also outputs, and which.
    """
    params = plt.CompilerParams(num_warps=warps, num_stages=stages)
    call = pl.pallas_call(
        body,
        grid=tuple(grid),
        out_shape=out_shape,
        compiler_params=params,
        input_output_aliases=dict(aliases or {}),
        interpret=impl == "interpret",
        name=name,
    )
    return call(*args)
