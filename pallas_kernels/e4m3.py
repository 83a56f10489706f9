"""Products of E4M3 with E4M3, on the tensor cores that multiply it as it is.

Both sides come from shared memory, and in any order of K, so that nothing is converted on the way.

Hopper's tensor cores do not add up E4M3 in float32: within a product a sum keeps about 14 bits,
which is too few for a long one. So every step along K is a product of its own, and those are added
in float32. Pallas has no word for this: for its own product of E4M3, Triton takes exact sums to be
wanted, converts to float16 and uses an older instruction.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.triton import dialect
from jax._src.pallas.triton.lowering import register_lowering
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive
from jax.interpreters import mlir

ALL = 1 << 30
"""How many products may be added up with fewer bits: however many there are."""

_dot = Primitive("e4m3_dot")


def e4m3_dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """E4M3 `[m, k]` and `[n, k]` -> `[m, n]` float32.

    Compiled for a GPU, within a kernel, it adds up in steps of 32 along k, with some 14 bits;
    interpreted, in float32.
    """
    zero = jnp.zeros((left.shape[0], right.shape[0]), jnp.float32)
    return _dot.bind(left, right, zero)


@_dot.def_abstract_eval
def _(left: Any, right: Any, start: Any) -> Any:
    return start


@register_lowering(_dot)
def _(ctx: Any, left: Any, right: Any, start: Any) -> Any:
    right = dialect.trans(right, (1, 0))
    return dialect.dot(left, right, start, max_num_imprecise_acc=ALL)


def _interpreted(left: jax.Array, right: jax.Array, start: jax.Array) -> jax.Array:
    left, right = left.astype(jnp.float16), right.astype(jnp.float16)
    contract = (((1,), (1,)), ((), ()))
    dot = lax.dot_general(left, right, contract, preferred_element_type=jnp.float32)
    return start + dot


mlir.register_lowering(_dot, mlir.lower_fun(_interpreted, multiple_results=False))


def e4m3_products(
    w: Any,
    at: tuple,
    cols: list[jax.Array],
    x: Any,
    row: jax.Array,
    there: jax.Array | None,
    step: int,
) -> list[jax.Array]:
    """Tiles `W xᵀ` before scales, that share the inputs.

    Args:
        w: reference to a stack `[…, N, K]`.
        at: where in the stack, leading indices.
        cols: for each tile `[n]` int32, which output features.
        x: reference to inputs `[M, K]`.
        row: `[rows]` int32, which of them.
        there: `[rows]` bool, which of those exist; None for all.
        step: elements of K that are added up before they join the others; it decides about bits.

    Returns:
        For each tile `[n, rows]` float32.
    """
    mask = None if there is None else jnp.broadcast_to(there[:, None], (row.size, step))
    none = jnp.zeros((), x.dtype)

    def add(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        k = (i * step + jnp.arange(step))[None, :]
        where = x.at[row[:, None], k]
        inputs = plt.load(where) if mask is None else plt.load(where, mask=mask, other=none)
        left = [plt.load(w.at[(*at, col[:, None], k)]) for col in cols]
        return [total + e4m3_dot(q, inputs) for total, q in zip(totals, left, strict=True)]

    zero = [jnp.zeros((col.size, row.size), jnp.float32) for col in cols]
    return lax.fori_loop(0, x.shape[1] // step, add, zero)
