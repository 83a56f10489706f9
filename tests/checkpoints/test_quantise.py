"""The quantiser: NVIDIA's bytes, error bounds, and checkpoints that load."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoints import CheckpointError, arithmetic, load, quantize
from checkpoints.files import TensorFiles, read_header
from jaxinfer.qwen.params import nvidia_mix
from pallas_kernels import Dense, Fp8, Nvfp4, dequantise
from tests.checkpoints.published_form import Tensors, assert_same, published, random_params, write
from tests.checkpoints.tiny_models import TINY, TINY_DICT

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt.safetensors"
NAMES = {name.rpartition(".")[0] for name in read_header(GOLDENS) if name.endswith(".original")}


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    directory = tmp_path_factory.mktemp("goldens")
    (directory / "model.safetensors").symlink_to(GOLDENS)
    with TensorFiles(directory) as files:
        return {n: files.read(e).reshape(e.shape) for n, e in files.entries.items()}


# ModelOpt turns an all-zero tensor into NaN; see `test_all_zero`.
@pytest.mark.parametrize("name", sorted(NAMES - {"nvfp4.zero"}))
def test_bytes_of_modelopt(goldens: Tensors, name: str) -> None:
    original = goldens[f"{name}.original"]
    if name.startswith("fp8."):
        q, scale = arithmetic.fp8(original)
    else:
        together = [original]
        if "shared" in name:
            together = [goldens[f"nvfp4.shared.{part}.original"] for part in ("gate", "up")]
        q, block_scale, scale = arithmetic.nvfp4(original, max(map(arithmetic.amax, together)))
        assert block_scale.tobytes() == goldens[f"{name}.weight_scale"].tobytes()
        assert scale == goldens[f"{name}.weight_scale_2"]
        read = dequantise(Nvfp4(jnp.array(q), jnp.array(block_scale), jnp.array([scale])))
        np.testing.assert_allclose(read, goldens[f"{name}.dequantised"], rtol=2e-7)
    assert q.tobytes() == goldens[f"{name}.weight"].tobytes()
    assert scale == goldens.get(f"{name}.weight_scale_2", goldens[f"{name}.weight_scale"])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-35])
def test_all_zero(value: float) -> None:
    weights = np.full((4, 32), value, np.float32)
    q, block_scale, scale = arithmetic.nvfp4(weights)
    assert scale == 1.0
    assert (block_scale > 0).all()
    assert not (q & 0x77).any()
    q, scale = arithmetic.fp8(weights)
    assert scale == 1.0
    assert not q.astype(np.float32).any()


matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.sampled_from([16, 48])),
    elements=st.floats(-1e4, 1e4, width=32),
)


@settings(max_examples=60, deadline=None)
@given(matrices)
def test_error_of_nvfp4(weights: np.ndarray) -> None:
    q, block_scale, scale = arithmetic.nvfp4(weights)
    read = np.asarray(dequantise(Nvfp4(jnp.array(q), jnp.array(block_scale), jnp.array([scale]))))
    # The widest gap, between 4 and 6, is two block scales; half of it is the error. Block scales
    # below 2^-6 are multiples of 2^-9: one that is half of that too small cuts six times as much.
    step = np.repeat(block_scale.astype(np.float64), 16, axis=1) * scale
    coarse = float(scale) * 2.0**-10
    assert (np.abs(read - weights) <= 1.0001 * (step + 6 * coarse) + 1e-30).all()
    # No block scale is larger than its block needs, but for what there is.
    needed = np.abs(weights).reshape(len(weights), -1, 16).max(axis=2) / 6
    largest = np.maximum(np.maximum(needed * 1.07, needed + coarse), 2 * coarse)
    used = block_scale.astype(np.float64) * scale
    assert (used[needed > 0] <= largest[needed > 0] * 1.0001).all()


@settings(max_examples=60, deadline=None)
@given(matrices)
def test_error_of_fp8(weights: np.ndarray) -> None:
    q, scale = arithmetic.fp8(weights)
    read = q.astype(np.float64) * scale
    assert (np.abs(read - weights) <= np.abs(weights) * 2**-4 + float(scale) * 2**-10).all()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused bf16 checkpoint."""
    cfg = replace(TINY, dtype="bfloat16")
    config = TINY_DICT | {"text_config": TINY_DICT["text_config"] | {"dtype": "bfloat16"}}
    tensors = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in published(cfg, random_params(cfg)).items()
    }
    directory = write(tmp_path_factory.mktemp("source"), tensors, config)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("recipe", "routed", "attention", "head"),
    [
        ("nvidia-mix", Nvfp4, Fp8, Nvfp4),
        ("experts-only", Nvfp4, Dense, Dense),
        ("all", Nvfp4, Nvfp4, Nvfp4),
    ],
)
def test_recipes(
    tmp_path: Path, source: Path, recipe: str, routed: type, attention: type, head: type
) -> None:
    quantize(source, tmp_path / "q", recipe, shard_bytes=20_000)
    cfg, params = load(tmp_path / "q")
    _, dense = load(source)
    assert cfg.dtype == "bfloat16"
    assert isinstance(params.moe.gate_up, routed)
    assert isinstance(params.attention.q_proj, attention)
    assert isinstance(params.gdn.in_proj_qkv, attention)
    assert isinstance(params.lm_head, head)
    assert_same(params.mtp, dense.mtp)
    assert_same(params.vision, dense.vision)
    for path in ("moe.gate_up", "moe.down", "moe.shared_gate_up", "attention.q_proj", "lm_head"):
        one, other = params, dense
        for name in path.split("."):
            one, other = getattr(one, name), getattr(other, name)
        want, got = dequantise(other), dequantise(one)
        assert jnp.abs(got - want).max() <= jnp.abs(want).max() / 5
    assert_same(params.moe.router, dense.moe.router)
    assert_same(params.embed_tokens, dense.embed_tokens)
    assert (tmp_path / "q" / "tokenizer.json").is_file()


def test_gate_and_up_of_an_expert_share_a_scale(tmp_path: Path, source: Path) -> None:
    quantize(source, tmp_path / "q", "experts-only")
    _, params = load(tmp_path / "q")
    scale = np.asarray(params.moe.gate_up.scale)
    assert scale.shape == (4, 4, 2)
    np.testing.assert_array_equal(scale[..., 0], scale[..., 1])
    assert len(np.unique(scale)) > 4


def test_description(tmp_path: Path, source: Path) -> None:
    quantize(source, tmp_path / "q", "nvidia-mix")
    described = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
    layers = described["quantized_layers"]
    prefix = "model.language_model.layers."
    nvfp4 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert described["quant_algo"] == "MIXED_PRECISION"
    assert layers[prefix + "0.mlp.experts"] == layers["lm_head"] == nvfp4
    assert layers[prefix + "3.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert sum(layer == nvfp4 for layer in layers.values()) == 4 + 3 * 4 + 1
    assert {"mtp*", "model.visual*", prefix + "0.mlp.gate"} <= set(described["exclude_modules"])
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    assert config["quantized_layers"] == layers
    assert {g["weights"]["num_bits"] for g in config["config_groups"].values()} == {4, 8}


def test_input_scales_make_fp8_static(tmp_path: Path, source: Path) -> None:
    modules = [f"model.language_model.layers.{layer}.linear_attn.in_proj_z" for layer in range(3)]
    scales = {module: 0.25 * (i + 1) for i, module in enumerate(modules)}
    quantize(source, tmp_path / "q", "nvidia-mix", input_scales=scales)
    _, params = load(tmp_path / "q")
    np.testing.assert_array_equal(params.gdn.in_proj_z.input_scale, [0.25, 0.5, 0.75])
    assert params.gdn.out_proj.input_scale is None
    with pytest.raises(CheckpointError, match="input_scales names nothing"):
        quantize(source, tmp_path / "r", "nvidia-mix", input_scales={"nothing": 1.0})


def test_fused_and_separate_experts_give_the_same(tmp_path: Path, source: Path) -> None:
    cfg, params = load(source)
    config = json.loads((source / "config.json").read_text())
    separate = write(tmp_path / "s", published(cfg, params, fused=False), config)
    for src, dst in ((source, "a"), (separate, "b")):
        quantize(src, tmp_path / dst, "all")
    assert_same(load(tmp_path / "a")[1], load(tmp_path / "b")[1])


def test_other_readers_read_the_shards(tmp_path: Path, source: Path) -> None:
    quantize(source, tmp_path / "q", "experts-only", shard_bytes=20_000)
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    name = "model.language_model.layers.0.mlp.experts.1.down_proj.weight"
    with safetensors.safe_open(tmp_path / "q" / index["weight_map"][name], "numpy") as shard:
        weight = shard.get_tensor(name)
    _, params = load(tmp_path / "q")
    np.testing.assert_array_equal(weight, params.moe.down.q[0, 1])
    for shard in sorted(set(index["weight_map"].values())):
        for entry in read_header(tmp_path / "q" / shard).values():
            assert entry.offset % max(1, entry.nbytes // max(entry.size, 1)) == 0


def test_source_must_be_dense(tmp_path: Path) -> None:
    tensors = published(TINY, random_params(TINY, nvidia_mix))
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize(write(tmp_path / "s", tensors), tmp_path / "q", "all")


def test_destination_must_be_empty(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize(source, tmp_path, "all")


def test_weights_must_be_finite(tmp_path: Path) -> None:
    tensors = published(TINY, random_params(TINY))
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].copy()
    tensors[name][3, -1, -1] = np.inf
    with pytest.raises(CheckpointError, match=r"gate_up_proj .*experts.3.up_proj"):
        quantize(write(tmp_path / "s", tensors), tmp_path / "q", "all")
    assert not any((tmp_path / "q").iterdir())


def test_unknown_recipe(tmp_path: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="nvidia-mix, experts-only, all"):
        quantize(source, tmp_path / "q", "int3")


def test_progress(tmp_path: Path, source: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantize(source, tmp_path / "q", "all", progress=lambda *a: seen.append(a))
    assert seen[-1][0] == seen[-1][1] > 0
