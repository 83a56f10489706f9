"""Static FP8 scales come from the inputs that modules really get."""

from pathlib import Path

import pytest

from checkpoints import SHIPPED, CheckpointError, input_scales, load, quantize
from checkpoints.calibrate import WINDOW
from pallas_kernels import Fp8

TEXT = "import os\n\n\ndef walk(path):\n    return sorted(os.listdir(path))\n" * 40


@pytest.fixture(scope="module")
def scales() -> dict[str, float]:
    return input_scales(SHIPPED["tiny_qwen"], TEXT)


def test_every_fp8_module_has_a_scale_and_projections_of_one_input_share_it(
    scales: dict[str, float],
) -> None:
    assert len(scales) == 6 * 3 + 2 * 4
    layer = "model.language_model.layers.{}."
    for number in (3, 7):
        same = {scales[layer.format(number) + f"self_attn.{m}_proj"] for m in "qkv"}
        assert len(same) == 1
    mixer = layer.format(0) + "linear_attn."
    assert scales[mixer + "in_proj_qkv"] == scales[mixer + "in_proj_z"]


def test_more_text_can_only_widen_the_range(scales: dict[str, float]) -> None:
    more = input_scales(SHIPPED["tiny_qwen"], TEXT + "?! 零 <tool_call>" * 400)
    assert all(more[name] >= scale for name, scale in scales.items())
    assert any(more[name] > scale for name, scale in scales.items())


def test_scales_are_written_and_read_back(scales: dict[str, float], tmp_path: Path) -> None:
    quantize(SHIPPED["tiny_qwen"], tmp_path / "out", "nvidia-mix", input_scales=scales)
    _, params = load(tmp_path / "out")
    o_proj = params.attention.o_proj
    assert isinstance(o_proj, Fp8)
    assert o_proj.input_scale is not None
    expected = [scales[f"model.language_model.layers.{n}.self_attn.o_proj"] for n in (3, 7)]
    assert o_proj.input_scale.tolist() == pytest.approx(expected)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match=f"at least {WINDOW}"):
        input_scales(SHIPPED["tiny_qwen"], "short")
