"""`pallas_kernels.triangular`: the triangular systems of Gated DeltaNet's chunks."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.contracts.contract import Candidate, Contract, Spec
from jaxinfer.contracts.draws import uniform
from pallas_kernels.triangular import solve_unit_lower


def _reference(a: jax.Array, b: jax.Array) -> jax.Array:
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    return jax.scipy.linalg.solve_triangular(eye + jnp.tril(a, -1), b, lower=True)


def _by_blocks(a: jax.Array, b: jax.Array, *, impl: Any) -> jax.Array:
    return solve_unit_lower(a, b)


CONTRACTS = (
    Contract(
        name="solve_unit_lower",
        doc="`X` with `(I + strictly_lower(A)) X = B`, a system a head.",
        arguments={
            "a": Spec("H C C", "float32", uniform(-0.3, 0.3)),
            "b": Spec("H C N", "float32"),
        },
        results={"x": Spec("H C N", "float32")},
        reference=_reference,
        candidates={"blocks": Candidate(_by_blocks)},
        shapes={"a chunk of 64 tokens": {"H": 32, "C": 64, "N": 256}},
        edges={"one block": {"H": 1, "C": 16, "N": 3}, "two blocks": {"H": 2, "C": 32, "N": 4}},
        tolerance=1e-4,
        operations=lambda s: s["H"] * s["C"] ** 2 * s["N"],
    ),
)
