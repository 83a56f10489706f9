"""What all parts of SAM are made of. The last axis holds features; arithmetic in the inputs' type,
norms and softmax in float32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sam.params import Attention, Linear, Norm
from pallas_kernels import Fp8
from pallas_kernels.cross_attention import SMALLEST, cross_attention, fits
from pallas_kernels.picture_attention import rounded

LAYER_NORM_EPS = 1e-5

_KERNELS = ContextVar("_KERNELS", default=True)

First = tuple[int, int, int]
"""Where queries, keys and values begin among their channels, in widths of the attention."""


def linear(x: jax.Array, p: Linear) -> jax.Array:
    """`x Wᵀ + b` for `x [..., K]`; on a GPU products are added in float32.

    Inputs of an FP8 matrix (`jaxinfer.sam.fp8`) are rounded to E4M3 at its input scale.
    """
    step = input_step(p)
    return linear_of_rounded(x if step is None else rounded(x, step), p, x.dtype)


def input_step(p: Linear) -> jax.Array | None:
    """In steps of what the inputs of an FP8 matrix are rounded to E4M3; None for any other."""
    return jnp.asarray(p.weight.input_scale) if isinstance(p.weight, Fp8) else None


def linear_of_rounded(x: jax.Array, p: Linear, dtype: Any) -> jax.Array:
    """`linear` of inputs that are rounded already, in arithmetic of that type."""
    w, x = p.weight, x.astype(dtype)
    if isinstance(w, Fp8):
        # So written that XLA takes cuBLASLt's product of E4M3 numbers, scales, bias and all.
        # Scales are powers of two: nothing is lost.
        x = x * jnp.asarray(w.input_scale).astype(dtype)
        w = w.q.astype(dtype) * w.scale[0].astype(dtype)
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


def part(p: Attention, first: int, count: int = 1) -> Linear:
    """Parts `first … first + count` of packed query, key and value: `[count D, D]`."""
    if isinstance(p.in_proj, tuple):
        if len(p.in_proj) == 2:  # Query and key are together.
            return p.in_proj[{(0, 2): 0, (2, 1): 1}[first, count]]
        return stack(p.in_proj[first : first + count]) if count > 1 else p.in_proj[first]
    d = p.out_proj.weight.shape[-1]
    rows = slice(first * d, (first + count) * d)
    return Linear(p.in_proj.weight[rows], p.in_proj.bias[rows])


def stack(parts: Sequence[Linear]) -> Linear:
    """One matrix, whose outputs are those of all on one another."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
    seen: jax.Array | None = None,
    *,
    bias: tuple[jax.Array, jax.Array] | None = None,
    first: First = (0, 0, 0),
    width: int | None = None,
) -> jax.Array:
    """Scaled dot-product attention, `[B, T, D]`.

    Args:
        query: `[B, T, N]`, of which D channels count, see `first`.
        key: `[B, S, N]` likewise.
        value: likewise.
        heads: that share the D channels.
        seen: `[B, S]` bool, True where a key is seen; None for all.
        bias: of rows and columns of a grid of keys; see `cross_attention`.
        first: see `First`.
        width: D; None for all channels of queries.
    """
    length, width = query.shape[1], width or query.shape[-1]
    # A few queries are no work for a kernel.
    kernel = on_gpu(query.dtype) and length >= SMALLEST and fits(query.dtype, width // heads)
    impl = "kernel" if kernel else "plain"
    how: dict[str, Any] = {"seen": seen, "bias": bias, "first": first, "width": width}
    return cross_attention(query, key, value, heads, **how, impl=impl)


def by_heads(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of all to all, `[B, T, heads, d]`; by cuDNN on a GPU, in bfloat16."""
    return jax.nn.dot_product_attention(
        query, key, value, implementation="cudnn" if on_gpu(query.dtype) else "xla"
    )


def on_gpu(dtype: Any) -> bool:
    """Whether kernels compute what is of this type, where it is being traced."""
    return _KERNELS.get() and dtype == jnp.bfloat16 and jax.default_backend() == "gpu"


@contextmanager
def differentiable() -> Iterator[None]:
    """What is traced herein has derivatives: XLA computes it, since kernels have no way back."""
    token = _KERNELS.set(False)
    try:
        yield
    finally:
        _KERNELS.reset(token)


def has_derivatives() -> bool:
    """Whether what is being traced must have derivatives, see `differentiable`."""
    return not _KERNELS.get()


def multi_head(
    p: Attention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
    seen: jax.Array | None = None,
) -> jax.Array:
    """Multi-head attention with its projections, as `torch.nn.MultiheadAttention`."""
    v = linear(value, part(p, 2))
    if query is key:
        both = linear(query, part(p, 0, 2))
        out = attend(both, both, v, heads, seen, first=(0, 1, 0), width=query.shape[-1])
    else:
        q, k = linear(query, part(p, 0)), linear(key, part(p, 1))
        out = attend(q, k, v, heads, seen)
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


def double_then(p: Linear, then: Linear) -> Linear:
    """Of `double`: one that does what it does with `p`, and the linear layer after it."""
    inner = p.weight.reshape(4, -1, p.weight.shape[-1])
    weight = jnp.einsum("om,smi->soi", then.weight, inner).reshape(-1, inner.shape[-1])
    return Linear(weight, then.weight @ p.bias + then.bias)
