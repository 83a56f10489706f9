"""The texts that the tiny checkpoint is taught, and its tokenizer."""

import ast
import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints.tiny_qwen_training import corpus, dataset, dialogues, json_tasks, snippets
from checkpoints.tiny_qwen_training.dialogues import Conversation, conversation
from checkpoints.tiny_qwen_training.tokenizer import (
    CHECKPOINT,
    CONTROL_TOKENS,
    PLAIN_TOKENS,
    VOCAB_SIZE,
)
from jaxinfer.qwen.chat import ChatTemplate

SEEDS = range(1500)
TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
    "object": dict,
}  # fmt: skip


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_dir(CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return [conversation(seed) for seed in SEEDS]


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value meets the part of JSON schema that the dialogues use."""
    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(matches(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        properties = schema["properties"]
        return set(schema["required"]) <= set(value) and all(
            key in properties and matches(item, properties[key]) for key, item in value.items()
        )
    return True


def test_conversations_depend_on_the_seed_alone(conversations: list[Conversation]) -> None:
    assert [conversation(seed) for seed in SEEDS[:50]] == conversations[:50]
    assert len({json.dumps(item.as_json()) for item in conversations}) > 0.95 * len(SEEDS)


def test_conversations_render(conversations: list[Conversation], template: ChatTemplate) -> None:
    for item in conversations:
        text = item.render(template)
        assert text.startswith("<|im_start|>")
        assert text.endswith("<|im_end|>\n")
        assert text.count("<|im_start|>") == text.count("<|im_end|>")


def test_last_turn_continues_the_generation_prompt(
    conversations: list[Conversation], template: ChatTemplate
) -> None:
    for item in conversations:
        prompt = template.render(
            item.messages[:-1], item.tools, enable_thinking=item.enable_thinking
        )
        full = Conversation(item.messages, item.tools, item.enable_thinking).render(template)
        assert full.startswith(prompt)


def test_turns_follow_each_other(conversations: list[Conversation]) -> None:
    allowed = {
        "system": {"user"}, "user": {"assistant"}, "assistant": {"user", "tool"},
        "tool": {"tool", "assistant"},
    }  # fmt: skip
    for item in conversations:
        roles = [message["role"] for message in item.messages]
        assert 1 <= roles.count("user") <= 4
        assert roles[-1] == "assistant"
        assert all(after in allowed[before] for before, after in pairwise(roles))


def test_thoughts_only_when_thinking(conversations: list[Conversation]) -> None:
    for item in conversations:
        thoughts = [m["reasoning_content"] for m in item.messages if m["role"] == "assistant"]
        assert all(bool(thought) == item.enable_thinking for thought in thoughts)


def test_tool_calls_fit_the_offered_schemas(conversations: list[Conversation]) -> None:
    kinds: set[type] = set()
    for item in conversations:
        offered = {tool["function"]["name"]: tool["function"] for tool in item.tools}
        assert len(offered) == len(item.tools)
        for message in item.messages:
            for call in message.get("tool_calls", []):
                arguments = call["function"]["arguments"]
                assert matches(arguments, offered[call["function"]["name"]]["parameters"])
                kinds |= {type(value) for value in arguments.values()}
    assert kinds == {str, int, float, bool, list, dict}


def test_every_call_has_its_reply(conversations: list[Conversation]) -> None:
    for item in conversations:
        calls = sum(len(message.get("tool_calls", [])) for message in item.messages)
        assert calls == sum(message["role"] == "tool" for message in item.messages)


def test_json_answers_are_objects() -> None:
    rng = Random(0)
    for _ in range(500):
        answer = json.loads(json_tasks.json_exchange(rng).answer)
        assert isinstance(answer, dict)
        assert matches(answer, json_tasks.schema_for(answer))


@pytest.mark.parametrize("snippet", snippets.SNIPPETS, ids=lambda snippet: snippet.name)
def test_functions_parse(snippet: snippets.Snippet) -> None:
    body = "\n".join(f"    {line}" for line in snippet.body.split("\n"))
    ast.parse(f"def {snippet.name}({snippet.parameters}):\n{body}")


def test_corpus_split_is_small_and_fixed() -> None:
    paths = [document.path for document in corpus.documents()]
    heldout = [path for path in paths if corpus.is_heldout(path)]
    assert paths == sorted(set(paths))
    assert 0.01 < len(heldout) / len(paths) < 0.06
    assert "socket.py" in heldout
    assert not any(path.startswith(("idlelib/", "encodings/", "site-packages/")) for path in paths)


def test_control_tokens_close_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    vocab = tokenizer.get_vocab()
    ids = [vocab[token] for token in CONTROL_TOKENS]
    assert ids == list(range(VOCAB_SIZE - 33, VOCAB_SIZE))
    added = tokenizer.get_added_tokens_decoder()
    assert {added[i].content for i in ids if not added[i].special} == set(PLAIN_TOKENS)
    assert tokenizer.encode("".join(CONTROL_TOKENS)).ids == ids


def test_config_files_agree_with_the_tokenizer(tokenizer: Tokenizer) -> None:
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    for index, entry in config["added_tokens_decoder"].items():
        assert tokenizer.token_to_id(entry["content"]) == int(index)
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    stops = [tokenizer.id_to_token(index) for index in generation["eos_token_id"]]
    assert stops == ["<|im_end|>", "<|endoftext|>"]
    assert config["eos_token"] == stops[0]


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x\n", "  \t\n\n a", "naïve 東京 🙂 Привет °", "12345 don't", ""]
)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(st.text(alphabet=st.characters(codec="utf-8", max_codepoint=0x2FF)))
def test_tokenizer_round_trips_latin_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_text_is_composed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_dataset_is_the_same_for_any_number_of_workers(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    one = dataset.build(tmp_path, ["chat"], seed=3, chat_tokens=1000, workers=1)
    two = dataset.build(tmp_path, ["chat"], seed=3, chat_tokens=1000, workers=2)
    end = tokenizer.token_to_id("<|endoftext|>")
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
        np.testing.assert_array_equal(array, np.load(tmp_path / f"{name}.npy"))
        assert array.dtype == np.uint16
        assert array[-1] == end
        assert array.max() < VOCAB_SIZE
    text = tokenizer.decode(one["chat_train"][:400].tolist(), skip_special_tokens=False)
    expected = conversation(dialogues.FIRST_TRAINING_SEED + 3 * dataset.SEEDS_PER_RUN)
    assert text.startswith(expected.render(ChatTemplate.from_dir(CHECKPOINT))[:200])


def test_kept_conversations_are_held_out() -> None:
    lines = (CHECKPOINT / "heldout" / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        json.loads(json.dumps(conversation(seed).as_json())) for seed in range(len(lines))
    ]
    assert len(lines) in dialogues.HELDOUT_SEEDS
