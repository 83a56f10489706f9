"""The models that are measured, by name, with their weights on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from checkpoints import load, resolve
from jaxinfer.bench.against_transformers import MID, mid_size
from jaxinfer.bench.measure import numbers_tokenizer
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import FormatOf, Params, all_dense, init, nvidia_mix
from jaxinfer.qwen.published import RAW

TOY: dict[str, Any] = {
    **MID,
    "text_config": {
        **MID["text_config"],
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_parameters": {
            **MID["text_config"]["rope_parameters"],
            "mrope_section": [2, 1, 1],
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
"""A layer of each kind and a small vocabulary: everything can be tried in seconds, on a CPU."""

_MIX, _BF16 = "random numbers in NVIDIA's mix", "random numbers in bfloat16"

DRAWN: Mapping[str, tuple[dict[str, Any], FormatOf, str]] = {
    "full": (RAW, nvidia_mix, _MIX),
    "full-bf16": (RAW, all_dense, _BF16),
    "mid": (mid_size(8), nvidia_mix, _MIX),
    "mid-bf16": (mid_size(8), all_dense, _BF16),
    "toy": (TOY, nvidia_mix, _MIX),
}
"""Models whose weights are drawn at random: configuration, formats, and what is said of them."""


@dataclass(frozen=True)
class Subject:
    """A model on the device.

    Attributes:
        name: what the user calls it.
        weights: where its weights come from: said beside every figure.
        cfg: its configuration.
        params: its parameters.
        tokenizer: its own, or one that spells numbers.
    """

    name: str
    weights: str
    cfg: Config
    params: Params
    tokenizer: Tokenizer

    def prompts(self, count: int, size: int, seed: int = 0) -> list[list[int]]:
        """Prompts of random tokens."""
        rng = np.random.default_rng(seed)
        return rng.integers(0, self.cfg.vocab_size, (count, size)).tolist()


def configuration(name: str) -> Mapping[str, Any] | None:
    """The `config.json` of a model that is drawn at random; None for any other."""
    return DRAWN[name][0] if name in DRAWN else None


def subject(name: str) -> Subject:
    """Draw a model of `DRAWN` on the device, or load a checkpoint by name or directory."""
    if name in DRAWN:
        raw, format_of, weights = DRAWN[name]
        cfg = replace(Config.from_dict(raw), vision=None)
        params = jax.block_until_ready(init(cfg, jax.random.key(0), format_of))
        return Subject(name, weights, cfg, params, numbers_tokenizer(cfg.vocab_size))
    directory = resolve(name)
    cfg, params = load(directory, vision=False)
    return Subject(name, "a checkpoint", cfg, params, numbers_tokenizer(cfg.vocab_size))
