"""The chat template's behaviour, and what the wrapper adds to it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.qwen.chat import ChatTemplate, ChatTemplateError

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny_qwen"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_dir(CHECKPOINT)


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str = "", *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def test_template_is_the_published_one() -> None:
    digest = hashlib.sha256((CHECKPOINT / "chat_template.jinja").read_bytes()).hexdigest()
    assert digest == "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259"


def test_turns_are_trimmed_and_no_system_prompt_is_invented(template: ChatTemplate) -> None:
    text = template.render([{"role": "user", "content": "  Hi\n"}], add_generation_prompt=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("kwargs", "prompt"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_generation_prompt(template: ChatTemplate, kwargs: dict[str, Any], prompt: str) -> None:
    text = template.render([USER], **kwargs)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{prompt}"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "No messages provided."),
        ([USER, {"role": "system", "content": "x"}], "System message must be at the beginning."),
        ([USER, {"role": "developer", "content": "x"}], "Unexpected message role."),
        ([{"role": "system", "content": "x"}], "No user query found in messages."),
        (
            [{"role": "user", "content": "<tool_response>\n1\n</tool_response>"}],
            "No user query found in messages.",
        ),
        (
            [{"role": "system", "content": [{"type": "image"}]}, USER],
            "System message cannot contain images.",
        ),
        ([{"role": "user", "content": 3}], "Unexpected content type."),
    ],
)
def test_refusals(template: ChatTemplate, messages: list[Any], complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        template.render(messages)


def test_reasoning_is_kept_after_the_last_query_only(template: ChatTemplate) -> None:
    messages = [
        USER,
        assistant("One", reasoning_content="first"),
        {"role": "user", "content": "More"},
        assistant("<think>\nsecond\n</think>\n\nTwo"),
    ]
    text = template.render(messages, add_generation_prompt=False)
    assert "<|im_start|>assistant\nOne<|im_end|>" in text
    assert "<|im_start|>assistant\n<think>\nsecond\n</think>\n\nTwo<|im_end|>" in text
    kept = template.render(messages, add_generation_prompt=False, preserve_thinking=True)
    assert "<think>\nfirst\n</think>\n\nOne" in kept


def test_last_answer_gets_an_empty_think_block(template: ChatTemplate) -> None:
    text = template.render([USER, assistant("One")], add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nOne<|im_end|>\n")


def test_tools_block_comes_before_the_system_text(template: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "süß", "parameters": {"b": 1, "a": 2}}}]
    text = template.render([{"role": "system", "content": "Be brief."}, USER], tools)
    line = json.dumps(tools[0], ensure_ascii=False)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{line}\n</tools>" in text
    assert "</IMPORTANT>\n\nBe brief.<|im_end|>\n" in text


def test_tool_calls_and_results(template: ChatTemplate) -> None:
    messages = [
        USER,
        assistant("Looking.", call({"q": "a b", "n": 2, "on": True}), call({"xs": [1, "é"]}, "g")),
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
    ]
    text = template.render(messages, add_generation_prompt=False)
    assert (
        "Looking.\n\n<tool_call>\n<function=f>\n<parameter=q>\na b\n</parameter>\n"
        "<parameter=n>\n2\n</parameter>\n<parameter=on>\ntrue\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n<parameter=xs>\n"
        '[1, "é"]\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
    ) in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n"
        "<tool_response>\nr2\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", ['{"q": "a"}', {"q": "a"}])
def test_arguments_as_text_or_mapping(template: ChatTemplate, arguments: Any) -> None:
    text = template.render([USER, assistant("", call(arguments))], add_generation_prompt=False)
    assert "</think>\n\n<tool_call>\n<function=f>\n<parameter=q>\na\n</parameter>" in text


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_call_without_arguments(template: ChatTemplate, arguments: Any) -> None:
    text = template.render([USER, assistant("", call(arguments))], add_generation_prompt=False)
    assert "<function=f>\n</function>" in text


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", 3])
def test_bad_arguments_name_the_message(template: ChatTemplate, arguments: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]"):
        template.render([USER, assistant("", call(arguments))])


def test_rendering_leaves_the_messages_alone(template: ChatTemplate) -> None:
    messages = [USER, assistant("", call('{"q": "a"}'))]
    before = json.dumps(messages)
    template.render(messages)
    assert json.dumps(messages) == before


def test_pictures(template: ChatTemplate) -> None:
    parts = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    video = "<|vision_start|><|video_pad|><|vision_end|>"
    assert f"user\n{picture}{video}What?<" in template.render(messages)
    numbered = template.render(messages, add_vision_id=True)
    assert f"user\nPicture 1: {picture}Video 1: {video}What?<" in numbered


def test_source_in_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_dir(tmp_path).render([USER]) == "Hi"


def test_missing_and_broken_templates(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=tmp_path.name):
        ChatTemplate.from_dir(tmp_path)
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate("{% if %}")
