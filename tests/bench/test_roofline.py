import pytest

from jaxinfer.bench.roofline import active_parameters, prefill_roofline, shares, traffic
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Params, all_dense, nvidia_mix, shapes
from jaxinfer.qwen.published import RAW

CFG = Config.from_dict(RAW)
H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def mix() -> Params:
    return shapes(CFG, nvidia_mix)


def test_weights_of_a_step_are_the_published_sums(mix: Params) -> None:
    for streams, gigabytes in ((1, 2.255), (8, 5.753), (32, 13.248)):
        moved = traffic(CFG, mix, streams, 0)
        assert moved.weights / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    dense = traffic(CFG, shapes(CFG, all_dense), 1, 0)
    assert dense.weights / 1e9 == pytest.approx(5.893, rel=1e-3)


def test_state_is_read_and_written_once_for_each_sequence(mix: Params) -> None:
    moved = traffic(CFG, mix, streams=3, context=1000, rows=1)
    assert moved.recurrent == 3 * 2 * 62_914_560
    assert moved.convolution == 3 * 2 * 1_474_560
    assert moved.keys == 3 * 1001 * 20_480
    assert traffic(CFG, mix, 3, 1000, kv_dtype="float8_e4m3fn").keys == moved.keys / 2


def test_verified_rows_read_more_experts_and_nothing_else(mix: Params) -> None:
    one, four = (traffic(CFG, mix, 1, 1024, rows) for rows in (1, 4))
    assert four.weights == pytest.approx(traffic(CFG, mix, 4, 1024).weights)
    assert four.recurrent == one.recurrent
    assert four.keys - one.keys == 3 * 20_480


def test_shares_are_told_of_known_devices_only() -> None:
    told = shares(4.8e9, 2e-3, H200)
    assert told["roofline_milliseconds"] == 1.0
    assert told["share_of_datasheet"] == 0.5
    assert told["share_of_copy"] == pytest.approx(0.5 * 4.8 / 4.3, abs=1e-4)
    assert shares(4.8e9, None, H200)["share_of_copy"] is None
    assert shares(4.8e9, 2e-3, "cpu")["share_of_datasheet"] is None


def test_a_prefill_is_bound_by_bytes_when_short_and_by_arithmetic_when_long(mix: Params) -> None:
    active = active_parameters(CFG, mix)
    assert active == pytest.approx(2_437_870_208, rel=1e-3)
    short = prefill_roofline(CFG, mix, 64, 1, H200)
    assert short == pytest.approx(traffic(CFG, mix, 64, 0).weights / 4.8e12)
    long = prefill_roofline(CFG, mix, 100_000, 1, H200)
    assert long == pytest.approx(2 * active * 100_000 / 989e12)
    unknown = prefill_roofline(CFG, mix, 64, 1, "cpu")
    assert unknown != unknown
