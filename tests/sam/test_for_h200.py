"""The trunk's program for an H200, as the shapes of the real model have it."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.contracts import h200
from jaxinfer.sam import fp8, trunk
from jaxinfer.sam.compiling import OPTIONS
from jaxinfer.sam.config import SAM3
from jaxinfer.sam.leaves import init
from jaxinfer.sam.params import Trunk
from jaxinfer.sam.structure import structure

pytestmark = pytest.mark.skipif(bool(h200.missing()), reason=h200.missing())

LAYER = replace(SAM3, trunk=replace(SAM3.trunk, num_layers=1, global_layers=(), gelu="tanh"))
PARAMS = jax.eval_shape(lambda key: init(structure(LAYER), key, jnp.bfloat16), jax.random.key(0))


def compiled(params: Trunk) -> h200.Program:
    side = LAYER.trunk.image_size
    pixels = jax.ShapeDtypeStruct((1, side, side, 3), jnp.uint8)

    def encode(params: Trunk, pixels: jax.Array) -> jax.Array:
        return trunk.encode(params, LAYER.trunk, pixels)

    return h200.compile(encode, params, pixels, options=OPTIONS)


def test_a_block_in_fp8_is_four_products_of_the_library() -> None:
    hlo = compiled(jax.eval_shape(fp8.quantise, PARAMS).trunk).hlo
    assert len(re.findall(r"custom-call\(.*matmul\$f8", hlo)) == 4


@pytest.mark.parametrize(
    ("attention", "moved"),
    [
        ("cudnn", ["slice"]),  # It wants the values apart.
        ("triton", []),
        ("mosaic", ["concatenate"]),  # Keys, as they are turned.
    ],
)
def test_rotary_embedding_is_computed_in_place(attention, moved, monkeypatch) -> None:
    monkeypatch.setattr(trunk, "ATTENTION", attention)
    program = compiled(PARAMS.trunk)
    assert all(kernel.spilled == 0 for kernel in program.kernels)
    operations = [m.operation for m in program.moved(1 << 20)]
    assert [o for o in operations if o in ("slice", "concatenate", "copy")] == moved
