"""The trunk's matrices in FP8: a switch that trades accuracy for speed.

Weights have one scale a matrix, the least power of two with which the largest fits, so that it is
exact in bfloat16. Inputs are rounded to E4M3 at one
scale for all, without looking at them: E4M3 is a floating-point format, so that all that matters is
that what comes out of norms, attention and GELU lies between its least and its largest number,
which with this scale are 0.004 and 112.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.sam.params import Block, Linear, Params
from pallas_kernels import Fp8
from pallas_kernels.weights import FP8_MAX

INPUT_SCALE = 0.25


def quantise(params: Params) -> Params:
    """The same model with the trunk's blocks in FP8."""
    blocks = tuple(_block(block) for block in params.trunk.blocks)
    return replace(params, trunk=replace(params.trunk, blocks=blocks))


def _block(p: Block) -> Block:
    attention = replace(
        p.attention, in_proj=_linear(p.attention.in_proj), out_proj=_linear(p.attention.out_proj)
    )
    return replace(p, attention=attention, fc1=_linear(p.fc1), fc2=_linear(p.fc2))


@jax.jit
def _linear(p: Linear) -> Linear:
    wide = p.weight.astype(jnp.float32)
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(jnp.max(jnp.abs(wide)), 1e-30) / FP8_MAX)))
    q = (wide / scale).astype(jnp.float8_e4m3fn)
    return Linear(Fp8(q, scale[None], jnp.float32(INPUT_SCALE)), p.bias)
