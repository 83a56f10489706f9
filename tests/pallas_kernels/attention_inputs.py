"""Random inputs of the attention kernels, and calls of them by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-6
LAYER, POOL_LAYER = 1, 0


@dataclass(frozen=True)
class Sizes:
    """Of a model's attention and its pages."""

    H: int = 4
    Hkv: int = 2
    d: int = 32
    half: int = 4
    page: int = 16


SMALL = Sizes()
REAL = Sizes(H=16, Hkv=2, d=256, half=32, page=64)


@dataclass(frozen=True)
class Case:
    """Arguments of a kernel that change from call to call: `T` tokens of `b` sequences."""

    q_gate: jax.Array
    k: jax.Array
    v: jax.Array
    cos: jax.Array
    sin: jax.Array
    q_norm: jax.Array
    k_norm: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    table: jax.Array
    start: jax.Array
    valid: jax.Array

    def tokens(self, which: slice, rows: Any = slice(None)) -> "Case":
        """Some tokens of some sequences, which start where these tokens stand."""
        lead = (rows, which)
        begin = which.start or 0
        return replace(
            self,
            **{n: getattr(self, n)[lead] for n in ("q_gate", "k", "v", "cos", "sin")},
            table=self.table[rows],
            start=self.start[rows] + begin,
            valid=jnp.clip(self.valid[rows] - begin, 0, len(range(*which.indices(99)))),
        )


def case(
    sizes: Sizes,
    start: list[int],
    valid: list[int],
    T: int,
    width: int,
    dtype: Any = jnp.bfloat16,
    kv_dtype: Any = None,
    own: list[int] | None = None,
    seed: int = 0,
) -> Case:
    """Sequences on scattered pages; whatever lies past what they have written is NaN.

    Args:
        sizes: see `Sizes`.
        start: where each begins.
        valid: tokens of each that count.
        T: tokens a sequence.
        width: pages a table.
        dtype: of activations.
        kv_dtype: of pages, by default the same.
        own: whose pages each has, by default its own.
        seed: of all numbers.
    """
    rng = np.random.default_rng(seed)
    b, kv = len(start), jnp.dtype(kv_dtype or dtype)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    table = 1 + rng.permutation(b * width).reshape(b, width)
    table = table[np.array(own)] if own else table
    filled = np.zeros((1 + b * width, sizes.page), bool)
    for pages, begin in zip(table, start, strict=True):
        written = np.arange(width * sizes.page).reshape(width, -1) < begin
        filled[pages] |= written
    numbers = (normal(2, *filled.shape, sizes.Hkv, sizes.d) for _ in range(2))
    k_pages, v_pages = (np.where(filled[None, ..., None, None], n, np.nan) for n in numbers)
    angle = normal(b, T, sizes.half)
    return Case(
        q_gate=jnp.asarray(normal(b, T, sizes.H * 2 * sizes.d), dtype),
        k=jnp.asarray(normal(b, T, sizes.Hkv * sizes.d), dtype),
        v=jnp.asarray(normal(b, T, sizes.Hkv * sizes.d), dtype),
        cos=jnp.cos(angle),
        sin=jnp.sin(angle),
        q_norm=jnp.asarray(0.1 * normal(2, sizes.d), dtype),
        k_norm=jnp.asarray(0.1 * normal(2, sizes.d), dtype),
        k_pages=jnp.asarray(k_pages, kv),
        v_pages=jnp.asarray(v_pages, kv),
        table=jnp.asarray(table, jnp.int32),
        start=jnp.asarray(start, jnp.int32),
        valid=jnp.asarray(valid, jnp.int32),
    )


def run(kernel: Callable[..., Any], c: Case, impl: str, /, **options: Any) -> list[np.ndarray]:
    """What a kernel returns, on the host, in float32."""

    @jax.jit
    def call(c: tuple[jax.Array, ...]) -> Any:
        before, after = c[:7], c[7:]
        return kernel(*before, LAYER, POOL_LAYER, *after, eps=EPS, impl=impl, **options)

    fields = tuple(getattr(c, name) for name in Case.__dataclass_fields__)
    # Interpreted it may ask JAX for something, behind what is asked before it is done.
    out = jax.block_until_ready(call(fields))
    return [np.asarray(a.astype(jnp.float32)) for a in out]


def close(out: list[np.ndarray], reference: list[np.ndarray], tolerance: float = 8e-3) -> None:
    """Same values up to rounding to bfloat16, same NaNs."""
    for a, b in zip(out, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
