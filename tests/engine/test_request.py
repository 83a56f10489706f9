import re
from typing import Any

import pytest

from jaxinfer.engine import Chunk, Completion, SamplingParams, Usage


@pytest.mark.parametrize(
    ("field", "bad", "range_"),
    [
        ("max_tokens", 0, "at least 1"),
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", float("nan"), "from 0 to 100"),
        ("temperature", float("inf"), "from 0 to 100"),
        ("top_k", -1, "at least 0"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("seed", -1, "from 0 to 2**32 - 1"),
        ("seed", 2**32, "from 0 to 2**32 - 1"),
        ("stop", "", "strings that are not empty"),
        ("stop", ("a", ""), "strings that are not empty"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, bad: Any, range_: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field} must be {range_}, not ")):
        SamplingParams(**{field: bad})


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_p=1, min_p=0, seed=0)
    SamplingParams(temperature=100, top_p=1e-6, min_p=1, seed=2**32 - 1)


def test_one_stop_string_may_be_given_bare_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2)))


def test_usage_adds_up() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=7, drafted=8, accepted=2)
    assert usage.total_tokens == 12
    assert usage.acceptance == 0.25
    assert Usage().acceptance == 0.0


def chunk(
    text: str, tokens: tuple[int, ...], reason: str | None, logprobs: tuple[float, ...] | None
) -> Chunk:
    return Chunk(text, tokens, logprobs, reason, Usage(1, len(tokens)))


def test_chunks_join_to_a_completion() -> None:
    chunks = [
        chunk("He", (1,), None, (-0.5,)),
        chunk("", (), None, ()),
        chunk("llo", (2, 3), "stop", (-0.25, -1.0)),
    ]
    joined = Completion.join(chunks)
    assert joined == Completion("Hello", (1, 2, 3), (-0.5, -0.25, -1.0), "stop", Usage(1, 2))


def test_without_logprobs_a_completion_has_none() -> None:
    assert Completion.join([chunk("a", (1,), "length", None)]).logprobs is None


def test_a_stream_that_has_not_finished_does_not_join() -> None:
    with pytest.raises(ValueError, match="has not finished"):
        Completion.join([chunk("a", (1,), None, None)])
