from dataclasses import replace

from jaxinfer.qwen.config import Config
from jaxinfer.qwen.mode import FAMILIES, decode_mode, usable_kernels
from jaxinfer.qwen.published import RAW


def test_the_published_model_runs_as_kernels_on_a_gpu_alone() -> None:
    cfg = Config.from_dict(RAW)
    assert usable_kernels(cfg, "gpu") == frozenset(FAMILIES)
    assert usable_kernels(cfg, "cpu") == frozenset()


def test_a_model_that_the_kernels_cannot_cut_runs_in_plain_jax() -> None:
    cfg = Config.from_dict(RAW)
    for other in (replace(cfg, dtype="float32"), replace(cfg, hidden_size=3072)):
        assert usable_kernels(other, "gpu") == frozenset()


def test_each_family_is_chosen_by_itself() -> None:
    mode = decode_mode(frozenset({"experts"}))
    assert mode.impl("experts") == "kernel"
    assert mode.impl("attention") == "plain"
    assert decode_mode(frozenset({"experts"}), interpret=True).impl("experts") == "interpret"
