"""How far the rows and columns of a grid lie from boxes, as a bias of attention.

For an axis of the picture, a box from a to b, both as parts of its side, and cell c of g:

    l(x) = sign(x) log2(1 + |x|) / log2(8)
    bias = W2 ReLU(W1 [l(8 (c / g - a)), l(8 (c / g - b))] + b1) + b2

one number a head. The perceptron's hidden layer is as wide as the model, for every box and cell:
the kernel keeps it in registers, in bfloat16 where it meets W2. The first token of a prompt is no
box and has no bias.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, triton_call

SMALLEST = 16
"""Columns of a product of matrices at least, and therefore heads of the kernel at most."""


def box_bias(
    boxes: jax.Array,
    w1: jax.Array,
    b1: jax.Array,
    w2: jax.Array,
    b2: jax.Array,
    grid: int,
    *,
    impl: Impl,
    cells: int = 128,
    hidden: int = 64,
    warps: int = 4,
) -> jax.Array:
    """The bias by columns and by rows, `[2, P, 1 + Q, H, g]` float32.

    Args:
        boxes: `[P, Q, 4]` float32, cx, cy, w, h.
        w1: `[2, M, 2]`, of the perceptron for x and the one for y.
        b1: `[2, M]`.
        w2: `[2, H, M]`.
        b2: `[2, H]`.
        grid: g.
        impl: see `Impl`.
        cells: a program.
        hidden: channels of the hidden layer at a time.
        warps: a program.

    Raises:
        ValueError: there is no kernel for so many heads or channels.
    """
    prompts, queries, _ = boxes.shape
    heads, width = w2.shape[1:]
    if impl == "plain":
        return _plain(boxes, w1, b1, w2, b2, grid)
    if not fits(heads, width, hidden):
        raise ValueError(
            f"the kernel knows up to {SMALLEST} heads and multiples of {hidden} channels, not "
            f"{heads} and {width}: ask for plain"
        )
    # The row of a box, and one in front of each prompt's for the token that is none.
    boxes = jnp.pad(boxes, ((0, 0), (1, 0), (0, 0)))
    shape = (2, prompts, 1 + queries, heads, grid)

    def body(*refs: Any) -> None:
        _measure(*refs, cells=cells, hidden=hidden)

    return triton_call(
        body,
        boxes,
        w1.astype(jnp.float32),
        b1.astype(jnp.float32),
        w2.astype(jnp.bfloat16),
        b2.astype(jnp.float32),
        grid=(pl.cdiv(prompts * (1 + queries) * grid, cells), 2),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        impl=impl,
        name="box_bias",
        warps=warps,
    )


def fits(heads: int, width: int, hidden: int = 64) -> bool:
    """Whether there is a kernel for so many heads and channels of the hidden layer."""
    return heads <= SMALLEST and width % hidden == 0


def _plain(
    boxes: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array, grid: int
) -> jax.Array:
    ends = jnp.stack([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)
    ends = jnp.moveaxis(ends, 2, 0)[..., None, :]
    distance = _scaled((jnp.arange(grid) / grid)[:, None] - ends)

    def perceptron(x: jax.Array, *p: jax.Array) -> jax.Array:
        w1, b1, w2, b2 = (a.astype(x.dtype) for a in p)
        return jax.nn.relu(x @ w1.T + b1) @ w2.T + b2

    bias = jnp.stack([perceptron(distance[i], w1[i], b1[i], w2[i], b2[i]) for i in (0, 1)])
    return jnp.pad(bias.swapaxes(-1, -2), ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))


def _scaled(distance: jax.Array) -> jax.Array:
    length = jnp.log(jnp.abs(8 * distance) + 1) / math.log(8)
    return jnp.where(distance < 0, -length, length)


def _measure(
    boxes: Any, w1: Any, b1: Any, w2: Any, b2: Any, y: Any, *, cells: int, hidden: int
) -> None:
    """Program `(b, axis)`: some cells of boxes, all of them in one row."""
    _, prompts, tokens, heads, grid = y.shape
    axis = pl.program_id(1)
    place = pl.program_id(0) * cells + jnp.arange(cells)
    cell, row = place % grid, place // grid
    prompt, token = row // tokens, row % tokens
    exists = prompt < prompts
    box = jnp.minimum(prompt, prompts - 1), token
    centre, size = (plt.load(boxes.at[*box, part + axis]) for part in (0, 2))
    at = cell.astype(jnp.float32) / grid
    near, far = (_scaled(at - (centre + side * size)) for side in (-0.5, 0.5))
    head = jnp.minimum(jnp.arange(SMALLEST), heads - 1)
    total = jnp.zeros((cells, SMALLEST), jnp.float32) + plt.load(b2.at[axis, head])[None, :]
    for begin in range(0, w2.shape[-1], hidden):
        channel = begin + jnp.arange(hidden)
        a, b = (plt.load(w1.at[axis, channel, end])[None, :] for end in (0, 1))
        inner = near[:, None] * a + far[:, None] * b + plt.load(b1.at[axis, channel])[None, :]
        weight = plt.load(w2.at[axis, head[:, None], channel[None, :]])
        total += plt.dot(jnp.maximum(inner, 0).astype(weight.dtype), weight, trans_b=True)
    total = jnp.where((token == 0)[:, None], 0, total)
    head = jnp.arange(SMALLEST)[None, :]
    to = y.at[axis, prompt[:, None], token[:, None], head, cell[:, None]]
    plt.store(to, total, mask=exists[:, None] & (head < heads))
