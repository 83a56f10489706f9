"""Parts of the server that need no model."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxinfer.engine.text import token_bytes
from jaxinfer.qwen.messages import TextDelta
from server.errors import ApiError
from server.requests import read_chat_request
from server.stream import Disconnected, merge, until_disconnected
from server.verbatim import VerbatimParser

TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny_qwen" / "tokenizer.json"


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x", "naïve 日本 🙂", "<tool_call>\n</think>"]
)
def test_the_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(token_bytes(tokenizer, i) for i in ids).decode() == text


def test_every_byte_has_a_token() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    single = {token_bytes(tokenizer, i) for i in range(tokenizer.get_vocab_size())}
    assert {bytes([byte]) for byte in range(256)} <= single
    assert token_bytes(tokenizer, 10**6) == b""


@pytest.mark.parametrize("body", [b"", b"null", b"\xff", b'{"a":' * 100_000])
def test_bodies_that_are_no_object(body: bytes) -> None:
    with pytest.raises(ApiError, match="not a JSON object") as caught:
        read_chat_request(body)
    assert caught.value.status == 400


def test_null_stands_for_the_default() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": null}'
    assert read_chat_request(body).temperature is None


class Connection:
    """Says that the client has left once told so."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def leave() -> None:
        connection = Connection()
        asyncio.get_running_loop().call_later(0.01, connection.left.set)
        await until_disconnected(connection.receive, work())

    with pytest.raises(Disconnected):
        asyncio.run(leave())
    assert cancelled == [True]


def test_work_that_ends_first_is_returned_or_raised() -> None:
    async def work(fails: bool) -> int:
        if fails:
            raise KeyError("x")
        return 7

    assert asyncio.run(until_disconnected(Connection().receive, work(False))) == 7
    with pytest.raises(KeyError):
        asyncio.run(until_disconnected(Connection().receive, work(True)))


class Talkers:
    """Streams that count up in step, and which of them are closed."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def count(self, name: int, end: int, fails: bool = False) -> AsyncGenerator[int]:
        try:
            for number in range(end):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise KeyError(name)
        finally:
            self.closed.append(name)


def test_merged_streams_are_complete_and_in_order() -> None:
    talkers = Talkers()

    async def listen() -> list[tuple[int, int]]:
        streams = [talkers.count(name, end) for name, end in enumerate((5, 0, 3))]
        return [item async for item in merge(streams)]

    heard = asyncio.run(listen())
    assert [[n for i, n in heard if i == stream] for stream in range(3)] == [
        [0, 1, 2, 3, 4],
        [],
        [0, 1, 2],
    ]
    assert sorted(talkers.closed) == [0, 1, 2]


def test_merged_streams_run_at_the_same_time() -> None:
    async def listen() -> None:
        meeting = asyncio.Barrier(3)

        async def wait() -> AsyncGenerator[int]:
            await meeting.wait()
            yield 1

        async with asyncio.timeout(10):
            assert len([item async for item in merge([wait() for _ in range(3)])]) == 3

    asyncio.run(listen())


def test_an_error_in_one_of_the_merged_streams_closes_all() -> None:
    talkers = Talkers()

    async def listen() -> None:
        streams = [talkers.count(0, 10**6), talkers.count(1, 3, fails=True), talkers.count(2, 9**9)]
        async for _ in merge(streams):
            pass

    with pytest.raises(KeyError):
        asyncio.run(listen())
    assert sorted(talkers.closed) == [0, 1, 2]


def test_closing_merged_streams_closes_all() -> None:
    talkers = Talkers()

    async def listen() -> None:
        merged = merge([talkers.count(name, 10**6) for name in range(3)])
        await anext(merged)
        await merged.aclose()
        assert sorted(talkers.closed) == [0, 1, 2]

    asyncio.run(listen())


pieces = st.lists(st.sampled_from(["</think>", "</th", "ink>", "<", "\n", " ", "a", '{"b": 1}']))


@given(pieces, pieces, st.booleans())
def test_a_structured_answer_stays_as_it_is_however_it_is_cut(
    thoughts: list[str], answer: list[str], thinking: bool
) -> None:
    said = "".join(thoughts).partition("</think>")[0] if thinking else ""
    text = "".join(answer)
    whole = f"{said}</think>{text}" if thinking else text
    parser = VerbatimParser(thinking=thinking)
    deltas = [delta for letter in whole for delta in parser.feed(letter)] + parser.finish()
    parts = {"reasoning": "", "content": ""}
    for delta in deltas:
        assert isinstance(delta, TextDelta)
        parts[delta.kind] += delta.text
    assert parts == {"reasoning": said.lstrip("\n").rstrip(), "content": text}
