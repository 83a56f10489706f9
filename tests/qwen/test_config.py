"""Configurations are read as published, and refused by name when they cannot be run."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.tiny_qwen_training.architecture import CONFIG
from jaxinfer.qwen.config import Config, ConfigError
from jaxinfer.qwen.published import RAW
from tests.qwen.helpers import GOLDENS


def text(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "text_config": {**CONFIG["text_config"], **changes}}


def test_published_nesting_and_bare_text_config_agree() -> None:
    nested, bare = Config.from_dict(CONFIG), Config.from_dict(CONFIG["text_config"])
    assert bare.layer_types == nested.layer_types
    assert nested.gdn_layers == (0, 1, 2, 4, 5, 6)
    assert nested.attention_layers == (3, 7)


def test_the_configuration_of_qwen36_is_the_published_file() -> None:
    """By its SHA-256, once keys are sorted and indented as there."""
    text = json.dumps(RAW, indent=4, sort_keys=True)
    digest = "93a4693fa9d8392fbfccd4b3c9873f4bfdcb14fdede978b123d07d19675efe99"
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_vision_is_read() -> None:
    vision = Config.read(GOLDENS).vision
    assert vision is not None
    assert vision.patch_dim == 3 * 2 * 4 * 4


def test_layer_types_follow_the_interval_when_absent() -> None:
    raw = text()
    del raw["text_config"]["layer_types"]
    assert Config.from_dict(raw).attention_layers == (3, 7)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"layer_types": ["linear_attention"]}, "1 entries for 8 layers"),
        ({"layer_types": ["sliding"] * 8}, "sliding"),
        ({"dtype": "int8"}, "int8"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) is not a multiple"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 1]}}, "mrope_section"),
    ],
)
def test_what_cannot_be_run_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_dict(text(**changes))
    assert named in str(error.value)


@pytest.mark.parametrize("field", ["hidden_size", "rope_parameters", "num_experts"])
def test_a_missing_field_is_named(field: str) -> None:
    raw = text()
    del raw["text_config"][field]
    with pytest.raises(ConfigError, match=field):
        Config.from_dict(raw)


def test_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Config.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text(dtype="int8")))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Config.read(tmp_path)
