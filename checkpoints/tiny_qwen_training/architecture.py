"""The architecture of `tiny_qwen`: Qwen3.6-35B-A3B in small, as its `config.json`."""

from typing import Any

CONTROL_TOKENS = 4063
"""Id of the first control token; they follow in Qwen's own order."""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": CONTROL_TOKENS + 12,
    "video_token_id": CONTROL_TOKENS + 13,
    "vision_start_token_id": CONTROL_TOKENS + 9,
    "vision_end_token_id": CONTROL_TOKENS + 10,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "max_position_embeddings": 2048,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "bos_token_id": CONTROL_TOKENS,
        "eos_token_id": CONTROL_TOKENS,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
}
