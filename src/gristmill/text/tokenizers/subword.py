"""Tokenizers of the `tokenizers` library that are not byte-level BPEs: those of T5, BERT, Llama 2.

    Unigram     the most likely pieces           "▁the" "▁mill" "s"
    WordPiece   the longest piece, then on       "the" "mill" "##s"
    BPE         with single bytes for the rest   "▁mill" "<0xE2>" "<0x86>" "<0x92>"

Most of these change text before they cut it: they drop line ends, fold letters, write a token for
"unknown". `lossless` says so. What an id stands for is then what `decode` adds for it in the middle
of a text, and nothing for an unknown, so bits per byte counted with it are at worst too high.

The vocabularies of these kinds hold their control tokens as pieces like any other, so that a page
with "</s>" in it would end the document. A cut after the first character of every such word keeps
text from becoming a control token. It is added when a tokenizer is opened, and never saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from gristmill.base.files import sha256_text, storage_errors, write_atomic, write_json
from gristmill.text.tokenizers.byte_level import (
    BYTE_OF,
    CONFIG_FILE,
    TOKENIZER_FILE,
    deciding_tokens,
    forget_last_use,
    gives_text_back,
    without_offsets,
    works_on_bytes,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class SubwordTokenizer:
    """Any tokenizer of the `tokenizers` library."""

    definition = None

    def __init__(self, inner: tokenizers.Tokenizer, *, end_of_text: str) -> None:
        forget_last_use(inner)
        inner.add_special_tokens(
            [tokenizers.AddedToken(end_of_text, special=True, normalized=False)]
        )
        inner.encode_special_tokens = True
        self._file = inner.to_str(pretty=True)
        self._value = json.loads(self._file)
        self._inner = inner
        self._end_text = end_of_text
        ids = inner.get_vocab(with_added_tokens=True)
        self._size = max(ids.values()) + 1
        self._end = ids[end_of_text]
        self._unknown = _unknown(self._value["model"])
        added = inner.get_added_tokens_decoder()
        special = {id: token.content for id, token in added.items() if token.special}
        self._control = frozenset(id for id, text in special.items() if text != self._unknown)
        self._fingerprint = sha256_text(_deciding(self._value))
        _keep_apart(inner, special.values())

    @property
    def size(self) -> int:
        return self._size

    @property
    def end_of_text(self) -> int:
        return self._end

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def lossless(self) -> bool:
        return works_on_bytes(self._value) and gives_text_back(self._value)

    @property
    def spec(self) -> dict[str, Any]:
        kind = str(self._value["model"]["type"]).lower()
        return {
            "type": f"byte-level-{kind}" if works_on_bytes(self._value) else kind,
            "size": self.size,
            "end_of_text": self.end_of_text,
            "fingerprint": self.fingerprint,
        }

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._plain(encoding.ids) for encoding in encodings]

    def _plain(self, ids: list[int]) -> list[int]:
        # A control token of one character cannot be cut apart: it is left out instead.
        if self._control.isdisjoint(ids):
            return ids
        return [id for id in ids if id not in self._control]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, id: int) -> bytes:
        assert 0 <= id < self.size, f"the id {id} is outside the vocabulary"
        return self._table[id]

    @cached_property
    def _table(self) -> list[bytes]:
        """What every id adds to a text; nothing for control tokens and for the unknown."""
        before = self.encode("a")
        start = self.decode(before)
        table = [b""] * self.size
        on_bytes = works_on_bytes(self._value)
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            if id in self._control or token == self._unknown:
                continue
            if on_bytes:
                table[id] = bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
            elif single := _BYTE_TOKEN.fullmatch(token):
                table[id] = bytes.fromhex(single[1])
            else:
                table[id] = self.decode([*before, id]).removeprefix(start).encode()
        return table

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its settings, which `transformers` reads too."""
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._end_text,
            "clean_up_tokenization_spaces": False,
        }
        if self._unknown:
            settings["unk_token"] = self._unknown
        write_json(folder / CONFIG_FILE, settings)
        write_atomic(folder / TOKENIZER_FILE, self._file)


def _unknown(model: dict[str, Any]) -> str | None:
    """The token that stands for what the vocabulary lacks."""
    if model["type"] == "Unigram":
        place = model["unk_id"]
        return None if place is None else str(model["vocab"][place][0])
    unknown = model.get("unk_token")
    return str(unknown) if unknown in model["vocab"] else None


def _keep_apart(inner: tokenizers.Tokenizer, words: Any) -> None:
    """Cut words that are control tokens in two, before the model can see them whole."""
    pieces = inner.get_vocab(with_added_tokens=False)
    whole = [word for word in words if word in pieces and len(word) > 1]
    if not whole:
        return
    pattern = "|".join(f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in whole)
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    before = [inner.pre_tokenizer] if inner.pre_tokenizer is not None else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])


def _deciding(value: dict[str, Any]) -> str:
    """The parts of a tokenizer.json that decide ids."""
    parts = {
        "model": {key: part for key, part in value["model"].items() if key != "dropout"},
        "normalizer": value["normalizer"],
        "pre_tokenizer": without_offsets(value["pre_tokenizer"]),
        "added_tokens": deciding_tokens(value),
    }
    return json.dumps(parts, sort_keys=True)
