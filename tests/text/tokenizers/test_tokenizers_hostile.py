"""Tokenizer files that would take all memory, end the process, or panic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gristmill.base.errors import DataError
from gristmill.text.tokenizers import tokenizer_json
from gristmill.text.tokenizers.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def definition() -> str:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the mill grinds corn"] * 3, trainer)
    return str(inner.to_str())


def _put(name: str, part: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value.update({name: part})


def _replacing(pattern: dict[str, str], content: str, times: int) -> dict[str, Any]:
    rule = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [rule] * times, "decoders": [rule] * times}


def _before(ids: list[int]) -> dict[str, Any]:
    pair = [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"]
    token = {"id": "<q>", "ids": ids, "tokens": ["<q>"] * len(ids)}
    single = [{"SpecialToken": {"id": "<q>", "type_id": 0}}, pair[0]]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {"<q>": token},
    }


HOSTILE = {
    "a large id": lambda value: value["model"]["vocab"].update(zz=2**28),
    "growing text": _put("normalizer", _replacing({"Regex": "."}, "a" * 10, 9)),
    "growing decoded text": _put("decoder", _replacing({"String": "a"}, "a" * 999, 4)),
    "a table without end": _put(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    ),
    "a charsmap that is none": _put(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a long beginning": _put("post_processor", _before([0] * 1000)),
    "a beginning outside of the vocabulary": _put("post_processor", _before([99_999])),
    "no unknown": _put(
        "model",
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"<|endoftext|>": 0},
        },
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_made_to_harm_is_refused(tmp_path: Path, definition: str, name: str) -> None:
    value = json.loads(definition)
    HOSTILE[name](value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(DataError) as caught:
        open_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_letters_that_are_escaped_hide_nothing(tmp_path: Path, definition: str) -> None:
    value = json.loads(definition)
    HOSTILE["growing text"](value)
    text = json.dumps(value).replace("Replace", "\\u0052eplace")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="times as long"):
        open_tokenizer(tmp_path)


def test_a_pattern_that_does_not_end_is_an_error(tmp_path: Path, definition: str) -> None:
    value = json.loads(definition)
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    rules = [{**split, "invert": False}, value["pre_tokenizer"]]
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": rules}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = open_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"it fails on a text: .*retry-limit"):
        tokenizer.encode("a" * 60 + "!")


def test_a_file_of_any_size_is_refused(
    tmp_path: Path, definition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_json, "LARGEST", len(definition) - 1)
    (tmp_path / "tokenizer.json").write_text(definition)
    with pytest.raises(DataError, match=r"larger than any tokenizer\.json"):
        open_tokenizer(tmp_path)


def test_ordinary_rules_are_accepted(tmp_path: Path, definition: str) -> None:
    """Llama 2 replaces spaces and puts one before the text."""
    value = json.loads(definition)
    rules = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    value["normalizer"] = {"type": "Sequence", "normalizers": rules}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    assert open_tokenizer(tmp_path).encode("the mill")
