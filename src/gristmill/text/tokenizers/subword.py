"""Tokenizers of the `tokenizers` library that are not byte-level BPEs: those of T5, BERT, Llama 2.

    Unigram     the most likely pieces           "▁the" "▁mill" "s"
    WordPiece   the longest piece, then on       "the" "mill" "##s"
    BPE         with single bytes for the rest   "▁mill" "<0xE2>" "<0x86>" "<0x92>"

Most of these change text before they split it: they drop line ends, fold case, or write a token for
"unknown"; they are not `lossless`. The bytes of an id are then what `decode` adds for it in the
middle of a text, and none for an unknown, so bits per byte are at worst too high.

Their vocabularies hold control tokens as ordinary pieces, so a page with "</s>" in it would end the
document. Splitting every such word after its first character keeps text from becoming a control
token. The split is added when a tokenizer is opened, and never saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from gristmill.text.tokenizers.byte_level import (
    BYTE_OF,
    fingerprint,
    gives_text_back,
    works_on_bytes,
)
from gristmill.text.tokenizers.library import LibraryTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class SubwordTokenizer(LibraryTokenizer):
    """Any tokenizer of the `tokenizers` library."""

    def __init__(self, inner: tokenizers.Tokenizer, *, end_of_text: str) -> None:
        super().__init__(inner, end_of_text=end_of_text)
        # What is changed below is not saved.
        self._text = inner.to_str(pretty=True)
        value = json.loads(self._text)
        model = value["model"]
        self._on_bytes = works_on_bytes(inner)
        name = str(model["type"]).lower()
        self.kind = f"byte-level-{name}" if self._on_bytes else name
        deciding = {key: part for key, part in model.items() if key != "dropout"}
        self.fingerprint = fingerprint(value, model=deciding)
        self.lossless = self._on_bytes and gives_text_back(value)
        self._unknown = _unknown(model)
        added = inner.get_added_tokens_decoder()
        special = {id: token.content for id, token in added.items() if token.special}
        self._control = frozenset(id for id, text in special.items() if text != self._unknown)
        _keep_apart(inner, special.values())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # A control token of one character cannot be split: it is left out instead.
        return [
            ids if self._control.isdisjoint(ids) else [id for id in ids if id not in self._control]
            for ids in super().encode_batch(texts)
        ]

    @cached_property
    def _table(self) -> list[bytes]:
        """What every id adds to a text; nothing for control tokens and for the unknown."""
        before = self.encode("a")
        start = self.decode(before)
        table = [b""] * self.size
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            if id in self._control or token == self._unknown:
                continue
            if self._on_bytes:
                table[id] = bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
            elif single := _BYTE_TOKEN.fullmatch(token):
                table[id] = bytes.fromhex(single[1])
            else:
                table[id] = self.decode([*before, id]).removeprefix(start).encode()
        return table

    @property
    def _named(self) -> dict[str, str]:
        return super()._named | ({"unk_token": self._unknown} if self._unknown else {})


def _unknown(model: dict[str, Any]) -> str | None:
    """The token that stands for what the vocabulary lacks."""
    if model["type"] == "Unigram":
        place = model["unk_id"]
        return None if place is None else str(model["vocab"][place][0])
    unknown = model.get("unk_token")
    return str(unknown) if unknown in model["vocab"] else None


def _keep_apart(inner: tokenizers.Tokenizer, words: Any) -> None:
    """Split words that are control tokens in two before the model sees them."""
    pieces = inner.get_vocab(with_added_tokens=False)
    whole = [word for word in words if word in pieces and len(word) > 1]
    if not whole:
        return
    pattern = "|".join(f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in whole)
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    before = [inner.pre_tokenizer] if inner.pre_tokenizer is not None else []
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])
