"""Writing SAM as transformers' `Sam3Model` is published: safetensors and `config.json`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.files import DTYPES, CheckpointError
from checkpoints.sam.inventory import leaves, transformers
from checkpoints.sam.names import in_transformers
from checkpoints.write import Output, ShardWriter
from jaxinfer.sam.config import Config
from jaxinfer.sam.leaves import Leaf
from jaxinfer.sam.params import Params
from jaxinfer.sam.structure import structure

SHARD_BYTES = 5 * 10**9
"""Size that a file does not exceed."""


def write(directory: str | Path, cfg: Config, params: Params) -> None:
    """Write parameters, in the type that they have, into a directory that is made if need be.

    What the engine has no use for (see `inventory.transformers`) is written as zeros, so that
    transformers finds every tensor that it looks for. `Sam3Model` has no click head.

    Raises CheckpointError if there are weights already, or a click head that would be lost.
    """
    if params.clicks is not None:
        raise CheckpointError(
            f"{directory}: the layout of Sam3Model has no place for the click head; leave it out "
            "with dataclasses.replace(params, clicks=None)"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(directory.glob("model*.safetensors*")):
        raise CheckpointError(f"{found[0]} exists already; write to another directory")
    arrays = list(zip(leaves(structure(cfg)), jax.tree.leaves(params), strict=True))
    dtype_of = {name: array.dtype for leaf, array in arrays for name, _ in in_transformers(leaf)}
    tensors = transformers(cfg)
    unused = {name: tensor for name, tensor in tensors.items() if tensor.ignored}
    dtype_of |= dict.fromkeys(unused, params.neck.x1_conv1.weight.dtype)
    outputs = [Output(name, _name(dtype_of[name]), t.shape) for name, t in tensors.items()]
    with ShardWriter(directory, ([output] for output in outputs), SHARD_BYTES) as writer:
        for leaf, array in arrays:
            for name, values in _parts(leaf, np.asarray(array)):
                writer.write(name, values)
        for name, tensor in unused.items():
            writer.write(name, np.zeros(tensor.shape, dtype_of[name]))
    (directory / "config.json").write_text(json.dumps(to_dict(cfg), indent=2) + "\n")


def to_dict(cfg: Config) -> dict[str, Any]:
    """The `config.json` of a `Sam3Model` of this shape, as `sam.config.from_dict` reads it."""
    trunk, text, grid = cfg.trunk, cfg.text, cfg.trunk.grid
    common = {
        "hidden_size": cfg.width,
        "num_attention_heads": cfg.num_heads,
        "layer_norm_eps": 1e-6,
    }
    layers = common | {"intermediate_size": cfg.intermediate_size, "hidden_act": "relu"}
    return {
        "architectures": ["Sam3Model"],
        "model_type": "sam3",
        "vision_config": {
            "model_type": "sam3_vision_model",
            "fpn_hidden_size": cfg.width,
            "scale_factors": [4.0, 2.0, 1.0, 0.5],
            "backbone_feature_sizes": [[scale * grid] * 2 for scale in (4, 2, 1)],
            "backbone_config": {
                "model_type": "sam3_vit_model",
                "hidden_size": trunk.hidden_size,
                "intermediate_size": trunk.intermediate_size,
                "num_hidden_layers": trunk.num_layers,
                "num_attention_heads": trunk.num_heads,
                "image_size": trunk.image_size,
                "patch_size": trunk.patch_size,
                "window_size": trunk.window,
                "global_attn_indexes": list(trunk.global_layers),
                "pretrain_image_size": trunk.table * trunk.patch_size,
                "hidden_act": "gelu" if trunk.gelu == "erf" else "gelu_pytorch_tanh",
                "layer_norm_eps": trunk.layer_norm_eps,
                "rope_parameters": {"rope_type": "axial", "rope_theta": trunk.rope_theta},
            },
        },
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_heads,
            "max_position_embeddings": text.context,
            "projection_dim": text.hidden_size // 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "pad_token_id": 0,
            "bos_token_id": text.vocab_size - 2,
            "eos_token_id": text.vocab_size - 1,
        },
        "geometry_encoder_config": layers
        | {"model_type": "sam3_geometry_encoder", "num_layers": cfg.geometry_layers, "roi_size": 7},
        "detr_encoder_config": layers
        | {"model_type": "sam3_detr_encoder", "num_layers": cfg.encoder_layers},
        "detr_decoder_config": layers
        | {
            "model_type": "sam3_detr_decoder",
            "num_layers": cfg.decoder_layers,
            "num_queries": cfg.num_queries,
        },
        "mask_decoder_config": common
        | {"model_type": "sam3_mask_decoder", "num_upsampling_stages": 3},
    }


def _name(dtype: np.dtype) -> str:
    """The name of a type in safetensors."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _parts(leaf: Leaf, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that transformers has for a parameter."""
    stored = leaf.restore(array)
    if leaf.layout == "table":
        stored = stored[:, 1:]
    names = [name for name, _ in in_transformers(leaf)]
    yield from zip(names, np.split(stored, len(names)), strict=True)
