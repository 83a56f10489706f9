"""What a client can ask of the sampling, and how often."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from jaxinfer.engine import SamplingParams
from tests.server.helpers import CAPITAL, QUICK, Server, ask

WILD: dict[str, Any] = {
    "temperature": 2,
    "top_p": 1,
    "max_tokens": 12,
    "extra_body": QUICK | {"top_k": 0},
}


def ids(server: Server, text: str) -> list[int]:
    return server.llm.tokenizer.encode(text, add_special_tokens=False).ids


def test_every_option_reaches_the_engine(
    server: Server, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    submit = server.llm.submit

    def record(prompt: Any, params: Any) -> Any:
        asked.append(params)
        return submit(prompt, params)

    monkeypatch.setattr(server.llm, "submit", record)
    own = {
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 1,
        "repetition_penalty": 1.1,
        "bad_words": ["cat"],
        "allowed_token_ids": [1, 2, 3],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "cache_salt": "me",
    }
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        max_tokens=1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"2": 3.5},
        seed=9,
        stop="dog",
        logprobs=True,
        extra_body=own,
    )
    assert asked == [
        SamplingParams(
            temperature=0.5,
            top_p=0.9,
            max_tokens=1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={2: 3.5},
            seed=9,
            stop=("dog",),
            logprobs=True,
            **own,
        )
    ]


def test_each_of_n_answers_is_what_its_seed_gives_alone(client: OpenAI) -> None:
    both = ask(client, n=2, seed=2**32 - 1, **WILD)
    alone = [ask(client, seed=seed, **WILD) for seed in (2**32 - 1, 0)]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [c.message for c in both.choices] == [one.choices[0].message for one in alone]
    assert both.choices[0].message != both.choices[1].message
    assert both.usage.prompt_tokens == alone[0].usage.prompt_tokens
    completion = sum(one.usage.completion_tokens for one in alone)
    assert both.usage.completion_tokens == completion
    assert both.usage.total_tokens == both.usage.prompt_tokens + completion


def test_n_streamed_answers_are_those_of_a_whole_response(client: OpenAI) -> None:
    options = WILD | {"n": 2, "seed": 5, "logprobs": True}
    whole = ask(client, **options)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **options))
    last = chunks.pop()
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(m.delta.content or "" for m in mine) == choice.message.content
        assert [m.finish_reason for m in mine][-2:] == [None, choice.finish_reason]
        assert [t for m in mine if m.logprobs for t in m.logprobs.content] == (
            choice.logprobs.content
        )


def test_n_answers_to_several_clients_at_once_do_not_mix(client: OpenAI) -> None:
    def capitals(country: str) -> list[str]:
        question = [{"role": "user", "content": f"What is the capital of {country}?"}]
        return [c.message.content for c in ask(client, question, n=2, extra_body=QUICK).choices]

    with ThreadPoolExecutor(2) as pool:
        norway, kenya = pool.map(capitals, ["Norway", "Kenya"])
    assert all("Oslo" in answer for answer in norway)
    assert all("Nairobi" in answer for answer in kenya)


def test_logit_bias_forces_and_forbids_tokens(server: Server, client: OpenAI) -> None:
    (token,) = ids(server, "!")
    forced = ask(client, logit_bias={str(token): 100}, max_tokens=4, extra_body=QUICK)
    assert forced.choices[0].message.content == "!!!!"
    first = ids(server, "The")[0]
    assert ask(client, extra_body=QUICK).choices[0].message.content.startswith("The")
    without = ask(client, logit_bias={first: -100}, extra_body=QUICK).choices[0].message.content
    assert without
    assert not without.startswith("The")


def test_only_allowed_tokens_are_said(server: Server, client: OpenAI) -> None:
    allowed = QUICK | {"allowed_token_ids": [ids(server, letter)[0] for letter in "xyz"]}
    said = ask(client, max_tokens=10, extra_body=allowed).choices[0].message.content
    assert len(said) == 10
    assert set(said) <= set("xyz")


def test_a_frequency_penalty_spreads_what_is_said(server: Server, client: OpenAI) -> None:
    allowed = QUICK | {"allowed_token_ids": [ids(server, letter)[0] for letter in "xyz"]}
    plain, spread = (
        ask(client, max_tokens=40, frequency_penalty=penalty, extra_body=allowed)
        .choices[0]
        .message.content
        for penalty in (0, 2)
    )
    assert max(map(spread.count, "xyz")) < max(map(plain.count, "xyz"))


def test_bad_words_are_not_said_and_least_tokens_are(client: OpenAI) -> None:
    options = QUICK | {"bad_words": ["Oslo"], "min_tokens": 30}
    completion = ask(client, max_tokens=40, extra_body=options)
    assert "Oslo" not in completion.choices[0].message.content
    assert completion.usage.completion_tokens >= 30


def test_the_likeliest_tokens_are_told(client: OpenAI) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "extra_body": QUICK}
    whole = ask(client, **options).choices[0].logprobs.content
    for place in whole:
        assert len(place.top_logprobs) == 3
        best = place.top_logprobs[0]
        assert (best.token, best.logprob, best.bytes) == (place.token, place.logprob, place.bytes)
        logprobs = [other.logprob for other in place.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
    chunks = ask(client, stream=True, **options)
    parts = [c.choices[0].logprobs for c in chunks]
    assert [token for part in parts if part for token in part.content] == whole


def test_the_second_turn_finds_the_first_in_the_cache(client: OpenAI) -> None:
    background = "Norway is a country in the north of Europe. " * 30
    messages: list[Any] = [{"role": "user", "content": background + CAPITAL[0]["content"]}]
    salted = {"extra_body": QUICK | {"cache_salt": "a conversation of its own"}}
    first = ask(client, messages, max_tokens=20, **salted)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Thanks!"}]
    second = ask(client, messages, max_tokens=1, **salted)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 64 <= cached < second.usage.prompt_tokens
    other = ask(client, messages, max_tokens=1, extra_body=QUICK | {"cache_salt": "another"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0
