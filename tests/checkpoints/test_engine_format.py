"""The engine's own format: a restart restores the same bits, or says why not."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CheckpointError, LoadReport, engine_format, load
from checkpoints.locate import MANIFEST
from jaxinfer.qwen.params import Params, all_dense, nvidia_mix
from pallas_kernels import PerLayer
from tests.checkpoints.published_form import assert_same, published, random_params, write
from tests.checkpoints.test_round_trips import layer_by_layer
from tests.checkpoints.tiny_models import TINY, TINY_TEXT


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Params]:
    """A stored checkpoint of mixed formats, and its parameters."""
    root = tmp_path_factory.mktemp("stored")
    source = write(root / "source", published(TINY, random_params(TINY, layer_by_layer)))
    (source / "tokenizer.json").write_text('{"a": 1}')
    cfg, params = load(source)
    engine_format.save(root / "engine", cfg, params, source)
    return root / "engine", params


def test_mixed_formats(stored: tuple[Path, Params]) -> None:
    directory, params = stored
    report = LoadReport()
    cfg, restored = load(directory, report=report)
    assert cfg == TINY
    assert isinstance(restored.moe.gate_up, PerLayer)
    assert_same(restored, params)
    assert report.seconds.keys() == {"restore"}
    assert report.bytes_on_device > 0
    assert (directory / "tokenizer.json").read_text() == '{"a": 1}'


def test_without_vision(stored: tuple[Path, Params]) -> None:
    cfg, restored = load(stored[0], vision=False)
    assert cfg == TINY_TEXT
    assert restored.vision is None
    assert_same(restored.moe, stored[1].moe)


@pytest.mark.parametrize("format_of", [all_dense, nvidia_mix])
def test_parts_that_were_not_loaded(tmp_path: Path, format_of: Any) -> None:
    tensors = published(TINY, random_params(TINY, format_of))
    text = {n: a for n, a in tensors.items() if not n.startswith(("mtp.", "model.visual."))}
    source = write(tmp_path / "source", text)
    cfg, params = load(source)
    engine_format.save(tmp_path / "engine", cfg, params, source)
    assert_same(load(tmp_path / "engine")[1], params)
    assert load(tmp_path / "engine")[0] == cfg


def change_manifest(directory: Path, **changes: Any) -> None:
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest.update(changes)
    kept = {name: value for name, value in manifest.items() if value is not None}
    (directory / MANIFEST).write_text(json.dumps(kept))


def change_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["num_experts"] = 8
    (directory / "config.json").write_text(json.dumps(config))


def damage(directory: Path) -> None:
    for file in (directory / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"\0" * file.stat().st_size)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other version": (lambda d: change_manifest(d, version=99), "version 99.*reads version 1"),
    "no version": (lambda d: change_manifest(d, version=None), "damaged"),
    "no arrays": (lambda d: change_manifest(d, arrays=None), "damaged .no 'arrays'"),
    "not JSON": (lambda d: (d / MANIFEST).write_text("{"), "damaged"),
    "other config": (change_config, "config.json is not the one"),
    "damaged arrays": (damage, "cannot be restored"),
}


# Orbax leaves its other reads running when one fails; they then complain of its closed loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_broken(tmp_path: Path, case: str) -> None:
    source = write(tmp_path / "source", published(TINY, random_params(TINY)))
    cfg, params = load(source)
    engine_format.save(tmp_path / "engine", cfg, params, source)
    change, said = BROKEN[case]
    change(tmp_path / "engine")
    with pytest.raises(CheckpointError, match=said) as error:
        load(tmp_path / "engine")
    assert "make it again from the safetensors checkpoint" in str(error.value)
    if change is damage:
        time.sleep(0.2)


def test_directory_must_be_empty(stored: tuple[Path, Params]) -> None:
    with pytest.raises(CheckpointError, match="is not empty"):
        engine_format.save(stored[0], TINY, stored[1], stored[0])
