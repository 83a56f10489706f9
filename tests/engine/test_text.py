from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints import find, resolve
from jaxinfer.engine.text import TextStream, token_bytes

TOKENIZER = Tokenizer.from_file(str(find(resolve("tiny_qwen"), "tokenizer.json")))


def token_id(piece: str) -> int:
    return TOKENIZER.get_vocab()[piece]


END = token_id("<|im_end|>")

# Bytes in the order of their tokens: first those that are printable in Latin-1.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*PRINTABLE, *sorted(set(range(256)) - set(PRINTABLE))]
# Pieces of a text of these letters, so that stop strings meet and overlap all the time.
LETTERS = "ret"
LETTER_TOKENS = sorted(t for piece, t in TOKENIZER.get_vocab().items() if set(piece) <= {*LETTERS})
# A space and half a character in one token.
SPLIT = token_id("ĠÂ")

any_tokens = st.lists(
    st.integers(0, 255) | st.just(SPLIT) | st.integers(0, TOKENIZER.get_vocab_size() - 1),
    max_size=24,
)
any_text = st.text("re é€漢🙂👩‍🚀🏽\n", max_size=16) | st.text(max_size=16)


def decode(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=True)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def encode_bytes(text: str) -> list[int]:
    """One token a byte."""
    return [BYTES.index(byte) for byte in text.encode()]


def stream(tokens: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, int]:
    """The text that a stream gives, and how many tokens it took to stop (all if it did not)."""
    text, given = TextStream(TOKENIZER, stop), ""
    for number, token in enumerate(tokens, 1):
        piece, stopped = text.feed(token, last=number == len(tokens))
        given += piece
        if stopped:
            return given, number
    return given, len(tokens)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that is complete first; of several, before the longest."""
    for end in range(len(text) + 1):
        if complete := [s for s in stop if text.endswith(s, 0, end)]:
            return text[: end - max(map(len, complete))]
    return text


@given(any_tokens)
def test_any_tokens_stream_to_what_they_decode_to(tokens: list[int]) -> None:
    assert stream(tokens)[0] == decode(tokens)


@given(any_text)
def test_text_comes_back_whole_from_tokens_of_single_bytes(text: str) -> None:
    assert stream(encode_bytes(text))[0] == text


@given(any_tokens)
def test_whole_characters_are_given_at_once(tokens: list[int]) -> None:
    text, given = TextStream(TOKENIZER), ""
    for number, token in enumerate(tokens, 1):
        given += text.feed(token)[0]
        so_far = decode(tokens[:number])
        assert so_far.startswith(given)
        if not so_far.endswith("\ufffd"):
            assert given == so_far


@given(
    tokens=st.lists(st.sampled_from(LETTER_TOKENS), max_size=12),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_across_tokens_cut_as_if_the_text_were_whole(
    tokens: list[int], stop: list[str]
) -> None:
    given, taken = stream(tokens, stop)
    assert given == cut(decode(tokens), stop)
    assert not any(s in decode(tokens[: taken - 1]) for s in stop)


@given(tokens=any_tokens, data=st.data())
def test_any_piece_of_any_text_stops_it(tokens: list[int], data: st.DataObject) -> None:
    text = decode(tokens)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    pieces = data.draw(st.lists(places, max_size=3))
    stop = [text[at : at + size] or "x" for at, size in pieces]
    assert stream(tokens, stop)[0] == cut(text, stop)


@given(
    tokens=st.lists(st.sampled_from(LETTER_TOKENS), max_size=12), stop=st.text(LETTERS, min_size=1)
)
def test_nothing_is_held_that_cannot_become_a_stop_string(tokens: list[int], stop: str) -> None:
    text, given = TextStream(TOKENIZER, [stop]), ""
    for number, token in enumerate(tokens, 1):
        piece, stopped = text.feed(token)
        given += piece
        if stopped:
            return
        held = decode(tokens[:number]).removeprefix(given)
        assert stop.startswith(held)


@pytest.mark.parametrize("stop", [("tree", "r"), ("r", "tree")])
def test_the_order_of_stop_strings_makes_no_difference(stop: tuple[str, ...]) -> None:
    assert stream(encode_bytes("a tree"), stop) == ("a t", 4)


def test_a_stop_string_that_holds_another_wins_if_both_end_together() -> None:
    assert stream(encode_bytes("a tree"), ("ee", "tree"))[0] == "a "


def test_a_stop_string_is_not_leaked_by_the_half_character_behind_it() -> None:
    assert stream([*encode("no"), SPLIT], (" ",))[0] == "no"


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    assert stream(encode_bytes("🙂")[:3])[0] == "\ufffd"


def test_what_was_held_for_a_stop_string_is_given_at_the_end() -> None:
    assert stream(encode("STO"), ("STOP",))[0] == "STO"


@given(any_text)
def test_the_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    assert b"".join(token_bytes(TOKENIZER, token) for token in encode(text)) == text.encode()


def test_an_added_token_is_written_as_it_is() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens(["<do not>é"])
    (token,) = tokenizer.encode("<do not>é", add_special_tokens=False).ids
    assert token_bytes(tokenizer, token) == "<do not>é".encode()
    assert tokenizer.decode([token]) == "<do not>é"


def test_an_id_outside_the_vocabulary_is_no_text() -> None:
    assert stream([*encode("no"), 10**6, *encode("thing")])[0] == "nothing"


def test_text_before_half_a_character_is_not_held() -> None:
    assert TextStream(TOKENIZER).feed(SPLIT) == (" ", None)


def test_a_stop_string_that_does_not_count_is_text_like_any_other() -> None:
    text, given = TextStream(TOKENIZER, ["tree"]), ""
    for number, token in enumerate(encode_bytes("tree tree")):
        piece, stopped = text.feed(token, stops=number >= 4)
        given += piece
    assert (given, stopped) == ("tree ", "tree")


def test_a_stop_string_counts_if_only_its_end_does() -> None:
    text = TextStream(TOKENIZER, ["tree"])
    pieces = [text.feed(t, stops=n == 5) for n, t in enumerate(encode_bytes("a tree"))]
    assert pieces == [("a", None), (" ", None), ("", None), ("", None), ("", None), ("", "tree")]


def test_control_tokens_are_not_text() -> None:
    assert stream([*encode("hello"), END])[0] == "hello"
