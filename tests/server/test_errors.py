"""What is refused, and what a client is told when the server fails."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from jaxinfer.engine import LLM, Chunk, SamplingParams, Usage
from server.app import MAX_BODY, create_app
from tests.server.helpers import CAPITAL, MODEL, WEATHER, Server, ask


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "length"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "int"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", "No user query"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "not served yet",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None, "missing"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "context holds"),
    (
        {"messages": [*CAPITAL, {"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[1].function_call",
        "tool_calls",
    ),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"min_p": 2}, "min_p", "<= 1"),
    ({"top_k": -1}, "top_k", ">= 0"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one"),
    ({"stop": [""]}, "stop[0]", "length"),
    ({"n": 0}, "n", "from 1 to 128"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": "high"}, "frequency_penalty", "float"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"logit_bias": {"the": 2}}, "logit_bias", "int"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"100000": 2}}, "logit_bias", "no token id"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "no token id"),
    ({"allowed_token_ids": [100000]}, "allowed_token_ids", "no token id"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one id"),
    ({"bad_words": [""]}, "bad_words", "not empty"),
    ({"bad_words": ["floccinaucinihilipilification " * 3]}, "bad_words", "shorten"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "at most max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    (json_schema({"type": "banana"}), "response_format", "json_schema"),
    (json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "response_format", "json"),
    (json_schema({"type": "object"}) | {"tools": [WEATHER]}, "response_format", "tools"),
    (json_schema({"type": "object"}) | {"ignore_eos": True}, "ignore_eos", "has an end"),
    (
        json_schema({"type": "object"}) | {"structured_outputs": {"regex": "x"}},
        "structured_outputs",
        "not both",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "none given"),
    (
        {"structured_outputs": {"regex": "x", "choice": ["x"]}},
        "structured_outputs",
        "regex and choice given",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "json_schema"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "lark"),
    ({"structured_outputs": {"xml": "x"}}, "structured_outputs", "xml"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "forced"),
    ({"tool_choice": "auto"}, "tool_choice", "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [{"type": "code"}]}, "tools[0].type", "code"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict",
        "strict",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, None, "regex"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "not one of"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, None, "true or false"),
    ({"temprature": 1}, "temprature", "unknown field"),
]


@pytest.mark.parametrize(("change", "param", "message"), BAD)
def test_bad_requests_name_the_field(
    client: OpenAI, change: dict[str, Any], param: str | None, message: str
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": CAPITAL} | change
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=fields, cast_to=object)
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    if param:
        assert error["param"] == param


def test_other_errors(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")

    url = f"{server.url}/v1/chat/completions"
    cases = [
        (httpx.get(f"{server.url}/v1/nothing"), 404, "no route GET /v1/nothing"),
        (httpx.get(url), 405, "use POST"),
        (httpx.post(url, content=b"{"), 400, "not a JSON object"),
        (httpx.post(url, content=b"[1]"), 400, "not a JSON object"),
        (httpx.post(url, content=b" " * (MAX_BODY + 1)), 413, "longer than"),
    ]
    for response, status, message in cases:
        assert response.status_code == status
        assert message in response.json()["error"]["message"]


class _Failing:
    """An engine that fails after so many chunks, each way it can."""

    def __init__(self, chunks: int, stuck: bool) -> None:
        self._chunks, self._stuck = chunks, stuck

    async def stream(self, token_ids: Any, params: SamplingParams) -> Any:
        for _ in range(self._chunks):
            yield Chunk("Hi", (1,), None, None, Usage(1, 1))
        if not self._stuck:
            raise RuntimeError("secret")
        yield Chunk("", (), None, "error", Usage(1, 1), stop_reason="nothing can follow")

    def start(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("stuck", "message"), [(False, "its log says why"), (True, "cannot go on: nothing can follow")]
)
@pytest.mark.parametrize(("chunks", "stream"), [(0, False), (0, True), (1, False), (1, True)])
def test_a_failing_engine(
    tiny_llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    chunks: int,
    stream: bool,
    stuck: bool,
    message: str,
    n: int,
) -> None:
    monkeypatch.setattr("server.app.AsyncLLM", lambda llm: _Failing(chunks, stuck))
    transport = httpx.ASGITransport(create_app(tiny_llm), raise_app_exceptions=False)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            fields = {"model": MODEL, "messages": CAPITAL, "stream": stream, "n": n}
            return await http.post("/v1/chat/completions", json=fields)

    response = asyncio.run(post())
    assert "secret" not in response.text
    if stream and chunks:
        assert response.status_code == 200
        told = json.loads(response.text.strip().splitlines()[-1].removeprefix("data: "))
    else:
        assert response.status_code == 500
        told = response.json()
    assert told["error"]["type"] == "server_error"
    assert message in told["error"]["message"]
