"""Counts and bytes of the published checkpoints, and of a decode step."""

import numpy as np
import pytest

from checkpoints.files import DTYPES
from checkpoints.inventory import account, inventory, nbytes, step_bytes
from checkpoints.quantise import experts_only
from jaxinfer.qwen.params import FormatOf, all_dense, nvidia_mix, shapes
from tests.checkpoints.published_form import published, random_params
from tests.checkpoints.tiny_models import QWEN36, TINY


def test_official_bf16() -> None:
    tensors = inventory(QWEN36)
    assert len(tensors) == 1_045
    assert nbytes(tensors) == 71_903_645_408


def test_nvidia_nvfp4() -> None:
    tensors = inventory(QWEN36, nvidia_mix)
    assert len(tensors) == 124_468
    assert nbytes(tensors) == 23_407_580_856


def test_qwen35_with_experts_of_mtp_one_by_one() -> None:
    tensors = inventory(QWEN36, layout="fused-text")
    assert len(tensors) == 1_811
    assert nbytes(tensors) == 71_903_645_408
    assert tensors["mtp.layers.0.mlp.experts.255.up_proj.weight"] == ("BF16", (512, 2048))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head.weight", ("BF16", (248320, 2048))),
        ("model.language_model.layers.0.linear_attn.conv1d.weight", ("BF16", (8192, 1, 4))),
        ("model.language_model.layers.0.linear_attn.A_log", ("BF16", (32,))),
        ("model.language_model.layers.39.mlp.experts.gate_up_proj", ("BF16", (256, 1024, 2048))),
        ("model.language_model.layers.3.self_attn.q_proj.weight", ("BF16", (8192, 2048))),
        ("model.visual.patch_embed.proj.weight", ("BF16", (1152, 3, 2, 16, 16))),
        ("model.visual.blocks.26.attn.qkv.bias", ("BF16", (3456,))),
        ("mtp.fc.weight", ("BF16", (2048, 4096))),
    ],
)
def test_names_and_shapes(name: str, expected: tuple[str, tuple[int, ...]]) -> None:
    assert inventory(QWEN36)[name] == expected


def test_nvidia_module() -> None:
    tensors = inventory(QWEN36, nvidia_mix)
    down = "model.language_model.layers.7.mlp.experts.3.down_proj."
    assert tensors[down + "weight"] == ("U8", (2048, 256))
    assert tensors[down + "weight_scale"] == ("F8_E4M3", (2048, 32))
    assert tensors[down + "weight_scale_2"] == tensors[down + "input_scale"] == ("F32", ())
    qkv = "model.language_model.layers.0.linear_attn.in_proj_qkv."
    assert tensors[qkv + "weight"] == ("F8_E4M3", (8192, 2048))


@pytest.mark.parametrize("fused", [True, False])
def test_describes_what_is_written(fused: bool) -> None:
    tensors = published(TINY, random_params(TINY, nvidia_mix), fused=fused, mtp_fused=fused)
    types = {dtype: name for name, dtype in DTYPES.items()}
    found = {name: (types[np.dtype(a.dtype)], a.shape) for name, a in tensors.items()}
    assert found == inventory(TINY, nvidia_mix, "fused" if fused else "per-expert")


@pytest.mark.parametrize(
    ("format_of", "gigabytes"),
    [
        (all_dense, (5.893, 7.843, 11.563, 18.330, 29.539, 44.979)),
        (experts_only, (4.446, 4.994, 6.041, 7.944, 11.096, 15.439)),
        (nvidia_mix, (2.255, 2.803, 3.849, 5.753, 8.905, 13.248)),
    ],
)
def test_bytes_of_a_step(format_of: FormatOf, gigabytes: tuple[float, ...]) -> None:
    params = shapes(QWEN36, format_of)
    read = [step_bytes(QWEN36, params, batch) / 1e9 for batch in (1, 2, 4, 8, 16, 32)]
    assert read == pytest.approx(gigabytes, abs=6e-4)


def test_account() -> None:
    rows = {row.module: row for row in account(QWEN36, shapes(QWEN36, nvidia_mix))}
    assert sum(row.parameters for row in rows.values()) == 35_951_822_704
    assert sum(row.per_token for row in rows.values()) == pytest.approx(2.255e9, rel=1e-3)
    assert rows["moe.gate_up"].format == "NVFP4"
    assert rows["gdn.in_proj_qkv"].format == "FP8 static"
    assert rows["moe.router"].format == "dense bfloat16"
    assert rows["moe.gate_up"].per_token == rows["moe.gate_up"].nbytes * 8 / 256
    assert rows["embed_tokens"].per_token == 2048 * 2
    assert rows["vision.blocks.qkv"].per_token == 0
