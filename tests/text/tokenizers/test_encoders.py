"""Encoding in bulk: the fast way gives the ids of the slow one, or is not taken."""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.text.tokenizers import encoders as module
from gristmill.text.tokenizers.encoders import (
    BytesEncoder,
    ExactEncoder,
    GigatokenEncoder,
    choose_encoder,
    open_encoder,
    save_encoder,
)
from gristmill.text.tokenizers.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

# CJK extension J, which Unicode 17 assigned; unassigned in older tables.
NEW_LETTER = "\U00032588"


GROWING = itertools.count(0, 100)


def learnt() -> Tokenizer:
    text = "the mill's stone doesn't grind 1234 grains of corn\n\n  in naïve cafés — 中文 🙂🙂 "
    more = "".join(map(chr, range(0x20, 0x250))) + NEW_LETTER + "\u8108"
    return train_tokenizer(iter([text * 30, more * 5]), vocab_size=600)


def gpt2() -> Tokenizer:
    try:
        return open_tokenizer("gpt2")
    except UserError:
        pytest.skip("GPT-2's vocabulary is not on this machine")


@pytest.fixture(scope="module", params=[learnt, gpt2], ids=["learnt", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


@pytest.fixture(scope="module")
def fast(tokenizer: Tokenizer) -> GigatokenEncoder:
    pytest.importorskip("gigatoken")
    chosen = choose_encoder(tokenizer)
    assert isinstance(chosen, GigatokenEncoder)
    return chosen


def same(fast: GigatokenEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    one, other = fast.encode(texts), ExactEncoder(tokenizer).encode(texts)
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.ids.tolist() == other.ids.tolist()
    assert one.text_bytes.tolist() == [len(text.encode()) for text in texts]


ANY = st.characters(exclude_categories=["Cs"])
MIXED = st.one_of(
    st.text(ANY),
    st.text(st.sampled_from("aA1 \n\t.'sdmtlvre_\u00a0\u2009é中🙂")),
    st.text(st.characters(min_codepoint=0x10000, exclude_categories=["Cs"])),
    st.text(st.characters(categories=["Cn"])),
)


@settings(deadline=None, max_examples=300)
@given(texts=st.lists(MIXED, max_size=6))
def test_random_unicode(fast: GigatokenEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    same(fast, tokenizer, texts)


def test_every_code_point(fast: GigatokenEncoder, tokenizer: Tokenizer) -> None:
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    # Every code point once, in words with each kind of neighbour; a third of them in each.
    for first, neighbours in enumerate(("a{}b ", "1{}2'", "{}\u8108 {}  ")):
        texts = [
            "".join(neighbours.format(chr(code), chr(code)) for code in codes[begin : begin + 64])
            for begin in range(64 * first, len(codes), 64 * 3 * 10)
        ]
        same(fast, tokenizer, texts)


def test_where_the_tables_of_unicode_differ(fast: GigatokenEncoder, tokenizer: Tokenizer) -> None:
    texts = [NEW_LETTER + "\u8108", "plain", "a" + NEW_LETTER + "'m", "\U0001f642 fine"]
    same(fast, tokenizer, texts)
    content = b"".join(text.encode() for text in texts)
    sizes = np.array([len(text.encode()) for text in texts])
    assert module._doubtful(content, sizes) == [0, 2]


def test_the_table_of_unassigned_code_points() -> None:
    table = module._unassigned()
    here = np.array([unicodedata.category(chr(code)) == "Cn" for code in range(0x110000)])
    assert not (here & ~table).any(), "what a newer Unicode leaves unassigned, an older one did too"
    if unicodedata.unidata_version == "14.0.0":
        assert (table == here).all()


@settings(deadline=None)
@given(texts=st.lists(MIXED, min_size=1, max_size=8))
def test_doubtful_texts_are_those_with_unassigned_code_points(texts: list[str]) -> None:
    content = b"".join(text.encode() for text in texts)
    sizes = np.array([len(text.encode()) for text in texts])
    expected = [
        number
        for number, text in enumerate(texts)
        if any(module._unassigned()[ord(character)] for character in text)
    ]
    assert module._doubtful(content, sizes) == expected


def test_control_tokens_in_text_are_text(fast: GigatokenEncoder, tokenizer: Tokenizer) -> None:
    text = "<|endoftext|> and <|endoftext|>"
    same(fast, tokenizer, [text])
    assert tokenizer.end_of_text not in fast.encode([text]).ids


@pytest.mark.parametrize("resident", [lambda: None, lambda: next(GROWING)])
def test_the_library_is_opened_anew_when_it_remembers_too_much(
    fast: GigatokenEncoder, monkeypatch: pytest.MonkeyPatch, resident: Any
) -> None:
    monkeypatch.setattr(module, "_resident", resident)
    monkeypatch.setattr(module, "_TEXT_BETWEEN_OPENINGS", 30)
    monkeypatch.setattr(module, "_MEMORY", 250)
    monkeypatch.setattr(fast, "_memory", resident())
    before = fast.encode(["some words of text"]).ids.tolist()
    backends = {id(fast._backend) for _ in range(9) if fast.encode(["some words of text"])}
    assert len(backends) > 1
    assert fast.encode(["some words of text"]).ids.tolist() == before


def test_no_texts(fast: GigatokenEncoder) -> None:
    for encoder in (fast, BytesEncoder()):
        encoded = encoder.encode([])
        assert len(encoded.ids) == len(encoded.lengths) == 0


def test_a_saved_encoder_is_opened_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("gigatoken")
    texts = ["the mill", NEW_LETTER + "\u8108", "  's"]
    expected = ExactEncoder(tokenizer).encode(texts).ids.tolist()
    save_encoder(tokenizer, tmp_path)
    again = open_encoder(tmp_path)
    assert again.name == "gigatoken"
    assert again.encode(texts).ids.tolist() == expected
    # A process in which it disagrees with what the first one expects goes without it.
    probes = np.load(tmp_path / "expected.npy")
    probes[-1] += 1
    np.save(tmp_path / "expected.npy", probes)
    assert open_encoder(tmp_path).name == "tokenizers"
    assert open_encoder(tmp_path).encode(texts).ids.tolist() == expected


def test_bytes(tmp_path: Path) -> None:
    assert choose_encoder(ByteTokenizer()).name == "bytes"
    save_encoder(ByteTokenizer(), tmp_path)
    encoded = open_encoder(tmp_path).encode(["é", "ab"])
    assert encoded.ids.tolist() == [0xC3, 0xA9, 0x61, 0x62]
    assert encoded.lengths.tolist() == encoded.text_bytes.tolist() == [2, 2]


def test_without_the_fast_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert choose_encoder(learnt()).name == "tokenizers"


def changed(definition: dict[str, Any], **parts: Any) -> Tokenizer:
    import tokenizers

    from gristmill.text.tokenizers.library import BpeTokenizer

    inner = tokenizers.Tokenizer.from_str(json.dumps(definition | parts))
    return BpeTokenizer(inner, end_of_text="<|endoftext|>")


def test_what_the_fast_library_may_do_otherwise_is_left_to_the_slow_one() -> None:
    definition = json.loads(learnt().definition or "")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    token = {"id": 599, "content": "mill", "special": False, **flags}
    end = {"id": 598, "content": "<|endoftext|>", "special": True, **flags}
    assert choose_encoder(changed(definition)).name == "gigatoken"
    for parts in (
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": [end, token]},
        {"pre_tokenizer": definition["pre_tokenizer"] | {"add_prefix_space": True}},
        {"pre_tokenizer": definition["pre_tokenizer"] | {"use_regex": False}},
        {"model": definition["model"] | {"ignore_merges": True}},
    ):
        assert choose_encoder(changed(definition, **parts)).name == "tokenizers"


def test_a_library_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gigatoken = pytest.importorskip("gigatoken")
    real = gigatoken.Tokenizer.from_json

    class Wrong:
        def __init__(self, definition: str) -> None:
            self.backend = self
            self._right = real(definition).backend

        def encode(self, content: bytes) -> Any:
            return self._right.encode(content.replace(b"'ll", b"'LL"))

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", Wrong)
    assert choose_encoder(learnt()).name == "tokenizers"
