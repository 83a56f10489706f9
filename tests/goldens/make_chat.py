"""Make `chat.json`: conversations as transformers renders them with the published chat template.

Run with transformers 5.17; see README.md for the contents and the command.
The renderer is `transformers.utils.chat_template_utils.render_jinja_template`, the one that
`apply_chat_template` calls.
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
TEMPLATE = HERE.parents[1] / "checkpoints" / "tiny_qwen" / "chat_template.jinja"

Message = dict[str, Any]


def system(content: Any) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: Any) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content, **more}


def tool(content: Any) -> Message:
    """A tool's result."""
    return {"role": "tool", "content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call with decoded arguments."""
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": 'Height of the tide, "now" if <day> is left out — in metres & tenths.',
            "parameters": {
                "type": "object",
                "properties": {
                    "harbour": {"type": "string"},
                    "day": {"type": "integer", "minimum": 1},
                },
                "required": ["harbour"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "bell", "parameters": {"type": "object", "properties": {}}},
    },
]
HELLO = [user("How high is the bridge?")]
TURNS = [
    system("You answer in one line."),
    user("Name a bird."),
    assistant("A heron.", reasoning_content="Any bird will do.\n"),
    user("And a fish?"),
    assistant("<think>\nRiver fish, say.\n</think>\n\nA perch."),
    user("  Thanks!\n"),
]
TOOL_TURNS = [
    user("When can I sail from Vlieland?"),
    assistant(
        "I will look.",
        reasoning_content="Two days to compare.",
        tool_calls=[
            call("tide", harbour="Vlieland", day=3),
            call("tide", harbour="Vlieland", day=4),
        ],
    ),
    tool("1.4"),
    tool("2.1"),
    assistant("", reasoning_content="Ring the bell.", tool_calls=[call("bell")]),
    tool("ding"),
]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TYPED = call(
    "mixed",
    text='a <b> & "c"\nsecond line',
    whole=7,
    real=0.5,
    yes=True,
    nothing=None,
    many=[1, "två", {"k": False}],
    nested={"z": 1, "a": [None]},
    empty="",
)

CASES: list[tuple[str, list[Message], dict[str, Any]]] = [
    ("thinking_on", HELLO, {"add_generation_prompt": True}),
    ("thinking_off", HELLO, {"add_generation_prompt": True, "enable_thinking": False}),
    ("thinking_explicit", HELLO, {"add_generation_prompt": True, "enable_thinking": True}),
    ("no_generation_prompt", HELLO, {}),
    ("multi_turn", TURNS, {"add_generation_prompt": True}),
    ("multi_turn_preserved", TURNS, {"add_generation_prompt": True, "preserve_thinking": True}),
    ("last_is_assistant", TURNS[:5], {}),
    ("empty_system", [system(""), *HELLO], {"add_generation_prompt": True}),
    ("tools", HELLO, {"tools": TOOLS, "add_generation_prompt": True}),
    (
        "tools_and_system",
        TURNS,
        {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": False},
    ),
    ("no_tools_listed", HELLO, {"tools": [], "add_generation_prompt": True}),
    ("tool_results", TOOL_TURNS, {"tools": TOOLS, "add_generation_prompt": True}),
    (
        "tool_results_then_query",
        [*TOOL_TURNS, assistant("On the fourth."), user("Good.")],
        {"tools": TOOLS, "add_generation_prompt": True},
    ),
    (
        "tool_results_preserved",
        [*TOOL_TURNS, assistant("On the fourth."), user("Good.")],
        {"tools": TOOLS, "add_generation_prompt": True, "preserve_thinking": True},
    ),
    (
        "typed_arguments",
        [user("Go."), assistant(None, tool_calls=[TYPED]), tool("done")],
        {"add_generation_prompt": True},
    ),
    ("call_without_arguments", [user("Go."), assistant("", tool_calls=[{"name": "bell"}])], {}),
    (
        "tool_response_as_user",
        [
            user("Go."),
            assistant("", tool_calls=[call("bell")]),
            user("<tool_response>\nding\n</tool_response>"),
        ],
        {"add_generation_prompt": True},
    ),
    (
        "content_parts",
        [
            system([{"type": "text", "text": "Be brief."}]),
            user([{"type": "text", "text": "One, "}, {"type": "text", "text": "two."}]),
        ],
        {"add_generation_prompt": True},
    ),
    (
        "image",
        [user([PICTURE, {"type": "text", "text": "What is this?"}])],
        {"add_generation_prompt": True},
    ),
    (
        "images_numbered",
        [
            user([{"type": "text", "text": "First "}, PICTURE]),
            assistant("A boat."),
            user([{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Compare."}]),
        ],
        {"add_generation_prompt": True, "add_vision_id": True},
    ),
    ("unicode", [user("Żółw 🐢 — naïve 漢字  ")], {"add_generation_prompt": True}),
    ("error_no_messages", [], {}),
    ("error_late_system", [*HELLO, system("Be brief.")], {}),
    ("error_unknown_role", [{"role": "developer", "content": "Be brief."}, *HELLO], {}),
    ("error_system_image", [system([PICTURE]), *HELLO], {}),
    ("error_system_video", [system([{"type": "video"}]), *HELLO], {}),
    ("error_item_type", [user([{"type": "audio", "audio": "AAAA"}])], {}),
    ("error_content_type", [user(7)], {}),
    ("error_no_query", [system("Be brief."), assistant("Hello.")], {}),
    ("error_only_tool_response", [user("<tool_response>\nding\n</tool_response>")], {}),
    (
        "error_arguments_string",
        [
            user("Go."),
            assistant("", tool_calls=[{"function": {"name": "bell", "arguments": '{"times": 2}'}}]),
        ],
        {},
    ),
]


def rendered(template: str, messages: list[Message], options: dict[str, Any]) -> dict[str, str]:
    """The text, or the kind and the message of the error."""
    try:
        return {
            "rendered": render_jinja_template([messages], chat_template=template, **options)[0][0]
        }
    except Exception as error:  # whatever it raises is the golden
        return {"error": str(error), "error_type": type(error).__name__}


def main() -> None:
    """Write everything and print what was written."""
    template = TEMPLATE.read_text(encoding="utf-8")
    cases = [
        {
            "name": name,
            "messages": messages,
            "options": options,
            **rendered(template, messages, options),
        }
        for name, messages, options in CASES
    ]
    for case in cases:
        assert case["name"].startswith("error_") == ("error" in case), case
        print(f"{case['name']:28} {case.get('error') or len(case['rendered'])}")
    text = json.dumps(cases, indent=1, ensure_ascii=False)
    assert json.loads(text) == cases
    (HERE / "chat.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
