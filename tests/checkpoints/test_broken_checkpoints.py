"""Whatever is wrong with a checkpoint is said, with the tensor, the file and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import CheckpointError, find, load, resolve
from checkpoints.files import INDEX, SINGLE, TensorFiles
from checkpoints.write import write_checkpoint
from jaxinfer.qwen.params import nvidia_mix
from tests.checkpoints.published_form import Tensors, published, random_params, write
from tests.checkpoints.tiny_models import TINY, TINY_DICT

LAYER = "model.language_model.layers.1."
NORM = LAYER + "input_layernorm.weight"
ROUTER = LAYER + "mlp.gate.weight"
EXPERT = LAYER + "mlp.experts.2.up_proj."
FP8 = LAYER + "linear_attn.in_proj_z."
E4M3 = ml_dtypes.float8_e4m3fn


def set_to(name: str, value: float) -> Callable[[Tensors], None]:
    """Change the last element of a tensor."""

    def change(tensors: Tensors) -> None:
        array = np.array(tensors[name])
        array.reshape(-1)[-1] = value
        tensors[name] = array

    return change


def replaced(name: str, array: np.ndarray | None) -> Callable[[Tensors], None]:
    """Replace, add or (with None) remove a tensor."""

    def change(tensors: Tensors) -> None:
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array

    return change


F32 = np.float32
CASES: dict[str, tuple[Callable[[Tensors], None], tuple[str, ...]]] = {
    "missing vector": (replaced(NORM, None), ("missing", NORM, "fetch")),
    "missing expert": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(EXPERT)] and None,
        ("missing", EXPERT + "weight"),
    ),
    "missing scale": (
        replaced(EXPERT + "weight_scale_2", None),
        (EXPERT + "weight", "weight_scale_2"),
    ),
    "missing FP8 scale": (replaced(FP8 + "weight_scale", None), (FP8 + "weight", "weight_scale")),
    "missing weight": (replaced(FP8 + "weight", None), (FP8, "its weight is missing")),
    "extra": (replaced("model.visual.extra.weight", np.zeros(3, F32)), ("extra", "visual.extra")),
    "extra under no known name": (replaced("adapter.x", np.zeros(3, F32)), ("extra", "adapter.x")),
    "extra layer": (
        replaced("model.language_model.layers.4.input_layernorm.weight", np.zeros(32, F32)),
        ("extra", "layers.4"),
    ),
    "twice": (replaced("model." + NORM[21:], np.zeros(32, F32)), (NORM, "both")),
    "misshapen vector": (replaced(NORM, np.zeros(31, F32)), (NORM, "[31]", "[32]")),
    "misshapen matrix": (replaced(ROUTER, np.zeros((32, 4), F32)), (ROUTER, "[32, 4]", "[4, 32]")),
    "misshapen codes": (
        replaced(EXPERT + "weight", np.zeros((16, 32), np.uint8)),
        (EXPERT + "weight", "[16, 32]", "[16, 16]"),
    ),
    "other block size": (
        replaced(EXPERT + "weight_scale", np.ones((16, 1), E4M3)),
        (EXPERT + "weight_scale", "group size"),
    ),
    "misshapen FP8 scale": (
        replaced(FP8 + "weight_scale", np.ones((2, 1), F32)),
        (FP8 + "weight_scale", "block"),
    ),
    "misshapen experts": (
        replaced("mtp.layers.0.mlp.experts.down_proj", np.zeros((4, 16, 32), F32)),
        ("mtp.layers.0.mlp.experts.down_proj", "[4, 16, 32]", "[4, 32, 16]"),
    ),
    "mistyped vector": (replaced(NORM, np.zeros(32, np.int32)), (NORM, "I32", "BF16")),
    "mistyped matrix": (replaced(ROUTER, np.zeros((4, 32), np.int8)), (ROUTER, "I8", "bf16")),
    "mistyped scale": (
        replaced(EXPERT + "weight_scale", np.ones((16, 2), np.uint8)),
        (EXPERT + "weight_scale", "U8", "F8_E4M3"),
    ),
    "formats within a layer": (
        lambda t: (
            [t.pop(n) for n in list(t) if n.startswith(EXPERT)]
            and t.update({EXPERT + "weight": np.zeros((16, 32), F32)})
        ),
        (EXPERT + "weight", "is nvfp4", "is dense", "one format"),
    ),
    "scale without quantised weight": (
        replaced(ROUTER + "_scale", np.ones((), F32)),
        (ROUTER + "_scale", "dense"),
    ),
    "block FP8": (
        replaced(FP8 + "weight_scale_inv", np.ones((1, 1), F32)),
        (FP8 + "weight_scale_inv", "block FP8", "bf16"),
    ),
    "AWQ": (replaced(EXPERT + "pre_quant_scale", np.ones(32, F32)), ("pre_quant_scale", "AWQ")),
    "GPTQ": (
        replaced(FP8 + "qweight", np.ones((4, 32), np.int32)),
        (FP8 + "qweight", "GPTQ"),
    ),
    "NaN": (set_to(NORM, np.nan), (NORM, "nan", "element 31", "not finite", "fetch")),
    "infinite": (set_to(ROUTER, -np.inf), (ROUTER, "-inf", "element 127", "not finite")),
    "NaN in FP8": (set_to(FP8 + "weight", np.nan), (FP8 + "weight", "NaN")),
    "NaN block scale": (
        set_to(EXPERT + "weight_scale", np.nan),
        (EXPERT + "weight_scale", "block scale"),
    ),
    "zero block scale": (
        set_to(EXPERT + "weight_scale", 0.0),
        (EXPERT + "weight_scale", "0.0 at element 31"),
    ),
    "negative block scale": (
        set_to(EXPERT + "weight_scale", -1.0),
        (EXPERT + "weight_scale", "-1.0"),
    ),
    "infinite scale": (
        set_to(EXPERT + "weight_scale_2", np.inf),
        (EXPERT + "weight_scale_2", "inf", "positive finite scale"),
    ),
    "zero scale": (set_to(FP8 + "weight_scale", 0.0), (FP8 + "weight_scale", "0.0")),
    "negative scale": (set_to(FP8 + "weight_scale", -0.5), (FP8 + "weight_scale", "-0.5")),
    "NaN scale": (set_to(FP8 + "input_scale", np.nan), (FP8 + "input_scale", "nan")),
}


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return published(TINY, random_params(TINY, nvidia_mix))


@pytest.mark.parametrize("case", CASES)
def test_tensors(tmp_path: Path, tensors: Tensors, case: str) -> None:
    change, said = CASES[case]
    changed = dict(tensors)
    change(changed)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path / "c", changed))
    for words in (*said, "" if "missing" in case else SINGLE):
        assert words in str(error.value), str(error.value)


def test_compressed_tensors_zero_scale(tmp_path: Path) -> None:
    changed = published(TINY, random_params(TINY, nvidia_mix), "compressed-tensors")
    set_to(EXPERT + "weight_global_scale", 0.0)(changed)
    with pytest.raises(CheckpointError, match=r"weight_global_scale.* has 0.0 at element 0"):
        load(write(tmp_path / "c", changed))


def test_values_are_checked_beyond_the_first_piece(tmp_path: Path, tensors: Tensors) -> None:
    changed = dict(tensors)
    set_to("mtp.layers.0.mlp.experts.gate_up_proj", np.nan)(changed)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.* has nan at element 4095"):
        load(write(tmp_path / "c", changed), piece_bytes=512)


def test_many_problems_are_counted(tmp_path: Path, tensors: Tensors) -> None:
    changed = {name: array for name, array in tensors.items() if "norm" not in name}
    with pytest.raises(CheckpointError, match=r"and \d+ more") as error:
        load(write(tmp_path / "c", changed))
    assert str(error.value).count("missing:") == 10


def cut(file: Path, nbytes: int) -> None:
    file.write_bytes(file.read_bytes()[:nbytes])


def edit_index(directory: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda d: cut(_shard(d), 9_000), r"truncated; fetch"),
    "truncated header": (lambda d: cut(_shard(d), 100), r"truncated in its header"),
    "empty": (lambda d: cut(_shard(d), 0), r"truncated in its header"),
    "not a header": (
        lambda d: _shard(d).write_bytes(b"\x10\0\0\0\0\0\0\0" + b"x" * 64),
        r"model-00002-of-\d+.safetensors has no valid safetensors header",
    ),
    "absent": (lambda d: _shard(d).unlink(), r"model-00002.* is absent.* it holds .*Fetch it"),
    "index names a tensor that its shard lacks": (
        lambda d: edit_index(
            d, lambda m: m.update({NORM + "x": "model-00001-of-00003.safetensors"})
        ),
        r"input_layernorm.weightx is in model-00001.*fetch both again",
    ),
    "index is not JSON": (lambda d: (d / INDEX).write_text("{"), r"not a valid index"),
    "no index": (lambda d: (d / INDEX).unlink(), r"neither .* nor .*other .safetensors files"),
}


def _shard(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[1]


@pytest.mark.parametrize("case", FILES)
def test_files(tmp_path: Path, tensors: Tensors, case: str) -> None:
    directory = write(tmp_path / "c", tensors, shard_bytes=60_000)
    change, said = FILES[case]
    change(directory)
    with pytest.raises(CheckpointError, match=said):
        load(directory)


def test_header_whose_sizes_disagree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"x": np.zeros(4, F32)})
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes().replace(b"[4]", b"[3]"))
    with pytest.raises(CheckpointError, match=r"x .*takes 12 bytes.*says 16"):
        TensorFiles(tmp_path)


def test_unknown_type(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"x": np.zeros(4, F32)})
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes().replace(b"F32", b"Q32"))
    with pytest.raises(CheckpointError, match=r"x in .*'Q32'"):
        TensorFiles(tmp_path)


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"x": np.zeros(4, F32)})
    with TensorFiles(tmp_path) as files:
        cut(tmp_path / SINGLE, 80)
        with pytest.raises(CheckpointError, match="ended inside x"):
            files.read(files.entries["x"])


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "block FP8 (128x128)"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group size 32"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "4-bit int weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            "group size 32",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "block"}}},
            },
            "strategy 'block'",
        ),
    ],
)
def test_methods(tmp_path: Path, tensors: Tensors, described: dict[str, Any], said: str) -> None:
    directory = write(tmp_path / "c", tensors, TINY_DICT | {"quantization_config": described})
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for words in (said, described["quant_method"], "weight_scale", SINGLE, "Use the bf16"):
        assert words in str(error.value)


def test_method_in_the_separate_file(tmp_path: Path, tensors: Tensors) -> None:
    directory = write(tmp_path / "c", tensors)
    described = {"quantization": {"quant_algo": "INT4_AWQ"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="INT4_AWQ"):
        load(directory)


def test_no_such_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory.*tiny_qwen"):
        resolve("nowhere")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        resolve(tmp_path)


def test_companions(tmp_path: Path) -> None:
    directory = write(tmp_path / "c", {"x": np.zeros(1, F32)})
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve(str(directory)) == directory
    # Only the checkpoints that ship share files with their neighbours.
    assert find(directory, "tokenizer.json") is None
    (directory / "tokenizer.json").write_text("{}")
    assert find(directory, "tokenizer.json") == directory / "tokenizer.json"
