"""The shape of a Qwen3.5/3.6 mixture-of-experts model, read from its `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 64
"""Tokens a chunk of Gated DeltaNet's parallel form: the grid on which a prefill may be split."""

LINEAR, FULL = "linear_attention", "full_attention"


class ConfigError(ValueError):
    """A `config.json` that this engine cannot run; the message names the field and the remedy."""


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. Sizes in elements, `patch_size` in pixels."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int

    @property
    def patch_dim(self) -> int:
        """Values in one patch vector: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_dim(self) -> int:
        """Width of the concatenation of the patches that become one token."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True)
class Config:
    """Everything static about the model; hashable, so that it can be a static argument of `jit`.

    Field names are those of the published `text_config`; see `read` for defaults.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    mtp_layers: int
    dtype: str
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP head not counted."""
        return len(self.layer_types)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that mix by Gated DeltaNet, in order of their stack."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that mix by gated full attention, in order of their stack."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def key_dim(self) -> int:
        """Width of all Gated DeltaNet keys of a token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all Gated DeltaNet values of a token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of Gated DeltaNet's causal convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def read(cls, directory: str | Path) -> "Config":
        """Read `directory/config.json`. Raises ConfigError, or FileNotFoundError by name."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: not a checkpoint directory")
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Config":
        """From the published nesting (`text_config`, `vision_config`) or a bare text config."""
        text = raw.get("text_config", raw)
        kind = text.get("model_type", "")
        if not kind.startswith("qwen3_5_moe"):
            raise ConfigError(
                f"model_type is {kind!r}; this engine runs 'qwen3_5_moe' "
                "(Qwen3.5-35B-A3B, Qwen3.6-35B-A3B and checkpoints of that architecture)"
            )

        def get(name: str) -> Any:
            if name not in text:
                raise ConfigError(f"text_config has no {name!r}; is the file complete?")
            return text[name]

        rope = get("rope_parameters")
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(
                f"rope_type {rope['rope_type']!r} is not supported; remove the override to run "
                "with the native context"
            )
        fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        return cls(
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            layer_types=_layer_types(text, get("num_hidden_layers")),
            num_attention_heads=get("num_attention_heads"),
            num_key_value_heads=get("num_key_value_heads"),
            head_dim=get("head_dim"),
            rope_theta=float(rope["rope_theta"]),
            rotary_dim=int(get("head_dim") * fraction),
            mrope_section=tuple(rope.get("mrope_section", (11, 11, 10))),
            linear_num_key_heads=get("linear_num_key_heads"),
            linear_num_value_heads=get("linear_num_value_heads"),
            linear_key_head_dim=get("linear_key_head_dim"),
            linear_value_head_dim=get("linear_value_head_dim"),
            linear_conv_kernel_dim=get("linear_conv_kernel_dim"),
            num_experts=get("num_experts"),
            num_experts_per_tok=get("num_experts_per_tok"),
            moe_intermediate_size=get("moe_intermediate_size"),
            shared_expert_intermediate_size=get("shared_expert_intermediate_size"),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            max_position_embeddings=text.get("max_position_embeddings", 32768),
            mtp_layers=text.get("mtp_num_hidden_layers", 0),
            dtype=text.get("dtype", raw.get("dtype", raw.get("torch_dtype", "bfloat16"))),
            vision=_vision(raw.get("vision_config")),
            image_token_id=raw.get("image_token_id"),
            video_token_id=raw.get("video_token_id"),
            vision_start_token_id=raw.get("vision_start_token_id"),
        )

    def __post_init__(self) -> None:
        unknown = set(self.layer_types) - {LINEAR, FULL}
        if unknown:
            raise ConfigError(f"layer_types holds {sorted(unknown)}; known: {LINEAR}, {FULL}")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"dtype {self.dtype!r}; supported: bfloat16, float16, float32")
        if sum(self.mrope_section) != self.rotary_dim // 2:
            raise ConfigError(
                f"mrope_section {self.mrope_section} must add up to half of the "
                f"{self.rotary_dim} rotary dimensions"
            )
        for above, below in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, above) % getattr(self, below):
                raise ConfigError(
                    f"{above} ({getattr(self, above)}) is not a multiple of "
                    f"{below} ({getattr(self, below)})"
                )
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError("num_experts_per_tok is larger than num_experts")
        if self.mtp_layers > 1:
            raise ConfigError(f"mtp_num_hidden_layers is {self.mtp_layers}; 0 or 1 is supported")


def _layer_types(text: Mapping[str, Any], count: int) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", 4)
        types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries for {count} layers")
    return tuple(types)


def _vision(raw: Mapping[str, Any] | None) -> VisionConfig | None:
    if raw is None:
        return None
    if raw.get("deepstack_visual_indexes"):
        raise ConfigError("deepstack_visual_indexes is not empty; this family has no deepstack")
    missing = [f for f in VisionConfig.__dataclass_fields__ if f not in raw]
    if missing:
        raise ConfigError(f"vision_config has no {missing[0]!r}; is the file complete?")
    return VisionConfig(**{f: raw[f] for f in VisionConfig.__dataclass_fields__})
