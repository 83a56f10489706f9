"""Configurations are read as published, and refused by name when they cannot be run."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.sam.config import SAM3, ConfigError, from_dict
from tests.sam.helpers import GOLDENS

PUBLISHED = {
    "vision_config": {
        "fpn_hidden_size": 256,
        "backbone_config": {
            "hidden_size": 1024,
            "intermediate_size": 4736,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "image_size": 1008,
            "patch_size": 14,
            "pretrain_image_size": 336,
            "window_size": 24,
            "global_attn_indexes": [7, 15, 23, 31],
            "layer_norm_eps": 1e-6,
        },
    },
    "text_config": {
        "vocab_size": 49408,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 32,
    },
    "geometry_encoder_config": {
        "num_layers": 3,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    },
    "detr_encoder_config": {
        "num_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    },
    "detr_decoder_config": {
        "num_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "num_queries": 200,
    },
    "mask_decoder_config": {"hidden_size": 256, "num_attention_heads": 8},
}
"""What transformers' own default configuration says where the golden model's differs."""


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`raw` with fields replaced at any depth."""
    new = dict(raw)
    for name, value in changes.items():
        new[name] = changed(new[name], value) if isinstance(value, dict) else value
    return new


@pytest.fixture
def raw() -> dict[str, Any]:
    return json.loads((GOLDENS / "config.json").read_text())


def test_the_published_shape_is_read_with_the_original_epsilon(raw: dict[str, Any]) -> None:
    published = changed(raw, PUBLISHED)
    assert from_dict(published) == SAM3
    video = {"model_type": "sam3_video", "tracker_config": {}, "detector_config": published}
    assert from_dict(video) == SAM3


def test_another_shape_has_the_epsilon_and_activation_of_its_file(raw: dict[str, Any]) -> None:
    backbone = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
    trunk = from_dict(changed(raw, {"vision_config": {"backbone_config": backbone}})).trunk
    assert trunk == replace(from_dict(raw).trunk, layer_norm_eps=1e-6, gelu="tanh")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "sam2"}, "model_type is 'sam2'; this engine runs 'sam3'"),
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {"hidden_act": "quick_gelu"}}, "text_config.hidden_act is 'quick_gelu'"),
        ({"text_config": {"vocab_size": None}}, "text_config.vocab_size is missing"),
        ({"text_config": {"num_attention_heads": 3}}, "hidden_size (40) is not a multiple"),
        ({"detr_encoder_config": {"hidden_size": 64}}, "detr_encoder_config.hidden_size is 64"),
        ({"geometry_encoder_config": {"roi_size": 5}}, "roi_size is 5; this engine runs 7"),
        ({"detr_decoder_config": {"num_queries": -1}}, "num_queries is -1"),
        ({"detr_decoder_config": {"num_queries": "ten"}}, "num_queries is 'ten'"),
        ({"vision_config": {"scale_factors": [2.0, 1.0]}}, "scale_factors is [2.0, 1.0]"),
        ({"vision_config": {"backbone_config": {"window_size": 5}}}, "grid (12)"),
        ({"vision_config": {"backbone_config": {"patch_size": 5}}}, "image_size (48)"),
        ({"vision_config": {"backbone_config": {"image_size": [48, 32]}}}, "image_size is [48"),
        ({"vision_config": {"backbone_config": {"hidden_act": "silu"}}}, "hidden_act is 'silu'"),
        ({"vision_config": {"backbone_config": {"global_attn_indexes": [4]}}}, "layer 4"),
        ({"vision_config": {"backbone_config": {"num_attention_heads": 8}}}, "multiple of 4"),
        (
            {"vision_config": {"backbone_config": {"rope_parameters": {"rope_type": "yarn"}}}},
            "rope_parameters.rope_type is 'yarn'",
        ),
    ],
)
def test_what_cannot_be_run_is_named(
    raw: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(changed(raw, changes))
    assert named in str(error.value)
