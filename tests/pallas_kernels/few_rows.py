"""Random weights and rows for the kernels of decode steps."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.qwen.params import Matrix, _draw_weight, _weight_shapes
from pallas_kernels import Dense, Weight
from pallas_kernels.matmul import place
from pallas_kernels.normed import Form


def draw(kind: str, rows: int, cols: int, experts: int = 0, parts: int = 1) -> Weight:
    """A stack of two layers; block and tensor scales vary."""
    matrix = Matrix(("module",) * parts, rows, cols, (0, 1), experts)
    shapes = _weight_shapes(matrix, matrix.stack, kind, "bfloat16")
    w = _draw_weight(shapes, jax.random.key(rows + cols))
    if kind == "nvfp4":
        scale = np.random.default_rng(0).uniform(8, 200, w.block_scale.shape)
        w = type(w)(w.q, jnp.asarray(scale, w.block_scale.dtype), w.scale)
    if kind != "dense":
        varied = w.scale * (1 + 0.5 * jnp.arange(w.scale.size).reshape(w.scale.shape))
        fields = {name: getattr(w, name) for name in w.__dataclass_fields__} | {"scale": varied}
        w = type(w)(**fields)
    return w


def draw_rows(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def form(w: Weight, layer: int) -> Form:
    one, at = place(w, layer)
    scale = getattr(one, "input_scale", None)
    return Form(type(one) if scale is None else Dense, scale, at)


def distance(a: jax.Array, b: jax.Array) -> float:
    """Relative to the second."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
