"""The server as OpenAI's own client sees it, on a real socket, with the little checkpoint."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from openai import OpenAI

from jaxinfer.engine import LLM, Chunk, SamplingParams, Usage
from server.app import MAX_BODY, create_app

MODEL = "tiny_qwen"
CAPITAL = [{"role": "user", "content": "What is the capital of Norway?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Server:
    """uvicorn on a thread of its own."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(create_app(llm), log_level="warning", timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def server(tiny_llm: LLM) -> Iterator[Server]:
    running = Server(tiny_llm)
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: OpenAI, messages: Any = CAPITAL, **options: Any) -> Any:
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 100}
    return client.chat.completions.create(**(fields | options))


def text(chunks: list[Any], field: str) -> str:
    deltas = (chunk.choices[0].delta for chunk in chunks if chunk.choices)
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def test_health(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "model": MODEL}


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_thoughtful_answer(client: OpenAI) -> None:
    completion = ask(client)
    (choice,) = completion.choices
    assert "Oslo" in choice.message.content
    assert "Norway" in choice.message.reasoning_content
    assert "think>" not in choice.message.content + choice.message.reasoning_content
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    usage = completion.usage
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 5
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert completion.model == MODEL


def test_an_answer_without_thinking(client: OpenAI) -> None:
    for options in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        message = ask(client, **options).choices[0].message
        assert "Oslo" in message.content
        assert message.reasoning_content is None


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text(chunks, "content") == whole.choices[0].message.content
    assert text(chunks, "reasoning_content") == whole.choices[0].message.reasoning_content
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_stream_has_usage_only_if_asked(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True, max_tokens=4))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_tool_call_and_its_answer(client: OpenAI) -> None:
    choice = ask(client, ASK_WEATHER, tools=[WEATHER]).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.id.startswith("call_")
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}

    reply = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7}'}
    messages = [*ASK_WEATHER, choice.message.model_dump(), reply]
    answer = ask(client, messages, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "stop"
    assert "7" in answer.message.content


def test_a_streamed_tool_call(client: OpenAI) -> None:
    chunks = list(ask(client, ASK_WEATHER, tools=[WEATHER], stream=True))
    pieces = [p for c in chunks for p in c.choices[0].delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    assert [p.function.name for p in pieces if p.function.name] == ["get_weather"]
    assert len([p.id for p in pieces if p.id]) == 1
    assert "".join(p.function.arguments for p in pieces) == '{"city": "Oslo"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_at_a_time(client: OpenAI) -> None:
    both = [{"role": "user", "content": "Check the weather in Oslo and check the weather in Rome."}]
    choice = ask(client, both, tools=[WEATHER], parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert choice.finish_reason == "tool_calls"


def test_no_call_when_none_is_allowed(client: OpenAI) -> None:
    choice = ask(client, ASK_WEATHER, tools=[WEATHER], tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content or choice.message.reasoning_content


def test_history_with_parts_developer_and_past_calls(client: OpenAI) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages = [
        {"role": "developer", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in "}, TEXT_ROME]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": '{"sky": "sunny"}'},
    ]
    assert "sunny" in ask(client, messages, tools=[WEATHER]).choices[0].message.content


TEXT_ROME = {"type": "text", "text": "Rome?"}


def test_logprobs(client: OpenAI) -> None:
    whole = ask(client, logprobs=True)
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    assert all(token.logprob <= 0 and token.top_logprobs == [] for token in tokens)
    said = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert whole.choices[0].message.content in said
    chunks = list(ask(client, logprobs=True, stream=True))
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in tokens]


def test_stop_and_length(client: OpenAI) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    stopped = ask(client, stop=["Oslo"], extra_body=off).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == "The capital of Norway is"
    cut = ask(client, max_tokens=None, max_completion_tokens=3, extra_body=off)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 3


def test_a_seed_repeats_a_sample(client: OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 2, "top_p": 1, "extra_body": {"top_k": 0}}
    first, again, other = (
        ask(client, seed=seed, max_tokens=20, **options).choices[0].message.reasoning_content
        for seed in (-5, -5, 6)
    )
    assert first == again != other


def test_requests_at_the_same_time(client: OpenAI) -> None:
    capitals = {"Norway": "Oslo", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}
    questions = [f"What is the capital of {country}?" for country in capitals]
    questions += questions[:1]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = pool.map(lambda q: ask(client, [{"role": "user", "content": q}]), questions)
        said = [answer.choices[0].message.content for answer in answers]
    alone = ask(client, [{"role": "user", "content": questions[0]}]).choices[0].message.content
    assert said[0] == said[-1] == alone
    assert all(city in answer for city, answer in zip(capitals.values(), said, strict=False))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(server: Server, stream: bool) -> None:
    engine, url = server.llm.engine, f"{server.url}/v1/chat/completions"
    body = {"model": MODEL, "messages": CAPITAL, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            next(response.iter_lines())
            assert engine.busy
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=0.5)
    deadline = time.monotonic() + 5
    while engine.busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not engine.busy


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
    ({"n": 2}, "n", "not supported"),
    ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"presence_penalty": 1.5}, "presence_penalty", "not supported"),
    ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "not supported"),
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


def test_harmless_and_neutral_fields(client: OpenAI) -> None:
    ask(
        client,
        max_tokens=1,
        user="me",
        store=False,
        metadata={"a": "b"},
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
    )


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


class _Broken:
    """An engine that fails after its first chunk, or at once."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    async def stream(self, token_ids: Any, params: SamplingParams) -> Any:
        for _ in range(self._chunks):
            yield Chunk("Hi", (1,), None, None, Usage(1, 1))
        raise RuntimeError("secret")

    def start(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("chunks", "stream"), [(0, False), (0, True), (1, False), (1, True)])
def test_a_failing_engine(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, chunks: int, stream: bool
) -> None:
    monkeypatch.setattr("server.app.AsyncLLM", lambda llm: _Broken(chunks))
    transport = httpx.ASGITransport(create_app(tiny_llm), raise_app_exceptions=False)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            fields = {"model": MODEL, "messages": CAPITAL, "stream": stream}
            return await http.post("/v1/chat/completions", json=fields)

    response = asyncio.run(post())
    assert "secret" not in response.text
    if stream and chunks:
        assert response.status_code == 200
        assert "server_error" in response.text.strip().splitlines()[-1]
    else:
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
