"""Parts of the server that need no model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.errors import ApiError
from server.schemas import read_chat_request
from server.stream import Disconnected, until_disconnected
from server.tokens import token_bytes

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
