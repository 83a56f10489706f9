"""Counts, bytes and names of the published files of SAM 3 and 3.1."""

import math

import jax
import pytest

from checkpoints.sam.inventory import Version, meta, nbytes, published_name, transformers
from checkpoints.sam.names import in_transformers
from jaxinfer.sam import clicks
from jaxinfer.sam.config import SAM3
from jaxinfer.sam.leaves import Leaf
from jaxinfer.sam.structure import structure


@pytest.mark.parametrize(
    ("version", "tensors", "size", "detector"),
    [("3", 1_465, 3_449_659_104, 1_156), ("3.1", 1_623, 3_502_181_296, 1_166)],
)
def test_metas_files(version: Version, tensors: int, size: int, detector: int) -> None:
    found = meta(SAM3, version)
    assert len(found) == tensors
    assert nbytes(found) == size
    names = [published_name(name) for name in found]
    assert sum(name.startswith("detector.") for name in names) == detector
    assert sum(not tensor.ignored for tensor in found.values()) == 1_085


def test_the_same_tensors_are_wanted_of_both() -> None:
    wanted = [
        {name for name, tensor in meta(SAM3, version).items() if not tensor.ignored}
        for version in ("3", "3.1")
    ]
    assert wanted[0] == wanted[1] == {leaf.name for leaf in jax.tree.leaves(structure(SAM3))}


def test_sam3_model_of_transformers() -> None:
    found = transformers(SAM3)
    assert len(found) == 1_468
    assert sum(math.prod(tensor.shape) for tensor in found.values()) == 840_376_374


@pytest.mark.parametrize("version", ["3", "3.1"])
def test_click_heads_are_in_the_files(version: Version) -> None:
    found = meta(SAM3, version)
    for leaf in jax.tree.leaves(clicks.structure(SAM3, version)):
        assert found[leaf.name].shape == leaf.shape, leaf


TRUNK = "backbone.vision_backbone.trunk"
TEXT = "backbone.language_backbone"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (f"{TRUNK}.pos_embed", "vision_encoder.backbone.embeddings.position_embeddings"),
        (
            f"{TRUNK}.blocks.31.attn.proj.bias",
            "vision_encoder.backbone.layers.31.attention.o_proj.bias",
        ),
        (
            "backbone.vision_backbone.convs.0.dconv_2x2_1.weight",
            "vision_encoder.neck.fpn_layers.0.scale_layers.2.weight",
        ),
        # The name that transformers has twice.
        (f"{TEXT}.resizer.weight", "text_projection.weight"),
        (f"{TEXT}.encoder.text_projection", "text_encoder.text_projection.weight"),
        (
            f"{TEXT}.encoder.transformer.resblocks.3.attn.out_proj.weight",
            "text_encoder.text_model.encoder.layers.3.self_attn.out_proj.weight",
        ),
        ("geometry_encoder.norm.weight", "geometry_encoder.prompt_layer_norm.weight"),
        ("geometry_encoder.encode_norm.bias", "geometry_encoder.output_layer_norm.bias"),
        (
            "transformer.encoder.layers.2.cross_attn_image.out_proj.weight",
            "detr_encoder.layers.2.cross_attn.o_proj.weight",
        ),
        # The norms whose numbers are out of order.
        (
            "transformer.decoder.layers.5.norm1.weight",
            "detr_decoder.layers.5.vision_cross_attn_layer_norm.weight",
        ),
        (
            "transformer.decoder.layers.5.norm2.weight",
            "detr_decoder.layers.5.self_attn_layer_norm.weight",
        ),
        (
            "transformer.decoder.layers.5.catext_norm.weight",
            "detr_decoder.layers.5.text_cross_attn_layer_norm.weight",
        ),
        (
            "transformer.decoder.layers.5.norm3.weight",
            "detr_decoder.layers.5.mlp_layer_norm.weight",
        ),
        ("transformer.decoder.bbox_embed.layers.2.bias", "detr_decoder.box_head.layer3.bias"),
        (
            "transformer.decoder.boxRPB_embed_y.layers.1.bias",
            "detr_decoder.box_rpb_embed_y.layer2.bias",
        ),
        ("segmentation_head.cross_attn_norm.bias", "mask_decoder.prompt_cross_attn_norm.bias"),
        ("dot_prod_scoring.prompt_mlp.out_norm.bias", "dot_product_scoring.text_mlp_out_norm.bias"),
        ("dot_prod_scoring.hs_proj.weight", "dot_product_scoring.query_proj.weight"),
    ],
)
def test_names_of_transformers(ours: str, theirs: str) -> None:
    stored = meta(SAM3, "3")[ours]
    layout = "table" if ours.endswith("pos_embed") else "plain"
    [(name, shape)] = in_transformers(Leaf(ours, stored.shape, layout))
    assert name == theirs
    assert shape == transformers(SAM3)[theirs].shape
