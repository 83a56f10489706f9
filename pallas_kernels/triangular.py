"""Solving `(I + A) X = B` for a strictly lower triangular `A`, by blocks.

XLA hands such a system to BLAS on a CPU, whose threads spin for longer than the solve takes when
the machine is busy, and to a batched `trsm` on a GPU. Here the diagonal blocks are inverted by
forward substitution, all at once, and the rest is products of blocks. Doubling, the cheaper way to
the inverse, is not stable: powers of `A` grow without bound when tokens repeat.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 16

_EXACT = lax.Precision.HIGHEST


def solve_unit_lower(a: jax.Array, b: jax.Array) -> jax.Array:
    """`X` with `(I + strictly_lower(a)) X = b`.

    Args:
        a: `[H, C, C]` float32, `C` a multiple of 16; only its part below the diagonal is read.
        b: `[H, C, N]` float32.

    Returns:
        `[H, C, N]` float32.
    """
    count = a.shape[1] // BLOCK
    blocks = a.reshape(a.shape[0], count, BLOCK, count, BLOCK)
    diagonal = jnp.stack([blocks[:, i, :, i] for i in range(count)], axis=1)
    inverse = _invert(jnp.tril(diagonal, -1))
    right = b.reshape(b.shape[0], count, BLOCK, -1)
    solved: list[jax.Array] = []
    for i in range(count):
        rest = right[:, i]
        if solved:
            before = jnp.concatenate(solved, axis=1)
            row = a[:, i * BLOCK : (i + 1) * BLOCK, : i * BLOCK]
            rest = rest - jnp.einsum("hij,hjn->hin", row, before, precision=_EXACT)
        solved.append(jnp.einsum("hij,hjn->hin", inverse[:, i], rest, precision=_EXACT))
    return jnp.concatenate(solved, axis=1)


def _invert(a: jax.Array) -> jax.Array:
    """`(I + a)⁻¹` for strictly lower `a [..., 16, 16]`, row by row."""
    eye = jnp.eye(BLOCK, dtype=a.dtype)

    def row(i: jax.Array, inverse: jax.Array) -> jax.Array:
        # Rows from i on are still zero, so the whole product is the sum over those before.
        known = jnp.sum(a[..., i, :, None] * inverse, axis=-2)
        return inverse.at[..., i, :].set(eye[i] - known)

    return lax.fori_loop(0, BLOCK, row, jnp.zeros_like(a))
