"""Every published layout loads into the same parameters, bit for bit."""

import json
import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import LoadReport, load
from checkpoints.names import canonical
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Format, Matrix, all_dense, nvidia_mix
from pallas_kernels import PerLayer
from tests.checkpoints.published_form import Tensors, assert_same, published, random_params, write
from tests.checkpoints.tiny_models import TINY, TINY_DICT, TINY_TEXT

SMALL = 512
"""Bytes of a piece: arrays of the tiny model then take several, and boundaries fall in tensors."""


def layer_by_layer(matrix: Matrix, layer: int | None) -> Format:
    """Formats that change from layer to layer, as in compressed-tensors mixtures."""
    if matrix.module.startswith(("mtp.", "model.visual.")) or matrix.rows == 1:
        return "dense"
    return ("nvfp4", "fp8_channel", "dense", "fp8")[(layer or 0) % 4]


def static_channels(matrix: Matrix, layer: int | None) -> Format:
    if matrix.module.startswith("model.visual."):
        return "dense"
    return "fp8_channel_static" if "self_attn" in matrix.module else "fp8_static"


@pytest.mark.parametrize("piece_bytes", [SMALL, 2**27], ids=["pieces", "whole"])
@pytest.mark.parametrize(
    ("format_of", "tool", "fused"),
    [
        (all_dense, "modelopt", True),
        (all_dense, "modelopt", False),
        (nvidia_mix, "modelopt", True),
        (layer_by_layer, "modelopt", False),
        (layer_by_layer, "compressed-tensors", True),
        (static_channels, "modelopt", True),
    ],
    ids=["fused", "per-expert", "nvidia-mix", "mixed", "compressed-tensors", "static"],
)
def test_layouts(
    tmp_path: Path,
    format_of: Callable[[Matrix, int | None], Format],
    tool: str,
    fused: bool,
    piece_bytes: int,
) -> None:
    params = random_params(TINY, format_of)
    tensors = published(TINY, params, tool, fused, mtp_fused=fused)
    report = LoadReport()
    directory = write(tmp_path / "c", tensors, shard_bytes=20_000)
    cfg, loaded = load(directory, report=report, piece_bytes=piece_bytes)
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    assert cfg == TINY
    assert_same(loaded, params)
    assert report.tensors == len(tensors)
    assert report.bytes_on_device == sum(a.nbytes for a in jax.tree.leaves(params))
    assert not report.warnings


def test_layers_in_different_formats_make_groups(tmp_path: Path) -> None:
    tensors = published(TINY, random_params(TINY, layer_by_layer), "compressed-tensors")
    _, params = load(write(tmp_path / "c", tensors))
    assert isinstance(params.moe.gate_up, PerLayer)
    assert params.moe.gate_up.where == ((0, 0), (1, 0), (2, 0), (3, 0))


@pytest.mark.parametrize(
    ("text", "visual", "head", "mtp"),
    [
        ("model.", "visual.", "lm_head.", "mtp."),
        ("", "visual.", "lm_head.", "mtp."),
        ("language_model.model.", "visual.", "language_model.lm_head.", "language_model.mtp."),
        ("model.language_model.", "model.vision_tower.visual.", "model.lm_head.", "model.mtp."),
    ],
)
def test_prefixes(tmp_path: Path, text: str, visual: str, head: str, mtp: str) -> None:
    params = random_params(TINY)

    def renamed(name: str) -> str:
        for old, new in (
            ("model.language_model.", text),
            ("model.visual.", visual),
            ("lm_head.", head),
            ("mtp.", mtp),
        ):
            if name.startswith(old):
                return new + name.removeprefix(old)
        raise AssertionError(name)

    tensors = {renamed(name): array for name, array in published(TINY, params).items()}
    cfg, loaded = load(write(tmp_path / "c", tensors))
    assert cfg == TINY
    assert_same(loaded, params)


def test_names_that_hold_the_words_of_others() -> None:
    assert canonical("mtp.layers.0.x") == "mtp.layers.0.x"
    assert canonical("model.visual.merger.norm.weight") == "model.visual.merger.norm.weight"
    assert canonical("norm.weight") == "model.language_model.norm.weight"
    assert canonical("something.else") == "something.else"


def test_types_are_converted(tmp_path: Path) -> None:
    cfg = replace(TINY, dtype="bfloat16")
    config = TINY_DICT | {"text_config": TINY_DICT["text_config"] | {"dtype": "bfloat16"}}
    tensors = {
        name: array.astype((np.float32, np.float16, ml_dtypes.bfloat16)[i % 3])
        for i, (name, array) in enumerate(published(TINY, random_params(TINY)).items())
    }
    loaded_cfg, loaded = load(write(tmp_path / "c", tensors, config), piece_bytes=SMALL)
    assert loaded_cfg == cfg
    assert loaded.gdn.A_log.dtype == loaded.gdn.dt_bias.dtype == jnp.float32
    name = "model.language_model.embed_tokens.weight"
    np.testing.assert_array_equal(
        np.asarray(loaded.embed_tokens), tensors[name].astype(ml_dtypes.bfloat16)
    )


def without(tensors: Tensors, prefix: str) -> Tensors:
    return {name: array for name, array in tensors.items() if not name.startswith(prefix)}


def test_absent_mtp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = random_params(TINY)
    report = LoadReport()
    with caplog.at_level(logging.WARNING):
        cfg, loaded = load(
            write(tmp_path / "c", without(published(TINY, params), "mtp.")), report=report
        )
    assert cfg == replace(TINY, mtp_layers=0)
    assert_same(loaded, replace(params, mtp=None))
    assert "without MTP" in report.warnings[0]
    assert "without MTP" in caplog.text


def test_absent_vision(tmp_path: Path) -> None:
    params, report = random_params(TINY), LoadReport()
    directory = write(tmp_path / "c", without(published(TINY, params), "model.visual."))
    cfg, loaded = load(directory, report=report)
    assert cfg == TINY_TEXT
    assert_same(loaded, replace(params, vision=None))
    assert "without vision" in report.warnings[0]


def test_vision_left_out(tmp_path: Path) -> None:
    params, report = random_params(TINY), LoadReport()
    directory = write(tmp_path / "c", published(TINY, params))
    cfg, loaded = load(directory, vision=False, report=report)
    assert cfg == TINY_TEXT
    assert_same(loaded, replace(params, vision=None))
    assert not report.warnings


def test_parts_that_the_configuration_does_not_have(tmp_path: Path) -> None:
    text = {k: v for k, v in TINY_DICT["text_config"].items() if k != "mtp_num_hidden_layers"}
    tensors = published(TINY, random_params(TINY))
    report = LoadReport()
    cfg, loaded = load(write(tmp_path / "c", tensors, {"text_config": text}), report=report)
    assert loaded.mtp is None
    assert loaded.vision is None
    assert cfg.mtp_layers == 0
    assert len(report.warnings) == 2


@pytest.mark.parametrize(("value", "warnings"), [(1.0, 0), (0.5, 1)])
def test_scales_of_the_kv_cache(tmp_path: Path, value: float, warnings: int) -> None:
    tensors = published(TINY, random_params(TINY))
    attention = "model.language_model.layers.3.self_attn."
    tensors[attention + "k_proj.k_scale"] = np.array(value, np.float32)
    tensors[attention + "v_scale"] = np.array([1.0], np.float32)
    report = LoadReport()
    load(write(tmp_path / "c", tensors), report=report)
    assert len(report.warnings) == warnings


def test_input_scale_of_fused_parts_is_the_larger(tmp_path: Path) -> None:
    tensors = published(TINY, random_params(TINY, static_channels), fused=False)
    shared = "model.language_model.layers.2.mlp.shared_expert."
    tensors[shared + "gate_proj.input_scale"] = np.array(2.0, np.float32)
    tensors[shared + "up_proj.input_scale"] = np.array(8.0, np.float32)
    _, params = load(write(tmp_path / "c", tensors))
    assert params.moe.shared_gate_up.input_scale[2] == 8.0


def test_host_memory_stays_small(tmp_path: Path) -> None:
    text = TINY_DICT["text_config"] | {
        "num_experts": 32,
        "moe_intermediate_size": 64,
        "hidden_size": 64,
        "mtp_num_hidden_layers": 0,
    }
    cfg = Config.from_dict({"text_config": text})
    tensors = published(cfg, random_params(cfg), fused=False)
    directory = write(tmp_path / "c", tensors, {"text_config": text})
    del tensors
    load(directory, piece_bytes=2**17)  # compiled now, so that only the transfer is measured
    tracemalloc.start()
    report = LoadReport()
    load(directory, report=report, piece_bytes=2**17)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.bytes_on_device > 6 * 2**20
    assert peak < 2 * 2**20


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = LoadReport()
    directory = write(tmp_path / "c", published(TINY, random_params(TINY)))
    load(directory, report=report, progress=lambda *a: seen.append(a), piece_bytes=SMALL)
    assert seen[-1] == (report.bytes_on_device, report.bytes_on_device)
    assert seen == sorted(seen)
    assert {"headers", "read", "device"} <= report.seconds.keys()


def test_index_decides_between_copies_of_a_tensor(tmp_path: Path) -> None:
    params = random_params(TINY)
    tensors = published(TINY, params)
    directory = write(tmp_path / "c", tensors, shard_bytes=20_000)
    position, norm = "model.visual.pos_embed.weight", "model.language_model.norm.weight"
    other = write(tmp_path / "d", {position: tensors[position], norm: np.zeros(32, np.float32)})
    (other / "model.safetensors").rename(directory / "other.safetensors")
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"][position] = "other.safetensors"
    index_file.write_text(json.dumps(index))
    _, loaded = load(directory)
    assert_same(loaded, params)
