"""SAM's checkpoints are read in every layout, and whatever is wrong with one is said."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import CheckpointError, resolve
from checkpoints.files import SINGLE
from checkpoints.sam import account, load, write
from checkpoints.sam.inventory import Version, meta, published_name
from checkpoints.sam.write import to_dict
from checkpoints.write import write_checkpoint
from jaxinfer.sam import clicks
from jaxinfer.sam.config import SAM3, Config, ConfigError, TextConfig, TrunkConfig, from_dict
from jaxinfer.sam.params import Params
from jaxinfer.sam.structure import structure
from tests.checkpoints.torch_form import save

Tensors = dict[str, np.ndarray]

TINY = Config(
    trunk=TrunkConfig(
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        image_size=48,
        patch_size=4,
        window=4,
        global_layers=(1,),
        table=4,
    ),
    text=TextConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        context=8,
    ),
    width=16,
    num_heads=2,
    intermediate_size=24,
    geometry_layers=1,
    encoder_layers=1,
    decoder_layers=2,
    num_queries=5,
)


def random_params(version: Version | None = None) -> Params:
    leaves = structure(TINY)
    if version:
        leaves = replace(leaves, clicks=clicks.structure(TINY, version))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.arranged, np.float32), leaves)


def of_meta(version: Version, params: Params) -> Tensors:
    """Meta's file: what is wanted of `params`, and a stub for each other tensor."""
    leaves = structure(TINY)
    if params.clicks is not None:
        leaves = replace(leaves, clicks=clicks.structure(TINY, version))
    dtypes = {"F32": np.float32, "C64": np.complex64}
    tensors = {
        published_name(name): np.zeros(1, dtypes[tensor.dtype])
        for name, tensor in meta(TINY, version).items()
        if tensor.ignored
    }
    for leaf, array in zip(jax.tree.leaves(leaves), jax.tree.leaves(params), strict=True):
        stored = leaf.restore(np.asarray(array))
        assert stored.shape == leaf.shape
        tensors[published_name(leaf.name)] = np.ascontiguousarray(stored)
    return tensors


def of_transformers(tmp_path: Path, params: Params) -> Tensors:
    from safetensors.numpy import load_file

    write(tmp_path / "written", TINY, params)
    return load_file(tmp_path / "written" / SINGLE)


def put(directory: Path, tensors: Tensors, shard_bytes: int = 10**9) -> Path:
    """A directory of safetensors with TINY's configuration."""
    directory.mkdir()
    write_checkpoint(directory, tensors, shard_bytes)
    (directory / "config.json").write_text(json.dumps(to_dict(TINY)))
    return directory


def same(found: Params, params: Params) -> bool:
    assert jax.tree.structure(found) == jax.tree.structure(params)
    return all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
    )


# --- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3", "3.1"])
@pytest.mark.parametrize("wrap", [False, True])
def test_metas_file(tmp_path: Path, version: Version, wrap: bool) -> None:
    params = random_params(version)
    file = save(tmp_path / "sam.pt", of_meta(version, params), wrap)
    cfg, found = load(file, cfg=TINY)
    assert cfg == TINY
    assert same(found, replace(params, clicks=None))
    _, found = load(tmp_path, cfg=TINY, clicks=True)
    assert same(found, params)
    assert found.clicks.version == version


@pytest.mark.parametrize("video", [False, True])
def test_what_transformers_layout_holds(tmp_path: Path, video: bool) -> None:
    tensors = of_transformers(tmp_path, random_params())
    if video:
        tensors = {f"detector_model.{name}": array for name, array in tensors.items()}
        tensors["tracker_model.x"] = np.zeros(3, np.float32)
    cfg, groups = account(put(tmp_path / "model", tensors))
    assert cfg == TINY
    read = [group for group in groups if group.read]
    assert [group.name for group in read] == [
        *("trunk", "neck", "text", "geometry", "encoder", "decoder", "masks", "scoring")
    ]
    assert sum(g.parameters for g in read) == sum(
        leaf.size for leaf in jax.tree.leaves(random_params())
    )
    assert sum(group.tensors for group in groups) == len(tensors)
    assert sum(group.nbytes for group in groups) == sum(a.nbytes for a in tensors.values())
    assert {group.dtypes for group in groups} == {("float32",)}
    assert ("of the tracker, for video" in {group.name for group in groups}) == video


@pytest.mark.parametrize("version", ["3", "3.1"])
def test_what_metas_file_holds(tmp_path: Path, version: Version) -> None:
    tensors = of_meta(version, random_params(version))
    _, groups = account(save(tmp_path / "sam.pt", tensors), TINY)
    clicks = next(group for group in groups if group.name == "clicks")
    assert clicks.read
    assert clicks.tensors == len(jax.tree.leaves(random_params(version).clicks))
    assert sum(group.tensors for group in groups) == len(tensors)
    assert "a table that the engine computes" in {g.name for g in groups if not g.read}


def test_prefixes_of_training(tmp_path: Path) -> None:
    params = random_params("3")
    tensors = {
        name.replace("detector.", "sam3_model.").replace("tracker.", "sam2_predictor."): array
        for name, array in of_meta("3", params).items()
    }
    assert same(load(save(tmp_path / "x.pt", tensors), cfg=TINY, clicks=True)[1], params)


def test_metas_names_in_safetensors(tmp_path: Path) -> None:
    params = random_params("3.1")
    write_checkpoint(tmp_path, of_meta("3.1", params))
    assert same(load(tmp_path, cfg=TINY, clicks=True)[1], params)
    assert same(load(tmp_path / SINGLE, cfg=TINY, clicks=True)[1], params)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    params = random_params()
    write(tmp_path, TINY, params)
    cfg, found = load(tmp_path)
    assert cfg == TINY
    assert same(found, params)


def test_shards_of_the_video_model(tmp_path: Path) -> None:
    params = random_params()
    tensors = {
        f"detector_model.{name}": array for name, array in of_transformers(tmp_path, params).items()
    }
    tensors["tracker_model.mask_decoder.iou_token.weight"] = np.zeros((1, 16), np.float32)
    tensors["tracker_neck.fpn_layers.0.proj1.bias"] = np.zeros(16, np.float32)
    directory = put(tmp_path / "video", tensors, shard_bytes=50_000)
    raw = {"model_type": "sam3_video", "detector_config": to_dict(TINY)}
    (directory / "config.json").write_text(json.dumps(raw))
    assert len(list(directory.glob("*.safetensors"))) > 2
    cfg, found = load(directory)
    assert cfg == TINY
    assert same(found, params)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("asked", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_stored_types(tmp_path: Path, stored: Any, asked: Any) -> None:
    params = jax.tree.map(lambda a: np.asarray(a).astype(stored), random_params())
    write(tmp_path, TINY, params)
    _, found = load(tmp_path, dtype=asked)
    assert same(found, jax.tree.map(lambda a: a.astype(asked), params))


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    params = random_params()
    write(tmp_path, TINY, params)
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    # The class token's slot of the position table is not in the file.
    total = sum(a.nbytes for a in jax.tree.leaves(params))
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize("cfg", [TINY, SAM3], ids=["tiny", "full"])
def test_configuration_survives(cfg: Config) -> None:
    assert from_dict(to_dict(cfg)) == cfg
    approximate = replace(cfg, trunk=replace(cfg.trunk, gelu="tanh"))
    assert from_dict(to_dict(approximate)) == approximate


def test_nothing_is_overwritten_or_lost(tmp_path: Path) -> None:
    params = random_params("3")
    with pytest.raises(CheckpointError, match="no place for the click head"):
        write(tmp_path, TINY, params)
    write(tmp_path, TINY, replace(params, clicks=None))
    with pytest.raises(CheckpointError, match=r"model.safetensors exists already"):
        write(tmp_path, TINY, replace(params, clicks=None))


# --- faults -------------------------------------------------------------------------------------

Change = Callable[[Tensors], Any]


def changed(name: str, value: Any) -> Change:
    """The last element of a tensor replaced."""

    def change(tensors: Tensors) -> None:
        array = np.array(tensors[name])
        array.reshape(-1)[-1] = value
        tensors[name] = array

    return change


def replaced(name: str, array: np.ndarray | None) -> Change:
    """A tensor replaced, added, or (with None) removed."""

    def change(tensors: Tensors) -> None:
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array

    return change


F32 = np.float32
QKV = "detector.backbone.vision_backbone.trunk.blocks.1.attn.qkv.weight"
RPB = "detector.transformer.decoder.boxRPB_embed_x.layers.1.bias"
CLICK = "tracker.model.interactive_sam_mask_decoder.iou_token.weight"
META: dict[str, tuple[Change, tuple[str, ...]]] = {
    "missing": (replaced(QKV, None), ("missing", QKV, "[96, 32]", "fetch")),
    "missing click": (replaced(CLICK, None), ("missing", CLICK, "[1, 16]")),
    "misshapen": (replaced(QKV, np.zeros((32, 96), F32)), (QKV, "[32, 96]", "[96, 32]")),
    "mistyped": (replaced(QKV, np.zeros((96, 32), np.int8)), (QKV, "I8", "quantised")),
    "extra": (replaced("detector.adapter.x", np.zeros(3, F32)), ("extra", "detector.adapter.x")),
    "extra layer": (
        replaced(QKV.replace("blocks.1", "blocks.2"), np.zeros(3, F32)),
        ("extra", "blocks.2"),
    ),
    "extra under no prefix": (replaced("ema.x", np.zeros(3, F32)), ("extra", "ema.x")),
    "extra in the tracker": (replaced("tracker.model.x", np.zeros(3, F32)), ("extra", "model.x")),
    "twice": (replaced("sam3_model." + RPB[9:], np.zeros(2, F32)), (RPB, "both", "remove")),
    "NaN": (changed(QKV, np.nan), (QKV, "nan at element 3071", "not finite", "fetch")),
    "infinite": (changed(RPB, -np.inf), (RPB, "-inf at element 1", "not finite")),
    "NaN in the click head": (changed(CLICK, np.nan), (CLICK, "nan at element 15")),
}


@pytest.mark.parametrize("case", META)
def test_faults_of_metas_file(tmp_path: Path, case: str) -> None:
    change, said = META[case]
    change(tensors := of_meta("3.1", random_params("3.1")))
    file = save(tmp_path / "sam.pt", tensors)
    with pytest.raises(CheckpointError) as error:
        load(file, cfg=TINY, clicks=True)
    for words in (*said, "sam.pt"):
        assert words in str(error.value), str(error.value)


Q = "detr_decoder.layers.0.text_cross_attn.q_proj.bias"
THEIRS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "missing": (replaced(Q, None), ("missing", Q, "[16]")),
    "misshapen": (replaced(Q, np.zeros(48, F32)), (Q, "[48]", "[16]")),
    "extra": (replaced("lora.weight", np.zeros(3, F32)), ("extra", "lora.weight", "adapter")),
    "NaN": (changed(Q, np.nan), (Q, "nan at element 15", SINGLE)),
    "scales of a quantiser": (
        replaced(Q.replace("bias", "weight_scale"), np.ones(1, F32)),
        ("extra", "weight_scale"),
    ),
}


@pytest.mark.parametrize("case", THEIRS)
def test_faults_of_safetensors(tmp_path: Path, case: str) -> None:
    change, said = THEIRS[case]
    change(tensors := of_transformers(tmp_path, random_params()))
    directory = put(tmp_path / "c", tensors)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for words in said:
        assert words in str(error.value), str(error.value)


def test_many_problems_are_counted(tmp_path: Path) -> None:
    tensors = {n: a for n, a in of_meta("3", random_params()).items() if "norm" not in n}
    with pytest.raises(CheckpointError, match=r"and \d+ more") as error:
        load(save(tmp_path / "sam.pt", tensors), cfg=TINY)
    assert str(error.value).count("missing:") == 10


def test_the_click_head_of_the_other_version_is_not_taken(tmp_path: Path) -> None:
    """3.1's file with its click head under the names of 3, as a renaming script leaves it."""
    tensors = {
        name.replace("tracker.model.interactive_sam", "tracker.sam"): array
        for name, array in of_meta("3.1", random_params("3.1")).items()
    }
    file = save(tmp_path / "sam.pt", tensors)
    with pytest.raises(CheckpointError, match=r"missing: tracker.model.interactive_sam"):
        load(file, cfg=TINY, clicks=True)


def test_no_click_head(tmp_path: Path) -> None:
    write(tmp_path, TINY, random_params())
    with pytest.raises(CheckpointError, match=r"no click head.*sam3.1_multiplex.pt"):
        load(tmp_path, clicks=True)


def test_another_shape(tmp_path: Path) -> None:
    """A small file without its shape is held against the published one, before it is read."""
    file = save(tmp_path / "sam.pt", of_meta("3.1", random_params()))
    with pytest.raises(CheckpointError, match=r"(?s)resblocks.1.*and \d+ more"):
        load(file)


def test_other_models_and_places(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no SAM 3 model.*lm_head.weight"):
        load(save(tmp_path / "x.pt", {"lm_head.weight": np.zeros(3, F32)}))
    (tmp_path / "y.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several .pt files: x.pt, y.pt"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors"):
        load(tmp_path / "empty")


def test_configurations(tmp_path: Path) -> None:
    write(tmp_path, TINY, random_params())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sam2"}))
    with pytest.raises(ConfigError, match=r"config.json: model_type is 'sam2'"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        load(tmp_path)


def test_resolve_takes_pt_files_if_asked(tmp_path: Path) -> None:
    (file := tmp_path / "sam3.pt").write_bytes(b"")
    assert resolve(file, torch_files=True) == file
    assert resolve(str(tmp_path), torch_files=True) == tmp_path
    with pytest.raises(CheckpointError, match=r"is not a directory.*tiny_sam"):
        resolve(file)
    with pytest.raises(CheckpointError, match="is not a directory"):
        resolve(tmp_path / "sam3.1.pt", torch_files=True)
