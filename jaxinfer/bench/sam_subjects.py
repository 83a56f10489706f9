"""The SAM models that are measured, by name, with their weights on the device."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.sam import fp8
from jaxinfer.sam.compiling import jit
from jaxinfer.sam.config import SAM3, Config, TextConfig, TrunkConfig, for_gpu
from jaxinfer.sam.leaves import init
from jaxinfer.sam.params import Linear, Params
from jaxinfer.sam.structure import structure
from jaxinfer.sam.tokenizer import Tokenizer, from_merges
from jaxinfer.segmentation.loading import SamModel

TOY = Config(
    trunk=TrunkConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        image_size=112,
        patch_size=14,
        window=4,
        global_layers=(1,),
        table=4,
    ),
    text=TextConfig(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        context=32,
    ),
    width=32,
    num_heads=4,
    intermediate_size=64,
    geometry_layers=1,
    encoder_layers=1,
    decoder_layers=1,
    num_queries=12,
)
"""One layer or two of each kind: everything can be tried in seconds, on a CPU."""

DRAWN: Mapping[str, Config] = {"full": SAM3, "toy": TOY}
"""Models whose weights are drawn at random."""

TABLE_SCALE, FINE_SCALE = 0.01, 0.02
"""Of the learnt positions, and of the two finer maps of the neck; see `draw`."""


@dataclass(frozen=True)
class SamSubject:
    """A model on the device.

    Attributes:
        name: what the user calls it.
        weights: where its weights come from and in which formats: said beside every figure.
        fp8: whether the trunk's matrices are in FP8.
        model: configuration, parameters and tokeniser.
    """

    name: str
    weights: str
    fp8: bool
    model: SamModel


def sam_subject(name: str, *, in_fp8: bool = False) -> SamSubject:
    """Draw a model of `DRAWN` in bfloat16, or load a checkpoint; then round its trunk to FP8."""
    if name in DRAWN:
        cfg, weights = for_gpu(DRAWN[name]), "random numbers in bfloat16"
        tokenizer = Tokenizer(from_merges([]), cfg.text.context)
        model = SamModel(cfg, draw(cfg, jax.random.key(0)), tokenizer)
    else:
        model, weights = SamModel.load(name), "a checkpoint"
    if in_fp8:
        model = replace(model, params=fp8.quantise(model.params))
        weights += ", the trunk's matrices in FP8"
    jax.block_until_ready(model.params)
    return SamSubject(name, weights, in_fp8, model)


def draw(cfg: Config, key: jax.Array) -> Params:
    """Random bfloat16 parameters, `jaxinfer.sam.leaves.init` without compiling it as one.

    What would make masks a noise of single pixels, for which run lengths are not made, is damped:
    the position table; the end of the neck's finer maps, in which neighbours are drawn one by one;
    and the differences within the kernels of the mask head. So masks are areas that follow what is
    seen, as they are with trained weights.
    """
    leaves, treedef = jax.tree.flatten(structure(cfg))
    one = jit(partial(init, dtype=jnp.bfloat16), static_argnums=0)
    # Without their names, leaves of one shape are one program.
    nameless = [replace(leaf, name="") for leaf in leaves]
    with ThreadPoolExecutor() as pool:
        drawn = pool.map(one, nameless, jax.random.split(key, len(leaves)))
    params = treedef.unflatten(list(drawn))
    trunk, neck = params.trunk, params.neck
    x4, x2 = jax.tree.map(lambda x: FINE_SCALE * x, (neck.x4_conv3, neck.x2_conv3))
    return replace(
        params,
        trunk=replace(trunk, positions=TABLE_SCALE * trunk.positions),
        neck=replace(neck, x4_conv3=x4, x2_conv3=x2),
        masks=replace(params.masks, convs=tuple(map(_even, params.masks.convs))),
    )


def _even(conv: Linear) -> Linear:
    """A convolution of 3 x 3 whose nine matrices are one, with outputs of the same size."""
    mean = 3 * conv.weight.mean((0, 1), dtype=jnp.float32).astype(conv.weight.dtype)
    return replace(conv, weight=jnp.broadcast_to(mean, conv.weight.shape))
