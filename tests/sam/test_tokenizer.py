"""Phrases to ids, against CLIP's own tokeniser, and what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.sam.tokenizer import VOCABULARY, PromptError, Tokenizer, clean, from_merges

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "goldens" / "sam_tokenizer.json").read_text(encoding="utf-8")
)
START, END = GOLDEN["start"], GOLDEN["end"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(from_merges(GOLDEN["merges"]), context=80)


@pytest.mark.parametrize("phrase", GOLDEN["phrases"])
def test_ids_are_those_of_clip(tokenizer: Tokenizer, phrase: str) -> None:
    ids, mask = tokenizer.encode([phrase])
    inner = GOLDEN["phrases"][phrase]
    expected = np.zeros(80, np.int32)
    expected[: len(inner) + 2] = [START, *inner, END]
    assert np.array_equal(ids[0], expected)
    # By id, not by length: id 0 also stands for a "!" within a piece.
    assert np.array_equal(mask[0], expected != 0)
    assert ids.dtype == np.int32


def test_both_files_read_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = "\n".join(["header", *GOLDEN["merges"]])
    (tmp_path / VOCABULARY).write_bytes(gzip.compress(lines.encode()))
    phrases = list(GOLDEN["phrases"])
    from_vocabulary = Tokenizer.read(tmp_path, 80).encode(phrases)[0]
    from_merges(GOLDEN["merges"]).save(str(tmp_path / "tokenizer.json"))
    from_json = Tokenizer.read(tmp_path, 80).encode(phrases)[0]
    assert np.array_equal(from_vocabulary, from_json)
    assert np.array_equal(from_json, tokenizer.encode(phrases)[0])


@pytest.mark.parametrize(
    "typed",
    [
        "cat<end_of_text>",
        "<|startoftext|>cat",
        "CAT<|EndOfText|>",
        "<end_<end_of_text>of_text>cat",
        "&lt;end_of_text&gt; cat",
    ],
)
def test_special_tokens_cannot_be_typed(tokenizer: Tokenizer, typed: str) -> None:
    assert np.array_equal(tokenizer.encode([typed])[0], tokenizer.encode(["cat"])[0])
    assert clean(typed) == "cat"


@pytest.mark.parametrize("empty", ["", " \t\n", "<end_of_text>", "&nbsp;"])
def test_an_empty_prompt_is_refused(tokenizer: Tokenizer, empty: str) -> None:
    with pytest.raises(PromptError, match="is empty"):
        tokenizer.encode(["cat", empty])


def test_a_long_prompt_is_refused_and_the_longest_is_not() -> None:
    short = Tokenizer(from_merges(GOLDEN["merges"]), context=8)
    assert short.encode(["1 2 3 4 5 6"])[1].all()
    with pytest.raises(PromptError, match=r"has 7 tokens, and the model reads 6"):
        short.encode(["1 2 3 4 5 6 7"])


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.read(tmp_path)
