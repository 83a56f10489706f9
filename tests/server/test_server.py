"""The server as OpenAI's own client sees it, on a real socket, with the little checkpoint."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.server.helpers import CAPITAL, MODEL, WEATHER, Server, ask, text

ASK_WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]


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
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_frees_its_place(server: Server, stream: bool, n: int) -> None:
    engine, url = server.llm.engine, f"{server.url}/v1/chat/completions"
    body = {"model": MODEL, "messages": CAPITAL, "ignore_eos": True, "stream": stream, "n": n}
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
