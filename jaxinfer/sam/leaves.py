"""Parameters before they have values: what each is called in Meta's files, its shape and layout.

A tree of `Leaf` (`jaxinfer.sam.structure`) is the one description from which all else about weights
follows: random initialisation (`init`), and the names, shapes and checks of `checkpoints.sam`.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sam.params import Attention, Linear, Norm

Layout = Literal["plain", "patch", "conv", "transposed", "table"]
Init = Literal["matrix", "ones", "zeros", "table"]


@dataclass(frozen=True)
class Leaf:
    """One parameter.

    Attributes:
        name: its tensor in Meta's `sam3.pt`, without the prefix `detector.` (for the click head,
            with `tracker.`).
        shape: as the file has it.
        layout: how it is laid out here.
            "plain": as in the file.
            "patch": `[out, in, h, w]` becomes `[out, h w in]`.
            "conv": `[out, in, h, w]` becomes `[h, w, in, out]`.
            "transposed": `[in, out, h, w]` becomes `[h w out, in]`.
            "table": `[1, 1 + n, d]`, the class token's slot in front, becomes `[n, d]`.
        init: how random initialisation draws it: "matrix" (normal, 1/fan-in), "table" (normal,
            0.3), "ones" (norms) or "zeros" (biases), both with noise so that no error hides.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout = "plain"
    init: Init = "matrix"

    @property
    def arranged(self) -> tuple[int, ...]:
        """Its shape in the engine."""
        match self.layout:
            case "plain":
                return self.shape
            case "patch":
                out, inputs, height, width = self.shape
                return out, height * width * inputs
            case "conv":
                out, inputs, height, width = self.shape
                return height, width, inputs, out
            case "transposed":
                inputs, out, height, width = self.shape
                return height * width * out, inputs
            case "table":
                return self.shape[1] - 1, self.shape[2]

    def arrange(self, stored: np.ndarray) -> np.ndarray:
        """The parameter, from the tensor as the file has it."""
        match self.layout:
            case "plain":
                return stored
            case "patch":
                return stored.transpose(0, 2, 3, 1).reshape(self.arranged)
            case "conv":
                return stored.transpose(2, 3, 1, 0)
            case "transposed":
                return stored.transpose(2, 3, 1, 0).reshape(self.arranged)
            case "table":
                return stored[0, 1:]

    def restore(self, arranged: np.ndarray) -> np.ndarray:
        """The tensor as the file has it, from the parameter; the class token's slot is zero."""
        match self.layout:
            case "plain":
                return arranged
            case "patch":
                out, inputs, height, width = self.shape
                return arranged.reshape(out, height, width, inputs).transpose(0, 3, 1, 2)
            case "conv":
                return arranged.transpose(3, 2, 0, 1)
            case "transposed":
                inputs, out, height, width = self.shape
                return arranged.reshape(height, width, out, inputs).transpose(3, 2, 0, 1)
            case "table":
                return np.pad(arranged, ((1, 0), (0, 0)))[None]


def linear(name: str, rows: int, cols: int) -> Linear:
    """A matrix and its bias."""
    return Linear(Leaf(f"{name}.weight", (rows, cols)), Leaf(f"{name}.bias", (rows,), init="zeros"))


def conv(name: str, out: int, inputs: int, side: int, layout: Layout = "conv") -> Linear:
    """A convolution and its bias; one of side 1 is a matrix."""
    layout = "patch" if side == 1 else layout
    shape = (inputs, out) if layout == "transposed" else (out, inputs)
    return Linear(
        Leaf(f"{name}.weight", (*shape, side, side), layout),
        Leaf(f"{name}.bias", (out,), init="zeros"),
    )


def norm(name: str, width: int) -> Norm:
    """A norm."""
    return Norm(
        Leaf(f"{name}.weight", (width,), init="ones"), Leaf(f"{name}.bias", (width,), init="zeros")
    )


def table(name: str, *shape: int) -> Leaf:
    """A learnt table."""
    return Leaf(name, shape, init="table")


def attention(name: str, width: int) -> Attention:
    """Packed projections as `torch.nn.MultiheadAttention` names them."""
    return Attention(
        Linear(
            Leaf(f"{name}.in_proj_weight", (3 * width, width)),
            Leaf(f"{name}.in_proj_bias", (3 * width,), init="zeros"),
        ),
        linear(f"{name}.out_proj", width, width),
    )


def init(leaves: Any, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Any:
    """Random parameters for a tree of `Leaf`; nothing is zero or one, so that no error hides."""
    found, treedef = jax.tree.flatten(leaves)
    keys = jax.random.split(key, len(found))
    return treedef.unflatten(
        [_draw(leaf, key, dtype) for leaf, key in zip(found, keys, strict=True)]
    )


def _draw(leaf: Leaf, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    noise = jax.random.normal(key, leaf.arranged, dtype)
    match leaf.init:
        case "matrix":
            fan_in = math.prod(leaf.arranged[:-1] if leaf.layout == "conv" else leaf.arranged[-1:])
            return noise / math.sqrt(fan_in)
        case "table":
            return 0.3 * noise
        case "ones":
            return 1 + 0.1 * noise
        case "zeros":
            return 0.05 * noise
