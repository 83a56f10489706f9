import pytest

from jaxinfer.bench.timeline import Answer, figures


def test_latencies_are_those_of_each_request() -> None:
    answer = Answer(asked=1.0, times=(1.5, 1.7, 2.1))
    assert answer.first == 0.5
    assert answer.between == pytest.approx(0.3)
    assert Answer(0.0, (1.0,)).between is None


def test_throughput_is_from_the_first_arrival_to_the_last_token() -> None:
    told = figures([Answer(1.0, (2.0, 3.0)), Answer(2.0, (4.0, 4.0, 6.0))])
    assert told["output_tokens"] == 5
    assert told["seconds"] == 5.0
    assert told["output_tokens_per_second"] == 1.0
    assert told["first_token_milliseconds"]["p50"] == 1500.0
    assert told["between_tokens_milliseconds"]["p50"] == 1000.0


def test_tokens_that_arrive_together_make_no_pause() -> None:
    told = figures([Answer(0.0, (1.0, 1.0, 1.5, 1.5))])
    assert told["pause_milliseconds"] == {"p50": 500.0, "p90": 500.0, "p99": 500.0}


def test_answers_of_one_token_have_no_time_between() -> None:
    assert figures([Answer(0.0, (1.0,))])["between_tokens_milliseconds"] == {}
