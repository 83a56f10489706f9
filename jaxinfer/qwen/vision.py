"""The vision tower: patches of pictures to features in the text model's width.

Every frame (one temporal patch of an image or a video) is computed by itself: attention does not
look beyond it, and no arithmetic is shared with other frames, so that its features do not depend on
what else is in the call.

N is the number of patches of a frame, D the tower's width, d the width of a head, m the merge size.
Patches lie in *merge-block order*: block row, block column, row in block, column in block, so that
m² consecutive patches become one token.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.qwen.config import VisionConfig
from jaxinfer.qwen.params import Vision, VisionBlocks
from jaxinfer.qwen.positions import Grid, VisionInputError, frame_tokens
from pallas_kernels import PerLayer, each, linear, take

ROPE_THETA = 10000.0
NORM_EPS = 1e-6
QUERY_BLOCK = 256
"""Queries whose scores are held at once: the largest picture has 65,536 patches."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("coords", "taps", "weights", "length"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Layout:
    """Where the patches of a frame lie. Data, not shape: one compilation serves all frames of N.

    Attributes:
        coords: int32 `[N, 2]`, row and column of each patch.
        taps: int32 `[N, 4]`, the entries of the position table around each patch.
        weights: float32 `[N, 4]`, their bilinear weights.
        length: int32 `[]`, how many patches are real; those behind are padding.
    """

    coords: jax.Array | np.ndarray
    taps: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    length: jax.Array | np.ndarray


def layout(cfg: VisionConfig, height: int, width: int, size: int | None = None) -> Layout:
    """The layout of a frame of `height` x `width` patches, padded to `size` patches.

    The square position table is sampled so that the corners of the frame meet those of the table:
    row `r` reads at `r (side - 1) / (height - 1)`, columns alike. Computed on the host.

    Raises VisionInputError if the frame does not divide into merge blocks or exceeds `size`, and
    ValueError if the position table is not square.
    """
    m = cfg.spatial_merge_size
    frame_tokens((1, height, width), m)
    count = height * width
    size = count if size is None else size
    if size < count or size % m**2:
        raise VisionInputError(
            f"a frame of {height} x {width} patches does not fit into {size} patches (a multiple "
            f"of {m**2})"
        )
    side = math.isqrt(cfg.num_position_embeddings)
    if side**2 != cfg.num_position_embeddings:
        raise ValueError(f"{cfg.num_position_embeddings} position embeddings are not a square")
    rows, columns = (
        axis.reshape(height // m, m, width // m, m).swapaxes(1, 2).reshape(-1)
        for axis in np.indices((height, width), np.int32)
    )
    row_taps, row_weights = _axis_taps(rows, height, side)
    column_taps, column_weights = _axis_taps(columns, width, side)
    taps = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    padding = ((0, size - count), (0, 0))
    return Layout(
        coords=np.pad(np.stack([rows, columns], axis=-1), padding),
        taps=np.pad(taps.reshape(count, 4), padding),
        weights=np.pad(weights.reshape(count, 4), padding),
        length=np.array(count, np.int32),
    )


def pad(patches: np.ndarray, where: Layout) -> np.ndarray:
    """Patches `[n, patch_dim]` of one frame with rows of zeros up to the layout's N."""
    return np.pad(patches, ((0, where.coords.shape[0] - patches.shape[0]), (0, 0)))


def _axis_taps(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two table entries beside each index, int32 `[N, 2]`, and their float32 weights."""
    source = (index * (side - 1)).astype(np.float32) / np.float32(max(size - 1, 1))
    low = np.floor(source).astype(np.int32)
    above = source - low.astype(np.float32)
    taps = np.stack([low, np.minimum(low + 1, side - 1)], axis=-1)
    return taps, np.stack([1 - above, above], axis=-1)


def encode(
    params: Vision, cfg: VisionConfig, patches: jax.Array, grids: tuple[Grid, ...]
) -> jax.Array:
    """Features of images and videos whose grids are known when the call is compiled.

    Args:
        params: the tower's parameters; their type is the type of the computation.
        cfg: static.
        patches: `[sum of t·h·w, patch_dim]`, one grid behind another, frames outermost, each frame
            in merge-block order; any floating-point type.
        grids: static; `(t, h, w)` of each image or video.

    Returns:
        `[sum of t·h·w / m², out_hidden_size]` in the parameters' type, in the order of the grids.

    Raises VisionInputError if the patches and the grids do not agree.
    """
    count = sum(t * h * w for t, h, w in grids)
    if not grids or patches.shape != (count, cfg.patch_dim):
        raise VisionInputError(
            f"{len(grids)} grids stand for patches [{count}, {cfg.patch_dim}]; "
            f"given {list(patches.shape)}"
        )
    features: list[jax.Array] = []
    start = 0
    for t, h, w in grids:
        where = layout(cfg, h, w)
        frames = patches[start : start + t * h * w].reshape(t, h * w, cfg.patch_dim)
        start += t * h * w
        if features:
            # XLA merges independent matmuls that share a weight, which would let the pictures of a
            # call change each other's last bits: make each depend on the one before.
            features[-1], frames = lax.optimization_barrier((features[-1], frames))
        encoded = each(partial(encode_frame, params, cfg, where=where), 1, frames)
        features.append(encoded.reshape(-1, cfg.out_hidden_size))
    return jnp.concatenate(features)


def encode_frame(params: Vision, cfg: VisionConfig, patches: jax.Array, where: Layout) -> jax.Array:
    """Features of one frame, `[N / m², out_hidden_size]`, from its patches `[N, patch_dim]`.

    Rows that belong to padding (`where.length / m²` and up) are meaningless.
    """
    return merge(params, cfg, hidden(params, cfg, patches, where))


def hidden(params: Vision, cfg: VisionConfig, patches: jax.Array, where: Layout) -> jax.Array:
    """The residual stream of one frame after the last block, `[N, D]`."""
    dtype = params.pos_embed.dtype
    x = linear(patches.astype(dtype), params.patch_embed) + params.patch_embed_bias
    table = params.pos_embed.astype(jnp.float32)[where.taps]
    x += jnp.sum(table * where.weights[..., None], axis=1).astype(dtype)
    rotation = _rotation(cfg, where.coords)

    def step(x: jax.Array, block: VisionBlocks) -> jax.Array:
        return _block(block, cfg, x, rotation, where.length)

    blocks, is_mixed = params.blocks, lambda w: isinstance(w, PerLayer)
    if any(map(is_mixed, jax.tree.leaves(blocks, is_leaf=is_mixed))):
        for number in range(cfg.depth):
            one = jax.tree.map(partial(take, layer=number), blocks, is_leaf=is_mixed)
            x = step(x, one)
        return x
    # A scan, because every new size of picture is compiled anew while a user waits.
    return lax.scan(lambda x, block: (step(x, block), None), x, blocks)[0]


def merge(params: Vision, cfg: VisionConfig, x: jax.Array) -> jax.Array:
    """The merger: `[N, D]` -> `[N / m², out_hidden_size]`."""
    x = _layer_norm(x, params.merger_norm_weight, params.merger_norm_bias)
    x = linear(x.reshape(-1, cfg.merged_dim), params.merger_fc1) + params.merger_fc1_bias
    x = jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)
    return linear(x, params.merger_fc2) + params.merger_fc2_bias


def _block(
    w: VisionBlocks,
    cfg: VisionConfig,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    length: jax.Array | np.ndarray,
) -> jax.Array:
    heads, d = cfg.num_heads, cfg.hidden_size // cfg.num_heads
    y = _layer_norm(x, w.norm1_weight, w.norm1_bias)
    qkv = (linear(y, w.qkv) + w.qkv_bias).reshape(-1, 3, heads, d)
    q, k = _rotate(qkv[:, 0], *rotation), _rotate(qkv[:, 1], *rotation)
    mixed = _attention(q, k, qkv[:, 2], length).reshape(x.shape)
    x += linear(mixed, w.proj) + w.proj_bias
    y = _layer_norm(x, w.norm2_weight, w.norm2_bias)
    y = linear(y, w.fc1) + w.fc1_bias
    y = jax.nn.gelu(y.astype(jnp.float32), approximate=True).astype(x.dtype)
    return x + linear(y, w.fc2) + w.fc2_bias


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm over the last axis, in float32; returns `x.dtype`."""
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, axis=-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _rotation(cfg: VisionConfig, coords: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 `[N, 1, d/2]`: the first half turns by row, the second by column."""
    axis = cfg.hidden_size // cfg.num_heads // 2
    frequencies = ROPE_THETA ** (-np.arange(0, axis, 2, dtype=np.float32) / axis)
    angles = jnp.asarray(coords, jnp.float32)[..., None] * frequencies
    angles = angles.reshape(-1, 1, axis)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of `x [N, heads, d]` in float32, element i paired with i + d/2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array | np.ndarray
) -> jax.Array:
    """Every query attends to the first `length` keys; `[N, heads, d]` in and out.

    Scores and softmax are float32; probabilities are rounded to the type of `v`.
    """
    N, _, d = q.shape
    real = jnp.arange(N) < length

    def attend(q: jax.Array) -> jax.Array:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(real, scores * d**-0.5, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        y = jnp.einsum("hqk,khd->qhd", p, v, preferred_element_type=jnp.float32)
        return y.astype(v.dtype)

    if N <= QUERY_BLOCK:
        return attend(q)
    padded = jnp.pad(q, ((0, -N % QUERY_BLOCK), (0, 0), (0, 0)))
    blocks = padded.reshape(-1, QUERY_BLOCK, *q.shape[1:])
    return lax.map(attend, blocks).reshape(padded.shape)[:N]
