"""The benchmark of pictures on a model of a layer or two: what it counts, and what it survives."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from jaxinfer.bench import sam_subjects, segment
from jaxinfer.bench.charts import draw
from jaxinfer.bench.photos import photo
from jaxinfer.bench.report import read, write
from jaxinfer.bench.sam_roofline import BF16, FP8, operations
from jaxinfer.bench.sam_subjects import TOY, SamSubject, sam_subject
from jaxinfer.bench.sam_subjects import draw as draw_weights
from jaxinfer.bench.segment import PARTS, Plan, Rig, Size, _runs, measure_segment
from jaxinfer.bench.segment_device import compile_programs
from jaxinfer.bench.segment_fp8 import measure_fp8
from jaxinfer.bench.segment_peer import beside, measure_segment_peers, segment_rivals
from jaxinfer.cli import app
from jaxinfer.sam.config import SAM3, Config
from jaxinfer.sam.leaves import Leaf
from jaxinfer.sam.params import Params
from jaxinfer.sam.structure import structure
from jaxinfer.sam.tokenizer import Tokenizer, from_merges
from jaxinfer.segmenter import SamModel

PLAN = Plan(batches=(1,), sizes=(Size(150, 90),), pictures=4, objects=3)
H200 = "NVIDIA H200"


def cheap_draw(cfg: Config, key: jax.Array) -> Params:
    """Small random numbers by NumPy: nothing is compiled for them."""
    rng = np.random.default_rng(0)

    def one(leaf: Leaf) -> jax.Array:
        offset = leaf.init == "ones"
        return jnp.asarray(offset + 0.2 * rng.standard_normal(leaf.arranged), jnp.bfloat16)

    return jax.tree.map(one, structure(cfg))


@pytest.fixture(scope="module")
def toy() -> Iterator[SamSubject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sam_subjects, "draw", cheap_draw)
        yield sam_subject("toy")


@pytest.fixture(scope="module")
def lines(toy: SamSubject) -> list[dict[str, Any]]:
    peers = [{"bench": "segment-peer", "batch": 1, "failure": "no memory"}]
    peers += [
        {"batch": 1, "about": {}, "variant": name, "milliseconds": 1.0, "images_per_second": speed}
        for name, speed in (("eager", 1e3), ("compiled", 2e3))
    ]
    return list(measure_segment(toy, PLAN, list(PARTS), peers))


def test_every_part_is_measured(lines: list[dict[str, Any]]) -> None:
    assert not [line["failure"] for line in lines if "failure" in line]
    assert {line["bench"] for line in lines} == {bench for bench, _ in PARTS.values()}
    json.dumps(lines)


def test_a_stream_is_told_with_what_it_brought(lines: list[dict[str, Any]]) -> None:
    (line,) = (line for line in lines if line["bench"] == "segment")
    assert (line["batch"], line["size"]) == (1, "150x90")
    assert line["pictures"] == 4
    assert line["objects_a_picture"] == 3
    assert line["images_per_second"] > 0
    assert 1 <= line["runs_a_mask"] <= 150 * 90
    assert line["share_of_ceiling"] is None  # of a CPU
    assert line["peer"]["variant"] == "compiled"
    assert line["ratio_to_peer"] == pytest.approx(line["images_per_second"] / 2e3, rel=1e-2)


def test_the_device_is_told_apart_from_the_host(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["bench"] == "segment-device":
            count = operations(TOY).total(line["batch"], line["batch"])
            assert line["operations"] == count
            assert line["milliseconds"] > 0
        if line["bench"] == "segment-kernels":
            assert line["busy_microseconds"] > 0
        if "further prompt" in line.get("what", ""):
            told = line["detect_milliseconds"] + line["rest_milliseconds"]
            assert told == pytest.approx(line["milliseconds"]["p50"], abs=2e-3)


def test_lines_become_a_page_with_charts(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    failed = {"bench": "segment-kernels", "fp8": True, "batch": 1, "failure": "no memory"}
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (*lines, failed)))
    page = write(read([file]), tmp_path, charts=True).read_text()
    assert "## Segmenting, from JPEG files to run lengths" in page
    assert "| no | 1 | 150x90 |" in page
    assert "| yes | 1 |" in page
    assert "By family, in microseconds a batch:" in page
    assert (tmp_path / "segment.png").exists()


def test_a_point_that_fails_is_a_line_and_the_next_follows(
    toy: SamSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(segment, "compile_programs", out_of_memory)
    made = list(measure_segment(toy, PLAN, ["memory", "device", "kernels"]))
    assert [(line["bench"], line.get("failure")) for line in made] == [
        ("segment-memory", None),
        ("segment-device", "RuntimeError: RESOURCE_EXHAUSTED"),
        ("segment-kernels", "RuntimeError: RESOURCE_EXHAUSTED"),
    ]


def test_operations_are_those_that_a_counter_of_the_original_found() -> None:
    count = operations(SAM3)
    assert count.linears == pytest.approx(4609.6e9, rel=1e-4)
    # Patches, attention, neck and class token; encoder, decoder, scoring and masks.
    assert count.picture == pytest.approx((6.24 + 342.5 + 440.3 + 212.7 + 4.1) * 1e9, rel=1e-3)
    assert count.prompt == pytest.approx(419.9e9, rel=2e-3)
    assert count.text == pytest.approx(19.43e9, rel=2e-3)


def test_the_least_time_is_known_on_one_device() -> None:
    count = operations(SAM3)
    bf16, mixed = (count.least_seconds(1, 1, fp8=fp8, kind=H200) for fp8 in (False, True))
    assert 1 / bf16 == pytest.approx(131, abs=0.5)
    assert bf16 - mixed == pytest.approx(count.linears * (1 / BF16 - 1 / FP8))
    assert count.least_seconds(8, 8, fp8=True, kind=H200) == pytest.approx(8 * mixed)
    assert np.isnan(count.least_seconds(1, 1, fp8=False, kind="cpu"))


def test_arithmetic_in_fp8_is_said_beside_every_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sam_subjects, "draw", cheap_draw)
    subject = sam_subject("toy", in_fp8=True)
    assert subject.weights == "random numbers in bfloat16, the trunk's matrices in FP8"
    sizes = {leaf.dtype.itemsize for leaf in jax.tree.leaves(subject.model.params.trunk.blocks)}
    assert 1 in sizes
    pixels = np.zeros((1, 112, 112, 3), np.uint8)
    found = compile_programs(subject.model.params, TOY, pixels).both()
    assert bool(jnp.isfinite(found.logits).all())


def test_a_drawn_model_makes_masks_of_whole_areas() -> None:
    runs = []
    for drawn in (draw_weights, cheap_draw):
        tokenizer = Tokenizer(from_merges([]), TOY.text.context)
        model = SamModel(TOY, drawn(TOY, jax.random.key(0)), tokenizer)
        (result,) = Rig(SamSubject("toy", "", False, model), PLAN).stream(1, Size(300, 300), 1)
        runs.append(_runs(result))
    assert runs[0] < 0.7 * runs[1]


def test_photos_differ_and_have_the_size_asked_for() -> None:
    one, other = photo(150, 90, 0), photo(150, 90, 1)
    assert one != other
    assert photo(150, 90, 0) == one
    picture = Image.open(io.BytesIO(one))
    assert (picture.format, picture.size) == ("JPEG", (150, 90))


# --- peers ----------------------------------------------------------------------------------------


def test_peers_run_each_batch_in_both_variants() -> None:
    made = list(measure_segment_peers(segment_rivals("stub", None, "{}"), {}, (1, 4)))
    assert [(x["variant"], x["batch"]) for x in made] == [
        ("eager", 1),
        ("eager", 4),
        ("compiled", 1),
        ("compiled", 4),
    ]
    assert {(x["milliseconds"], x["images_per_second"]) for x in made} == {(1, 1000), (4, 1000)}
    assert beside({"batch": 4, "images_per_second": 3000.0}, made)["ratio_to_peer"] == 3
    assert beside({"batch": 9, "images_per_second": 1.0}, made).keys() == {
        "batch",
        "images_per_second",
    }


@pytest.mark.parametrize(("at", "count"), [("load", 1), ("segment", 2)])
def test_a_peer_that_fails_is_a_line(at: str, count: int) -> None:
    options = json.dumps({"variant": "eager", "fail": "error", "at": at})
    made = list(measure_segment_peers(segment_rivals("stub", None, options), {}, (1, 4)))
    assert len(made) == count
    assert all("out of memory, say" in line["failure"] for line in made)


# --- the command ----------------------------------------------------------------------------------


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "segment", *arguments], env={"COLUMNS": "100"})


def test_the_command_writes_lines_as_they_come(
    toy: SamSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sam_subjects, "sam_subject", lambda name, *, in_fp8: toy)
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "toy", "--batch", "1", "--size", "150x90", "--only", "device"]
    peer = ["--peer", "stub", "--peer-options", '{"variant": "eager"}']
    result = bench(*arguments, *peer, "--out", str(out))
    assert result.exit_code == 0, result.output
    theirs, ours = map(json.loads, out.read_text().splitlines())
    assert (theirs["bench"], ours["bench"]) == ("segment-peer", "segment-device")
    assert ours["device"]
    assert ours["ratio_to_peer"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--size", "12"), "--size takes WIDTHxHEIGHT"),
        (("--size", "0x5"), "--size takes WIDTHxHEIGHT"),
        (("--only", "magic"), "there is no part 'magic'"),
        (("--peer", "llama"), "no peer 'llama' for pictures; there are transformers"),
        (("--model", "somewhere", "--peer", "stub"), "peers run models drawn at random"),
        (("--model", "nowhere"), "nowhere is not a directory"),
    ],
)
def test_errors_take_one_line(arguments: tuple[str, ...], told: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.output


def test_help_has_an_example() -> None:
    assert "Example: jaxinfer bench segment" in bench("--help").stdout


def test_a_chart_leaves_out_what_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = {"bench": "segment", "size": "9x9", "batch": 1, "fp8": False}
    draw([line | {"images_per_second": 3.0}, line | {"failure": "x"}], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_fp8_is_compared_with_float32(toy: SamSubject) -> None:
    found = measure_fp8(toy, ["red ring", "person"], objects=3)
    assert found["objects"] == 6
    assert 0.001 < found["trunk_relative_error"] < 0.2
    assert 0 < found["largest_score_change"] < 0.5
    assert found["mean_score_change"] <= found["largest_score_change"]
