"""What all parts of SAM are made of. The last axis holds features; arithmetic in the inputs' type,
norms and softmax in float32."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sam.params import Attention, Linear, Norm
from pallas_kernels import Fp8
from pallas_kernels.weights import FP8_MAX

LAYER_NORM_EPS = 1e-5
FUSED_FROM = 128
"""Queries and keys from which on scores are worth not writing down."""


def linear(x: jax.Array, p: Linear) -> jax.Array:
    """`x Wᵀ + b` for `x [..., K]`; on a GPU products are added in float32.

    Inputs of an FP8 matrix (`jaxinfer.sam.fp8`) are rounded to E4M3 at its input scale.
    """
    w = p.weight
    if isinstance(w, Fp8):
        # So written that XLA takes cuBLASLt's product of E4M3 numbers, scales, bias and all.
        # Scales are powers of two: nothing is lost.
        step = jnp.asarray(w.input_scale).astype(x.dtype)
        x = jnp.clip(x * (1 / step), -FP8_MAX, FP8_MAX).astype(w.q.dtype).astype(x.dtype) * step
        w = w.q.astype(x.dtype) * w.scale[0].astype(x.dtype)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(x, w.astype(x.dtype), contract, preferred_element_type=x.dtype)
    return y if p.bias is None else y + p.bias.astype(x.dtype)


def layer_norm(x: jax.Array, p: Norm, eps: float = LAYER_NORM_EPS) -> jax.Array:
    """Layer norm over the last axis."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (scaled * p.weight + p.bias).astype(x.dtype)


def gelu(x: jax.Array, kind: Literal["erf", "tanh"] = "erf") -> jax.Array:
    """GELU, exact or by the tanh approximation, which XLA computes within a product of matrices."""
    if kind == "tanh":
        return jax.nn.gelu(x, approximate=True)
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def feed_forward(x: jax.Array, first: Linear, second: Linear) -> jax.Array:
    """`W2 ReLU(W1 x)`."""
    return linear(jax.nn.relu(linear(x, first)), second)


def perceptron(x: jax.Array, layers: tuple[Linear, ...]) -> jax.Array:
    """Linear layers with ReLU between them."""
    for layer in layers[:-1]:
        x = jax.nn.relu(linear(x, layer))
    return linear(x, layers[-1])


def project(x: jax.Array, p: Attention, first: int, count: int = 1) -> jax.Array:
    """Parts `first … first + count` of packed query, key and value, `[..., count D]`."""
    d = p.out_proj.weight.shape[-1]
    rows = slice(first * d, (first + count) * d)
    return linear(x, Linear(p.in_proj.weight[rows], p.in_proj.bias[rows]))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Scaled dot-product attention, `[B, T, D]` with keys and values `[B, S, D]` to `[B, T, D]`.

    `mask`: bool, broadcastable to `[B, heads, T, S]`, True where a key is seen; `bias` of the same
    shape is added to the scores.
    """
    query, key, value = (x.reshape(*x.shape[:-1], heads, -1) for x in (query, key, value))
    out = by_heads(query, key, value, mask, bias)
    return out.reshape(*out.shape[:-2], -1)


def by_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`attend` for `[B, T, heads, d]`; by cuDNN where that never writes the scores down."""
    plain = mask is None and bias is None and query.dtype == jnp.bfloat16
    large = min(query.shape[1], key.shape[1]) >= FUSED_FROM
    fused = plain and large and jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(
        query, key, value, bias=bias, mask=mask, implementation="cudnn" if fused else None
    )


def multi_head(
    p: Attention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Multi-head attention with its projections, as `torch.nn.MultiheadAttention`."""
    out = attend(project(query, p, 0), project(key, p, 1), project(value, p, 2), heads, mask, bias)
    return linear(out, p.out_proj)


def convolve(x: jax.Array, p: Linear) -> jax.Array:
    """A convolution of odd side that keeps the size, `[B, H, W, in]` to `[B, H, W, out]`."""
    y = lax.conv_general_dilated(
        x,
        p.weight.astype(x.dtype),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + p.bias.astype(x.dtype)


def double(x: jax.Array, p: Linear) -> jax.Array:
    """A transposed convolution of side and stride 2, `[B, H, W, in]` to `[B, 2H, 2W, out]`."""
    b, h, w, _ = x.shape
    y = linear(x, Linear(p.weight, jnp.tile(p.bias, 4)))
    return y.reshape(b, h, w, 2, 2, -1).swapaxes(2, 3).reshape(b, 2 * h, 2 * w, -1)
