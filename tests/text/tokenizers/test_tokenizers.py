"""Tokenizers lose nothing, never make a control token of text, and come back from their files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from gristmill.base.errors import UserError
from gristmill.text.tokenizers.library import BYTE_OF
from gristmill.text.tokenizers.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    open_tokenizer,
    open_tokenizer_files,
)
from gristmill.text.tokenizers.training import train_tokenizer

WORDS = "the mill grinds grain and water turns the wheel while it's raining; don't stop 1234 é ü\n"


def corpus() -> list[str]:
    source = random.Random(0)
    return [" ".join(source.choices(WORDS.split(" "), k=50)) for _ in range(40)]


TRAINED = train_tokenizer(iter(corpus()), vocab_size=310)
BYTES = ByteTokenizer()


def gpt2_files(folder: Path, *, names: tuple[str, str], end: str | None = END_OF_TEXT) -> None:
    """GPT-2's two files, with two merges."""
    tokens = [*BYTE_OF, "he", "Ġhe", *([end] if end else [])]
    (folder / names[0]).write_text(json.dumps({token: id for id, token in enumerate(tokens)}))
    (folder / names[1]).write_text("#version: 0.2\nh e\nĠ he\n")


def saved(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    tokenizer.save(folder)
    value: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return value


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
@settings(deadline=None)
@given(text=st.text())
@example(text="hello <|endoftext|> world<|endoftext|>")
@example(text=" \r\n\t  leading and trailing \u2028 \x00\x1f\ufeff ")
@example(text="".join(map(chr, range(0x250))))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.end_of_text not in ids
    assert all(0 <= id < tokenizer.size for id in ids)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
def test_batches_and_control_tokens(tokenizer: Tokenizer) -> None:
    texts = ["the mill", "", "a<|endoftext|>b", "grain" * 99]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.token_bytes(tokenizer.end_of_text) == b""
    ids = [*tokenizer.encode("a"), tokenizer.end_of_text]
    assert tokenizer.decode(ids) == "a" + END_OF_TEXT
    with pytest.raises(AssertionError):
        tokenizer.token_bytes(tokenizer.size)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
def test_saved_and_opened_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "deep" / "folder")
    again = open_tokenizer(tmp_path / "deep" / "folder")
    assert again.spec == tokenizer.spec
    assert again.encode(WORDS) == tokenizer.encode(WORDS)


def test_byte_ids_are_bytes() -> None:
    assert (BYTES.size, BYTES.end_of_text) == (257, 256)
    assert open_tokenizer("bytes").encode("aé") == [97, 0xC3, 0xA9]


def test_the_byte_table_is_the_field_s_own() -> None:
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert BYTE_OF["Ġ"] == ord(" ") and BYTE_OF["Ċ"] == ord("\n")


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2_files(tmp_path: Path, names: tuple[str, str]) -> None:
    gpt2_files(tmp_path, names=names)
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("he he<|endoftext|>")[:2] == [256, 257]
    assert (tokenizer.size, tokenizer.end_of_text) == (259, 258)
    assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext|>")
    tokenizer.save(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved" / "tokenizer.json").spec == tokenizer.spec


def test_other_end_tokens_are_found_or_named(tmp_path: Path) -> None:
    gpt2_files(tmp_path, names=("vocab.json", "merges.txt"), end="<|stop|>")
    with pytest.raises(UserError, match="no end-of-text token"):
        open_tokenizer(tmp_path)
    tokenizer = open_tokenizer(tmp_path, end_of_text="<|stop|>")
    tokenizer.save(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved").spec == tokenizer.spec
    (tmp_path / "saved" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"special tokens are: <\|stop\|>"):
        open_tokenizer(tmp_path / "saved")


def test_saved_settings_are_those_of_transformers(tmp_path: Path) -> None:
    saved(TRAINED, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {settings[f"{name}_token"] for name in ("bos", "eos", "unk")} == {END_OF_TEXT}
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.encode(WORDS).ids == TRAINED.encode(WORDS)


def test_settings_of_its_last_use_are_put_aside(tmp_path: Path) -> None:
    TRAINED.save(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    inner.model.dropout = 0.9
    inner.save(str(tmp_path / "tokenizer.json"))
    again = open_tokenizer(tmp_path)
    assert again.encode_batch([WORDS]) == [TRAINED.encode(WORDS)]
    assert again.fingerprint == TRAINED.fingerprint


def test_the_fingerprint_covers_what_decides_ids(tmp_path: Path) -> None:
    value = saved(TRAINED, tmp_path)
    path = tmp_path / "tokenizer.json"

    def fingerprint(**changes: Any) -> str:
        path.write_text(json.dumps(value | changes))
        return open_tokenizer(path).fingerprint

    same = value["pre_tokenizer"] | {"trim_offsets": not value["pre_tokenizer"]["trim_offsets"]}
    assert fingerprint(pre_tokenizer=same) == TRAINED.fingerprint
    spaced = value["pre_tokenizer"] | {"add_prefix_space": True}
    fewer = value["model"] | {"merges": value["model"]["merges"][:-1]}
    changed = [
        fingerprint(pre_tokenizer=spaced),
        fingerprint(model=fewer),
        fingerprint(normalizer={"type": "NFC"}),
    ]
    assert len({TRAINED.fingerprint, *changed}) == 4


def test_an_end_token_not_marked_as_special_still_cannot_come_from_text(tmp_path: Path) -> None:
    value = saved(TRAINED, tmp_path)
    value["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.spec == TRAINED.spec


def test_a_tokenizer_that_changes_text_says_so(tmp_path: Path) -> None:
    value = saved(TRAINED, tmp_path)
    path = tmp_path / "tokenizer.json"

    def opened(**changes: Any) -> Tokenizer:
        path.write_text(json.dumps(value | changes))
        return open_tokenizer(path)

    spaced = value["pre_tokenizer"] | {"add_prefix_space": True}
    removed = {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [removed, value["pre_tokenizer"]]}
    isolated = {**steps, "pretokenizers": [removed | {"behavior": "Isolated"}, spaced]}
    vocab = dict(value["model"]["vocab"])
    vocab["?!?"] = vocab.pop("Z")
    mask = dict(value["added_tokens"][0], id=310, content="<mask>", special=False, lstrip=True)
    lossy = {
        "é": {"normalizer": {"type": "NFD"}},
        "mill": {"pre_tokenizer": spaced},
        "a b": {"pre_tokenizer": steps},
        "aZ": {"model": value["model"] | {"vocab": vocab}},
        "a <mask>": {"added_tokens": [*value["added_tokens"], mask]},
    }
    assert opened().lossless and TRAINED.lossless and BYTES.lossless
    for text, changes in lossy.items():
        tokenizer = opened(**changes)
        assert not tokenizer.lossless, text
        assert tokenizer.decode(tokenizer.encode(text)) != text
    assert not opened(pre_tokenizer=isolated).lossless
    isolated["pretokenizers"][1] = value["pre_tokenizer"]
    assert opened(pre_tokenizer=isolated).lossless


def test_the_definition_is_a_tokenizer_json() -> None:
    assert BYTES.definition is None
    assert TRAINED.definition is not None
    plain = tokenizers.Tokenizer.from_str(TRAINED.definition)
    assert plain.encode(WORDS).ids == TRAINED.encode(WORDS)


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        open_tokenizer(tmp_path / "nothing")
    with pytest.raises(
        UserError, match=r"looked for tokenizer\.json, vocab\.json with merges\.txt"
    ):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "gristmill_tokenizer.json").write_text('{"type": "runes"}')
    with pytest.raises(UserError, match="does not know the tokenizer"):
        open_tokenizer(tmp_path)
    gpt2_files(tmp_path, names=("vocab.json", "merges.txt"))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nx unknown\n")
    for name in ("tokenizer.json", "gristmill_tokenizer.json"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="do not make a tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no such tokenizer"):
        open_tokenizer("tiktoken:q50k_base")


@pytest.mark.parametrize("names", [("v.json", "m.txt"), ("a vocabulary", "some merges")])
def test_two_files_of_any_name(tmp_path: Path, names: tuple[str, str]) -> None:
    gpt2_files(tmp_path, names=names)
    vocab, merges = (tmp_path / name for name in names)
    tokenizer = open_tokenizer_files(vocab, merges)
    assert tokenizer.encode("he he") == [256, 257]
    assert open_tokenizer(vocab, merges=str(merges)).spec == tokenizer.spec
    with pytest.raises(UserError, match=r"the merges as data\.merges"):
        open_tokenizer(vocab)
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    assert open_tokenizer_files(vocab, merges).spec == tokenizer.spec
    with pytest.raises(UserError, match="not valid JSON"):
        open_tokenizer_files(merges, vocab)
    vocab.write_text('["a"]')
    with pytest.raises(UserError, match="not a vocabulary"):
        open_tokenizer_files(vocab, merges)
    vocab.write_text(json.dumps({"h": 0, "e": 1, "he": 2, "Ġ": 3, "Ġhe": 4, END_OF_TEXT: 5}))
    with pytest.raises(UserError, match="lacks 253 of the 256 bytes"):
        open_tokenizer_files(vocab, merges)


def test_a_folder_without_a_tokenizer_does_not_hide_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def folder_of(name: str) -> Path:
        asked.append(name)
        return tmp_path / "fetched"

    monkeypatch.setattr("gristmill.text.tokenizers.vocabularies.tokenizer_folder", folder_of)
    TRAINED.save(tmp_path / "fetched")
    (tmp_path / "runs").mkdir()
    assert open_tokenizer("someone/runs").spec == TRAINED.spec
    with pytest.raises(UserError, match="this folder holds no tokenizer"):
        open_tokenizer("runs")
    assert asked == ["someone/runs"]
    TRAINED.save(tmp_path / "someone" / "runs")
    assert open_tokenizer("someone/runs").spec == TRAINED.spec
    assert asked == ["someone/runs"]
