from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine import SamplingParams
from jaxinfer.engine.answer import Answer, Taken
from tests.engine.test_text import (
    BYTES,
    END,
    LETTER_TOKENS,
    LETTERS,
    SPLIT,
    TOKENIZER,
    decode,
    encode,
    encode_bytes,
    token_id,
)

OTHER_END = token_id("<|endoftext|>")
EOS = (END, OTHER_END)

# What may follow half a character: something else, or bytes that complete it, whichever it is.
FOLLOWING = [encode("a"), *([BYTES.index(byte)] * 3 for byte in (0x80, 0x90, 0xA0))]

Ending = tuple[str, int, str | None, str | int | None]


def certain(tokens: Sequence[int]) -> str:
    """The text of these tokens as far as it is the same whatever comes next."""
    texts = [decode([*tokens, *after]) for after in FOLLOWING]
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in alike)


def naive(tokens: Sequence[int], params: SamplingParams, limit: int) -> Ending:
    """Text, tokens and the two reasons, by decoding everything again at each token."""
    for count, token in enumerate(tokens, 1):
        counts = count >= params.min_tokens
        own = counts and token in params.stop_token_ids
        end = own or (counts and token in EOS and not params.ignore_eos)
        before = certain(tokens[: count - 1])
        text = decode(tokens[:count]) if end or count == limit else certain(tokens[:count])
        for size in range(len(before) + 1, len(text) + 1):
            complete = [stop for stop in params.stop if text[:size].endswith(stop)]
            if counts and complete:
                stop = max(complete, key=len)
                return text[: size - len(stop)], count, "stop", stop
        if end:
            return text, count, "stop", token if own else None
        if count == limit:
            return text, count, "length", None
    return certain(tokens), len(tokens), None, None


def groups(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """The tokens in groups of these sizes, then one by one."""
    start = 0
    for size in (*sizes, *[1] * len(tokens)):
        yield tokens[start : start + size]
        start += size


def take_all(answer: Answer, offered: Iterator[Sequence[int]]) -> list[Taken]:
    taken = []
    for tokens in offered:
        if answer.finished:
            break
        taken.append(answer.take(tokens))
    return taken


def take(text: str, limit: int = 100, **params: Any) -> Taken:
    """What an answer takes of this text, a token a byte, then an end token, offered at once."""
    return Answer(TOKENIZER, SamplingParams(**params), EOS, limit).take([*encode_bytes(text), END])


# Few enough that stop strings and tokens, halves of characters and ends meet all the time.
some_token = (
    st.sampled_from(LETTER_TOKENS)
    | st.sampled_from([*encode_bytes("é🙂\xa0"), SPLIT, END, OTHER_END])
    | st.integers(0, TOKENIZER.get_vocab_size())
)
some_tokens = st.lists(some_token, max_size=14)
some_sizes = st.lists(st.integers(0, 5), max_size=14)
some_params = st.builds(
    SamplingParams,
    stop=st.lists(st.text([*LETTERS, " ", "é", "\ufffd"], min_size=1, max_size=4), max_size=3),
    stop_token_ids=st.lists(st.sampled_from([*LETTER_TOKENS, SPLIT, END]), max_size=2),
    min_tokens=st.just(0) | st.integers(0, 8),
    ignore_eos=st.booleans(),
)
some_limit = st.just(100) | st.integers(1, 10)


@given(some_tokens, some_sizes, some_params, some_limit)
def test_tokens_in_any_groups_end_where_a_naive_reading_ends(
    tokens: list[int], sizes: list[int], params: SamplingParams, limit: int
) -> None:
    answer = Answer(TOKENIZER, params, EOS, limit)
    taken = take_all(answer, groups(tokens, sizes))
    text, count, finish_reason, stop_reason = naive(tokens, params, limit)
    given = "".join(t.text for t in taken)
    assert answer.tokens == sum(t.count for t in taken) == count
    assert answer.finished == (finish_reason is not None)
    assert all(t.finish_reason is t.stop_reason is None for t in taken[:-1])
    if answer.finished:
        assert (given, *taken[-1][2:]) == (text, finish_reason, stop_reason)
    else:
        assert text.startswith(given)
        held = text.removeprefix(given)
        assert not held or any(s.startswith(held) and s != held for s in params.stop)


@given(some_tokens, some_params, st.data())
def test_what_was_given_stands_whatever_comes_after(
    tokens: list[int], params: SamplingParams, data: st.DataObject
) -> None:
    answer = Answer(TOKENIZER, params, EOS, 100)
    given = "".join(t.text for t in take_all(answer, groups(tokens, [])))
    other = [*tokens, *data.draw(some_tokens)]
    assert naive(other, params, len(other) or 1)[0].startswith(given)


def test_the_rest_of_a_draft_is_dropped_behind_an_end_token() -> None:
    answer = Answer(TOKENIZER, SamplingParams(), EOS, 100)
    assert answer.take(encode_bytes("no")) == ("no", 2, None, None)
    assert answer.take([*encode_bytes("t"), END, *encode_bytes("hing")]) == ("t", 2, "stop", None)
    assert (answer.tokens, answer.finished) == (4, True)


def test_an_answer_may_reach_its_limit_inside_a_draft() -> None:
    assert take("a tree", limit=4) == ("a tr", 4, "length", None)


def test_a_stop_string_may_be_completed_inside_a_draft() -> None:
    assert take("a tree or two", stop="ee o") == ("a tr", 8, "stop", "ee o")


def test_the_reason_at_the_limit_is_a_stop_string_if_the_last_token_completes_one() -> None:
    assert take("a tree", limit=6, stop="ee") == ("a tr", 6, "stop", "ee")


def test_the_reason_at_the_limit_is_an_end_token_if_that_comes_last() -> None:
    assert take("a tree", limit=7) == ("a tree", 7, "stop", None)


def test_what_was_held_is_given_at_the_limit_and_at_an_end_token() -> None:
    assert take("a tree", limit=5, stop="ee") == ("a tre", 5, "length", None)
    assert take("a tre", stop="ee") == ("a tre", 6, "stop", None)


def test_a_character_cut_off_by_the_end_becomes_a_replacement() -> None:
    assert take("a🙂", limit=3) == ("a\ufffd", 3, "length", None)
    answer = Answer(TOKENIZER, SamplingParams(), EOS, 100)
    assert answer.take([*encode_bytes("a🙂")[:3], END]) == ("a\ufffd", 4, "stop", None)


def test_a_stop_token_of_ones_own_is_named_and_says_what_it_says() -> None:
    (own,) = encode_bytes("r")
    assert take("a tree", stop_token_ids=[own]) == ("a tr", 4, "stop", own)
    assert take("a", stop_token_ids=[END]) == ("a", 2, "stop", END)


def test_a_stop_string_cuts_what_a_stop_token_says() -> None:
    (own,) = encode_bytes("r")
    assert take("a tree", stop=" tr", stop_token_ids=[own]) == ("a", 4, "stop", " tr")


def test_an_ignored_end_token_is_neither_an_end_nor_text() -> None:
    answer = Answer(TOKENIZER, SamplingParams(ignore_eos=True), EOS, 100)
    assert answer.take([*encode("no"), END, *encode("thing")]).text == "nothing"
    assert not answer.finished


def test_a_stop_string_completed_before_min_tokens_is_text() -> None:
    assert take("tree tree", min_tokens=5, stop="ee") == ("tree tr", 9, "stop", "ee")


def test_a_stop_string_completed_before_min_tokens_is_text_even_if_it_was_held() -> None:
    assert take("trees", min_tokens=5, stop=("ee", "tree!")) == ("trees", 6, "stop", None)


def test_a_stop_string_that_min_tokens_falls_into_counts() -> None:
    assert take("tree tree", min_tokens=5, stop="ee ") == ("tr", 5, "stop", "ee ")


def test_an_end_token_before_min_tokens_does_not_end() -> None:
    tokens = [END, *encode_bytes("a"), END, *encode_bytes("b")]
    taken = Answer(TOKENIZER, SamplingParams(min_tokens=2), EOS, 100).take(tokens)
    assert taken == ("a", 3, "stop", None)


def test_an_answer_that_has_finished_takes_no_more() -> None:
    answer = Answer(TOKENIZER, SamplingParams(), EOS, 1)
    answer.take(encode("a"))
    with pytest.raises(RuntimeError, match="has finished"):
        answer.take([])


def test_an_answer_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="limit=0"):
        Answer(TOKENIZER, SamplingParams(), EOS, 0)
