"""Tokenizers of T5's, BERT's and Llama's kind: usable, honest about what they lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from gristmill.base.errors import UserError
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz.,"


def t5() -> tokenizers.Tokenizer:
    """A Unigram that begins every word with a mark, and would end a text by itself."""
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0)]
    letters = [(letter, -8.0) for letter in "<>/" + LETTERS]
    inner = tokenizers.Tokenizer(models.Unigram([*words, *letters], unk_id=2))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    inner.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return inner


def bert() -> tokenizers.Tokenizer:
    """A WordPiece in lower case, with the marks of BERT."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = [*marks, *LETTERS, "[", "]", *(f"##{letter}" for letter in LETTERS), "the", "##ing"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(marks)
    return inner


def llama() -> tokenizers.Tokenizer:
    """A BPE of characters that falls back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    pieces += ["▁t", "he", "▁the"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(steps)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


KINDS = {"unigram": t5, "wordpiece": bert, "bpe": llama}


def opened(folder: Path, kind: str, *, end: str | None = None) -> Tokenizer:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    return open_tokenizer(folder, end_of_text=end or {"wordpiece": "[SEP]"}.get(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_opened_saved_and_opened_again(kind: str, tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, kind)
    assert (tokenizer.lossless, tokenizer.definition) == (False, None)
    assert tokenizer.spec["type"] == kind
    assert tokenizer.decode(tokenizer.encode("the bathe")) == "the bathe"
    tokenizer.save(tmp_path / "saved")
    again = open_tokenizer(tmp_path / "saved")
    assert again.spec == tokenizer.spec
    assert again.encode("the bathe.") == tokenizer.encode("the bathe.")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.text(st.sampled_from("the </s>[SEP]<unk>é ▁\n")))
def test_no_text_becomes_a_control_token(
    tmp_path_factory: pytest.TempPathFactory, kind: str, text: str
) -> None:
    tokenizer = opened(tmp_path_factory.mktemp(kind), kind)
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.encode_batch([text, "the"]) == [ids, tokenizer.encode("the")]


def test_nothing_is_added_and_words_that_look_like_marks_stay_words(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, "unigram")
    assert tokenizer.end_of_text == 1
    assert tokenizer.encode("the") == [4]
    back = tokenizer.decode(tokenizer.encode("a </s> b"))
    assert back == "a </s> b"


def test_a_control_token_of_one_character_is_left_out(tmp_path: Path) -> None:
    inner = t5()
    value = json.loads(inner.to_str())
    value["added_tokens"][1]["content"] = value["model"]["vocab"][1][0] = "|"
    value["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = open_tokenizer(tmp_path, end_of_text="|")
    assert tokenizer.end_of_text == 1
    assert tokenizer.decode(tokenizer.encode("a|b")) == "ab"


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("unigram", "the ab é", [b" the", b" ", b"a", b"b", b" ", b""]),
        ("wordpiece", "the bathing. é", [b" the", b" b", b"a", b"t", b"h", b"ing", b".", b" e"]),
        ("bpe", "the é", [b" the", b" ", b"\xc3", b"\xa9"]),
    ],
)
def test_bytes_of_tokens(tmp_path: Path, kind: str, text: str, pieces: list[bytes]) -> None:
    tokenizer = opened(tmp_path, kind)
    found = [tokenizer.token_bytes(id) for id in tokenizer.encode(text)]
    assert found == pieces
    # At most the space before the first word is too many; what is unknown counts nothing.
    assert len(b"".join(found)) <= len(text.encode()) + 1
    assert tokenizer.token_bytes(tokenizer.end_of_text) == b""


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "[SEP]"}),
        ("tokenizer_config.json", {"eos_token": {"content": "[SEP]", "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": "[SEP]"}),
        ("generation_config.json", {"eos_token_id": 3}),
        ("generation_config.json", {"eos_token_id": [3, 0]}),
        ("config.json", {"eos_token_id": 3, "bos_token_id": 2}),
    ],
)
def test_the_end_is_stated_somewhere(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    bert().save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).end_of_text == 3


def test_an_end_that_nobody_states_must_be_told(tmp_path: Path) -> None:
    bert().save(str(tmp_path / "tokenizer.json"))
    for content in ({"eos_token": None}, {"eos_token": "<end>"}, []):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"special tokens are: \[PAD\], \[UNK\], \[CLS\]"):
            open_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 10**6}))
    assert open_tokenizer(tmp_path, end_of_text="[CLS]").end_of_text == 2


def test_a_vocabulary_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "mill", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tokenizer = open_tokenizer(tmp_path, end_of_text="[SEP]")
    assert tokenizer.encode("The mills") == [5, 6, 7]
    tokenizer.save(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved").spec == tokenizer.spec
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    (tmp_path / "vocab.txt").rename(tmp_path / "spiece.model")
    with pytest.raises(UserError, match="transformers cannot convert"):
        open_tokenizer(tmp_path)


def test_names_are_looked_for_in_the_cache_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def snapshot(name: str, *, local_files_only: bool, **options: object) -> str:
        asked.append(local_files_only)
        return str(tmp_path / ("cached" if local_files_only else "fetched"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    learnt = train_tokenizer(iter(["abab"]), vocab_size=258)
    learnt.save(tmp_path / "fetched")
    assert open_tokenizer("someone/something").spec == learnt.spec
    assert asked == [True, False]
    learnt.save(tmp_path / "cached")
    assert open_tokenizer("someone/something").spec == learnt.spec
    assert asked == [True, False, True]


def test_a_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise OSError("nothing is there\nwith more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match="is not in the cache, and HF_HUB_OFFLINE is set"):
        open_tokenizer("someone/something")
    with pytest.raises(UserError, match="no such tokenizer"):
        open_tokenizer("two/many/parts")
