import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer
from tokenizers.models import BPE

from jaxinfer.engine import grammar
from jaxinfer.engine.grammar import Constraint, GrammarError, Grammars
from jaxinfer.engine.request import RequestError, StructuredOutput
from tests.engine.grammar_model import (
    EOS,
    EVERYTHING,
    GRAMMARS,
    IDS,
    ORDINARY,
    SPECIAL,
    THINK_END,
    TOKENIZER,
    VOCABULARY,
    answer,
    encode,
    ids,
    plan,
    text_of,
)

SPELLING = {piece: token for token, piece in enumerate(ORDINARY)}

texts = st.text('ab{}é🙂 \n"\\', min_size=1, max_size=6) | st.text(max_size=6)


def compile_choice(*choice: str, after: str | None = None) -> Constraint:
    return GRAMMARS.compile(StructuredOutput(choice=choice, after=after))


@settings(max_examples=150, deadline=None)
@given(choice=st.lists(texts, min_size=1, max_size=4), data=st.data())
def test_masks_allow_exactly_what_leads_to_one_of_the_choices(
    choice: list[str], data: st.DataObject
) -> None:
    constraint = compile_choice(*choice)
    left = [text.encode() for text in choice]
    while True:
        allowed = ids(plan(constraint, [], 1)[1][0])
        ends = b"" in left
        beginnings = {text[:size] for text in left for size in range(1, len(text) + 1)}
        fitting = [SPELLING[piece] for piece in beginnings if piece in SPELLING]
        if allowed != sorted([*fitting, *(EOS if ends else ())]):
            # A forced token, of what all of them have in common.
            assert len(allowed) == 1
            assert not ends
            assert all(text.startswith(ORDINARY[allowed[0]]) for text in left)
        token = data.draw(st.sampled_from(allowed))
        constraint.advance([token])
        if constraint.ended:
            break
        size = len(ORDINARY[token])
        left = [text[size:] for text in left if text.startswith(ORDINARY[token])]


def test_every_choice_can_be_chosen() -> None:
    choice = ("yes", "yesterday", "no", "", ".*", "a|b", "</think>")
    assert {text_of(answer(compile_choice(*choice), seed)) for seed in range(60)} == {*choice}


@pytest.mark.parametrize(
    "regex",
    [
        "[a-z]+(-[0-9]{2,3})?",
        "(?:caf|th)é|🙂+",
        r"\d{4}/\d{2}",
        r"^a/b\.c\n$",
        r"[^\x00-\x7f]{3}",
        "",
    ],
)
def test_the_whole_text_matches_the_regex(regex: str) -> None:
    for seed in range(20):
        text = text_of(answer(GRAMMARS.compile(StructuredOutput(regex=regex)), seed))
        assert re.fullmatch(regex, text)


def test_a_lark_grammar_can_recur_and_name_special_tokens() -> None:
    lark = """
        start: <tool_call> sum </tool_call>
        sum: /[0-9]/ | "(" sum "+" sum ")"
    """
    deepest = 0
    for seed in range(20):
        tokens = answer(GRAMMARS.compile(StructuredOutput(lark=lark)), seed)
        assert tokens[-1] in EOS
        inner = TOKENIZER.decode(tokens[1:-2])
        assert TOKENIZER.decode(tokens[:-1], skip_special_tokens=False) == (
            f"<tool_call>{inner}</tool_call>"
        )
        assert SPECIAL.isdisjoint(tokens[1:-2])
        assert eval(inner) >= 0
        deepest = max(deepest, inner.count("("))
    assert deepest > 1


def test_a_constraint_begins_right_behind_its_token_even_inside_a_draft() -> None:
    constraint = compile_choice("hello there", after="</think>")
    thoughts, said = encode("hmm, hello"), encode("hello there")
    likely = [*thoughts, THINK_END, *said]
    verified, masks = plan(constraint, [*likely, EOS[1], 7], rows=50)
    assert verified == likely
    for mask in masks[: len(thoughts) + 1]:
        assert ids(mask) == EVERYTHING
    assert [ids(mask) for mask in masks[len(thoughts) + 1 :]] == [*([t] for t in said), [*EOS]]
    constraint.advance(likely)
    assert not constraint.ended
    constraint.advance(EOS[1:])
    assert constraint.ended


def test_an_answer_may_end_before_its_constraint_begins() -> None:
    constraint = compile_choice("hello", after="</think>")
    constraint.advance([*encode("hmm"), EOS[0]])
    assert constraint.ended


def test_drafts_are_kept_up_to_the_first_that_is_not_allowed() -> None:
    constraint = GRAMMARS.compile(StructuredOutput(regex="[a-z]+"))
    good = encode("one")
    verified, masks = plan(constraint, [*good, *encode("1"), *good], rows=10)
    assert verified == good
    assert len(masks) == 1 + len(good)
    assert plan(constraint, [*good, *good], rows=2)[0] == good[:1]


def test_control_tokens_are_no_part_of_a_text() -> None:
    constraint = GRAMMARS.compile(StructuredOutput(regex="(?s:.*)"))
    verified, masks = plan(constraint, [*encode("a"), THINK_END], rows=10)
    assert verified == encode("a")
    for mask in masks:
        assert SPECIAL & {*ids(mask)} == {*EOS}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["1"], "not allowed"),
        (["a", EOS[0]], "before the text is complete"),
        (["a", "b", "b"], "not allowed"),
        (["a", "b", EOS[0], EOS[0]], "after the end"),
    ],
)
def test_a_token_that_is_not_allowed_is_an_error(tokens: list, message: str) -> None:
    constraint = GRAMMARS.compile(StructuredOutput(regex="a[bc]"))
    *good, last = [IDS[t] if isinstance(t, str) else t for t in tokens]
    constraint.advance(good)
    with pytest.raises(GrammarError, match=message):
        constraint.advance([last])


def test_a_forced_token_cannot_be_spelt_otherwise() -> None:
    constraint = compile_choice("return")
    assert plan(constraint, [], 5)[0] == encode("return")
    with pytest.raises(GrammarError, match="must"):
        constraint.advance(encode("r"))


def test_a_dead_end_is_an_error_only_for_an_answer_that_comes_to_it() -> None:
    lark = 'start: "b" | "a" dead\ndead: dead "c"'
    (a,), (b,) = encode("a"), encode("b")
    constraint = GRAMMARS.compile(StructuredOutput(lark=lark))
    plan(constraint, [a, a], 5)
    constraint.advance([b, EOS[0]])
    constraint = GRAMMARS.compile(StructuredOutput(lark=lark))
    constraint.advance([a])
    with pytest.raises(GrammarError, match="nothing that conforms"):
        plan(constraint, [], 1)


def test_no_answer_suffers_from_what_others_cost_the_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr(grammar, "LIMITS", limits)
    grammars = Grammars(TOKENIZER, VOCABULARY, EOS)
    spec = StructuredOutput(regex="b|a(.*x.{20}y.*){3}")
    draw = random.Random(0)
    costly = [*encode("a"), *(encode(draw.choice("xy"))[0] for _ in range(60))]
    first, second = grammars.compile(spec), grammars.compile(spec)
    verified, masks = plan(first, costly, 100)
    assert verified == costly
    for token, mask in zip(costly, masks[1:], strict=True):
        first.advance([token])
        alone = plan(first, [], 1)[1][0]
        assert len(ids(alone)) > 1000
        assert ids(alone) == ids(mask)
    for late in (second, grammars.compile(spec)):
        late.advance([*encode("b"), EOS[0]])
        assert late.ended


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": "{"}, "json_schema: EOF"),
        ({"json_schema": "[]"}, "json_schema: Expecting object"),
        ({"json_schema": {"type": "strin"}}, "json_schema: Invalid type: strin"),
        ({"json_schema": {"uniqueItems": True}}, "json_schema: Unimplemented.*uniqueItems"),
        (
            {"json_schema": {"uniqueItems": True, "x-guidance": {"lenient": True}}},
            "json_schema: Unimplemented.*uniqueItems",
        ),
        ({"json_schema": {"format": "colour"}}, "json_schema: Unknown format: colour"),
        ({"json_schema": {"pattern": "("}}, "json_schema: regex parse error"),
        ({"json_schema": {"pattern": "(?=a)b"}}, "json_schema: .*look-around"),
        ({"json_schema": {"enum": []}}, "json_schema: Unsatisfiable"),
        ({"json_schema": {"minimum": 2, "maximum": 1, "type": "integer"}}, "minimum"),
        ({"json_schema": {"$ref": "#/$defs/a"}}, "json_schema: Pointer '/\\$defs/a'"),
        (
            {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
            "json_schema: nothing that conforms",
        ),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": r"[^\x00-\U0010ffff]"}, "regex: nothing that conforms"),
        ({"regex": "\ud800"}, "regex: .*surrogates"),
        ({"lark": "start: other"}, 'lark: .*unknown name: "other"'),
        ({"lark": "start: start"}, "lark: nothing that conforms"),
        ({"lark": "start: <nothing>"}, "lark: .*unknown special token"),
        ({"choice": ("\ud800",)}, "choice: .*Unicode"),
        ({"choice": ("a",), "after": "<thought>"}, "after '<thought>'"),
        ({"choice": ("a",), "after": "the"}, "after 'the'"),
        ({"choice": ("a",), "after": "<|im_end|>"}, "does not end the answer"),
    ],
)
def test_what_cannot_be_held_is_refused_at_the_door(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){message}"):
        GRAMMARS.compile(StructuredOutput(**asked))


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the vocabulary of 4000"):
        Grammars(TOKENIZER, 4000, EOS)
    with pytest.raises(ValueError, match="end token"):
        Grammars(TOKENIZER, VOCABULARY, ())
    with pytest.raises(ValueError, match="byte-level"):
        Grammars(Tokenizer(BPE({"a word": 0}, [])), VOCABULARY, (0,))
