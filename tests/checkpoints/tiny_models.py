"""The configuration of Qwen3.6-35B-A3B, and a tiny one of the same architecture."""

from dataclasses import replace
from typing import Any

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.published import RAW

QWEN36 = Config.from_dict(RAW)

TINY_DICT: dict[str, Any] = {
    "text_config": RAW["text_config"]
    | {
        "layer_types": RAW["text_config"]["layer_types"][:4],
        "dtype": "float32",
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "rope_parameters": {
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "in_channels": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": 32,
    },
}
TINY = Config.from_dict(TINY_DICT)
TINY_TEXT = replace(TINY, vision=None)
