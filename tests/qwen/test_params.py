"""One description of the parameters gives shapes and random values in any mix of formats."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.tiny_qwen_training.architecture import CONFIG
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Matrix, all_dense, init, leaves, nvidia_mix, shapes, structure
from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer, dequantise

CFG = replace(Config.from_dict(CONFIG), layer_types=("linear_attention", "full_attention"))


def first_layer_dense(matrix: Matrix, layer: int | None) -> str:
    return "dense" if layer == 0 else nvidia_mix(matrix, layer)


@pytest.mark.parametrize("format_of", [all_dense, nvidia_mix, first_layer_dense])
def test_random_parameters_have_the_described_shapes(format_of) -> None:
    described, drawn = shapes(CFG, format_of), init(CFG, jax.random.key(0), format_of)
    assert jax.tree.structure(described) == jax.tree.structure(drawn)
    for expected, array in zip(jax.tree.leaves(described), jax.tree.leaves(drawn), strict=True):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert jnp.isfinite(array.astype(jnp.float32)).all()


def test_matrices_are_drawn_alike_in_every_format() -> None:
    drawn = init(CFG, jax.random.key(1), nvidia_mix)
    assert isinstance(drawn.attention.q_proj, Fp8)
    assert isinstance(drawn.moe.gate_up, Nvfp4)
    for w in (drawn.attention.q_proj, drawn.moe.gate_up, drawn.lm_head, drawn.moe.router):
        assert 0.018 < float(jnp.std(dequantise(w))) < 0.022


def test_a_stack_of_mixed_formats_keeps_the_order_of_its_layers() -> None:
    gate_up = shapes(CFG, first_layer_dense).moe.gate_up
    assert isinstance(gate_up, PerLayer)
    assert gate_up.where == ((0, 0), (1, 0))
    assert [type(group) for group in gate_up.groups] == [Dense, Nvfp4]


def test_every_leaf_has_its_own_name() -> None:
    names = [
        name.format(layer=layer, expert="E")
        for _, leaf in leaves(structure(CFG))
        for name in (leaf.names if isinstance(leaf, Matrix) else (leaf.name,))
        for layer in leaf.layers or (None,)
    ]
    assert len(set(names)) == len(names)
    assert np.prod(structure(CFG).lm_head.stack) == 1
