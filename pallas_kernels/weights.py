"""Weight formats, and the one entry `linear` through which every layer multiplies.

A weight is a matrix `[N, K]` (`y = x Wᵀ`), usually stacked: `[L, N, K]` over the layers of a kind,
`[L, E, N, K]` for experts. A layer hands the whole stack and its own number to `linear`, so that a
kernel can index inside and nothing is copied.

Formats that need a global scale keep one a *part*: a matrix fused from `S` equally tall tensors
(gate and up) carries `scale[..., S]`, part `s` covering rows `s·N/S … (s+1)·N/S`. The scale always
multiplies; files that divide are turned round where they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Layer = int | tuple[int, jax.Array] | None
"""Where in a stack a matrix lies: a layer, a layer and an expert, or None for no stack."""

FP8_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_BLOCK = 16


@partial(jax.tree_util.register_dataclass, data_fields=("w",), meta_fields=())
@dataclass(frozen=True)
class Dense:
    """A matrix in a floating-point type. `w`: `[..., N, K]`."""

    w: jax.Array


@partial(
    jax.tree_util.register_dataclass, data_fields=("q", "scale", "input_scale"), meta_fields=()
)
@dataclass(frozen=True)
class Fp8:
    """E4M3 weights: `w = q · scale`.

    Attributes:
        q: `[..., N, K]` float8_e4m3fn.
        scale: `[..., S]` float32; `S` is 1 for per-tensor, the number of fused parts, or `N` for
            one scale an output channel.
        input_scale: `[...]` float32, or None. With it inputs are rounded to E4M3 at this static
            scale (W8A8); without it they stay as they are (W8A16).
    """

    q: jax.Array
    scale: jax.Array
    input_scale: jax.Array | None


@partial(
    jax.tree_util.register_dataclass, data_fields=("q", "block_scale", "scale"), meta_fields=()
)
@dataclass(frozen=True)
class Nvfp4:
    """E2M1 weights in blocks of 16 along K: `w = e2m1(q) · block_scale · scale` (W4A16).

    Attributes:
        q: `[..., N, K/2]` uint8; element `2i` in the low nibble, `2i+1` in the high one.
        block_scale: `[..., N, K/16]` float8_e4m3fn.
        scale: `[..., S]` float32, one a fused part.
    """

    q: jax.Array
    block_scale: jax.Array
    scale: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("groups",), meta_fields=("where",))
@dataclass(frozen=True)
class PerLayer:
    """A stack whose layers are stored in different formats.

    Attributes:
        groups: one stacked weight a format.
        where: for each layer the group and the index within it.
    """

    groups: tuple[Dense | Fp8 | Nvfp4, ...]
    where: tuple[tuple[int, int], ...]


@partial(jax.tree_util.register_dataclass, data_fields=("inner",), meta_fields=("report",))
@dataclass(frozen=True)
class Observed:
    """A matrix that tells how large its inputs get: static FP8 scales are made from that.

    Attributes:
        inner: the matrix.
        report: called on the host with the place in the stack and the largest magnitude.
    """

    inner: Dense
    report: Callable[[Any, jax.Array], None]


Weight = Dense | Fp8 | Nvfp4 | PerLayer | Observed


def take(w: Any, layer: Layer) -> Any:
    """The weight at one place of a stack."""
    if layer is None:
        return w
    number, *expert = layer if isinstance(layer, tuple) else (layer,)
    if isinstance(w, PerLayer):
        group, number = w.where[number]
        w = w.groups[group]
    # One slice for layer and expert: two would first copy all experts of the layer.
    return jax.tree.map(lambda a: a[number, *expert], w)


def linear(
    x: jax.Array, w: Weight, layer: Layer = None, dtype: jnp.dtype | None = None
) -> jax.Array:
    """`x Wᵀ` for rows `x [..., K]`, accumulated in float32.

    Returns `[..., N]` in `dtype`, by default that of `x`. This is the reference path: it
    dequantises and multiplies. Rows that are E4M3 already are taken to be rounded at the weight's
    input scale.
    """
    if isinstance(w, Observed):
        jax.debug.callback(partial(w.report, layer), jnp.max(jnp.abs(x)))
        w = w.inner
    w = take(w, layer)
    match w:
        case Dense():
            y = _dot(x, w.w)
        case Fp8():
            y = _fp8(x, w)
        case Nvfp4():
            y = _dot(x, _blocks(w, x.dtype)) * _per_row(w.scale, w.q.shape[-2])
    return y.astype(dtype or x.dtype)


def _fp8(x: jax.Array, w: Fp8) -> jax.Array:
    scale = _per_row(w.scale, w.q.shape[-2])
    if w.input_scale is None:
        return _dot(x, w.q) * scale
    rounded = x if x.dtype == jnp.float8_e4m3fn else quantise(x, w.input_scale)
    kind = jnp.bfloat16 if x.dtype == jnp.float8_e4m3fn else x.dtype
    return _dot(rounded.astype(kind), w.q) * (scale * w.input_scale)


def quantise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / scale` rounded to E4M3."""
    # Not a division: XLA turns that into this product inside loops, and only there.
    scaled = jnp.clip(x.astype(jnp.float32) * (1 / scale), -FP8_MAX, FP8_MAX)
    return scaled.astype(jnp.float8_e4m3fn)


def dequantise(w: Dense | Fp8 | Nvfp4) -> jax.Array:
    """The matrix that a weight stands for, `[..., N, K]` float32."""
    match w:
        case Dense():
            return w.w.astype(jnp.float32)
        case Fp8():
            scale = _per_row(w.scale, w.q.shape[-2])
            return w.q.astype(jnp.float32) * scale[..., None]
        case Nvfp4():
            scale = _per_row(w.scale, w.q.shape[-2])
            return _blocks(w, jnp.float32) * scale[..., None]


def unpack_e2m1(q: jax.Array) -> jax.Array:
    """Codes of packed E2M1, uint8 `[..., K/2]` -> values `[..., K]` float32."""
    pairs = jnp.stack([q & 0xF, q >> 4], axis=-1).reshape(*q.shape[:-1], -1)
    table = jnp.array(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), jnp.float32)
    return table[pairs]


def _blocks(w: Nvfp4, dtype: jnp.dtype) -> jax.Array:
    """`e2m1 · block_scale` `[..., N, K]`; at most six significant bits, so exact in bfloat16."""
    scale = jnp.repeat(w.block_scale.astype(jnp.float32), NVFP4_BLOCK, axis=-1)
    return (unpack_e2m1(w.q) * scale).astype(dtype)


def _per_row(scale: jax.Array, rows: int) -> jax.Array:
    return jnp.repeat(scale, rows // scale.shape[-1], axis=-1)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w.astype(x.dtype), contract, preferred_element_type=jnp.float32)
