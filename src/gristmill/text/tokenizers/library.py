"""Tokenizers of the `tokenizers` library: byte-level BPEs, and those of T5, BERT, Llama 2.

    Unigram     the most likely pieces           "▁the" "▁mill" "s"
    WordPiece   the longest piece, then on       "the" "mill" "##s"
    BPE         with single bytes for the rest   "▁mill" "<0xE2>" "<0x86>" "<0x92>"

Text that looks like a control token is encoded as text, nothing is added around it, and the token
that ends a document is a control token even if the files define it as an ordinary one.

Most tokenizers that do not work on bytes change text before they split it: they drop line ends,
fold case, or write a token for "unknown"; they are not `lossless`. The bytes of an id are then what
`decode` adds for it in the middle of a text, and none for an unknown, so bits per byte are at worst
too high. Their vocabularies hold control tokens as ordinary pieces, so a page with "</s>" in it
would end the document. Splitting every such word after its first character keeps text from becoming
a control token. The split is added when a tokenizer is opened, and never saved.

A tokenizer.json that would take all memory, or end the process, is refused. The library parses such
a file in Rust. A length that it believes can end the whole process, which nothing here could catch;
so what can do that is looked at before the library sees the file:

    normalizer, decoder   rules that replace text by longer text, each after the other
    charsmap              how long its table is said to be
    ids                   a few tokens with ids of billions would be tables of billions of rows

Its errors and panics become ours. Patterns cannot loop for ever: its engine gives up.
"""

from __future__ import annotations

import abc
import base64
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import storage_errors, write_atomic, write_json
from gristmill.text.tokenizers import byte_level

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
BYTES_FILE = "gristmill_tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class LibraryTokenizer(abc.ABC):
    """A tokenizer of the library; each kind has its own fingerprint and bytes of tokens."""

    kind: str
    fingerprint: str
    lossless: bool

    def __init__(
        self, inner: tokenizers.Tokenizer, *, end_of_text: str, begin_of_text: str | None = None
    ) -> None:
        """`begin_of_text` is the control token that the files call bos_token, for chat
        templates."""
        # These are left from the last use, and would truncate, pad or vary what is encoded.
        inner.no_truncation()
        inner.no_padding()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None
        # Some files hold the end-of-text token as an ordinary one.
        inner.add_special_tokens(
            [tokenizers.AddedToken(end_of_text, special=True, normalized=False)]
        )
        inner.encode_special_tokens = True
        ids = inner.get_vocab(with_added_tokens=True)
        check_ids(ids.values())
        self.size = max(ids.values()) + 1
        self.end_of_text = ids[end_of_text]
        self._inner = inner
        self.prefix = _prefix(inner)
        check_prefix(self.prefix, size=self.size)
        self._text = ""
        """The text of the tokenizer.json, if `_inner` no longer gives it."""
        self._end_text, self._begin_text = end_of_text, begin_of_text
        added = inner.get_added_tokens_decoder()
        self.control_tokens = {token.content: id for id, token in added.items() if token.special}

    @property
    def definition(self) -> str | None:
        return None

    @property
    def spec(self) -> dict[str, Any]:
        return {
            "type": self.kind,
            "size": self.size,
            "end_of_text": self.end_of_text,
            "fingerprint": self.fingerprint,
        }

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with library_errors("the tokenizer", "it fails on a text"):
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors("the tokenizer", "it fails on some ids"):
            return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, id: int) -> bytes:
        assert 0 <= id < self.size, f"the id {id} is outside the vocabulary"
        return self._table[id]

    @cached_property
    @abc.abstractmethod
    def _table(self) -> list[bytes]:
        """The bytes that every id stands for."""

    @property
    def named_tokens(self) -> dict[str, str]:
        """The control tokens by the names that `transformers` gives them."""
        begin = {"bos_token": self._begin_text} if self._begin_text else {}
        return {**begin, "eos_token": self._end_text}

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and its settings, which `transformers` reads too."""
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.named_tokens,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / CONFIG_FILE, settings)
        write_atomic(folder / TOKENIZER_FILE, self._text or self._inner.to_str(pretty=True))


def _prefix(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What the tokenizer's post-processor puts before a text."""
    marked = inner.encode("a", add_special_tokens=True)
    special = marked.special_tokens_mask
    first = next((i for i, added in enumerate(special) if not added), 0)
    return tuple(marked.ids[:first])


class BpeTokenizer(LibraryTokenizer):
    """A byte-level BPE of the `tokenizers` library."""

    kind = "byte-level-bpe"

    def __init__(
        self, inner: tokenizers.Tokenizer, *, end_of_text: str, begin_of_text: str | None = None
    ) -> None:
        super().__init__(inner, end_of_text=end_of_text, begin_of_text=begin_of_text)
        value = json.loads(inner.to_str())
        merges = value["model"]["merges"]
        self.fingerprint = byte_level.fingerprint(
            value,
            vocab=value["model"]["vocab"],
            # Pairs or strings, depending on the version of the library that wrote them.
            merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
            ignore_merges=value["model"].get("ignore_merges", False),
        )
        self.lossless = byte_level.gives_text_back(value)
        self._as_gpt2 = self.lossless and byte_level.is_as_gpt2(value)

    @cached_property
    def definition(self) -> str | None:
        """The tokenizer.json without control tokens, if it is one of GPT-2's kind."""
        if not self._as_gpt2:
            return None
        plain = tokenizers.Tokenizer(self._inner.model)
        plain.pre_tokenizer = self._inner.pre_tokenizer
        plain.decoder = self._inner.decoder
        return str(plain.to_str())

    @cached_property
    def _table(self) -> list[bytes]:
        """The bytes of every id; none for special tokens and for ids that nothing uses."""
        table = [b""] * self.size
        added = self._inner.get_added_tokens_decoder()
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            if id not in added:
                table[id] = byte_level.bytes_of(token)
            elif not added[id].special:
                table[id] = token.encode()
        return table

    @property
    def named_tokens(self) -> dict[str, str]:
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), self._end_text)
        return names | super().named_tokens


class SubwordTokenizer(LibraryTokenizer):
    """Any other tokenizer of the library."""

    def __init__(
        self, inner: tokenizers.Tokenizer, *, end_of_text: str, begin_of_text: str | None = None
    ) -> None:
        super().__init__(inner, end_of_text=end_of_text, begin_of_text=begin_of_text)
        # What is changed below is not saved.
        self._text = inner.to_str(pretty=True)
        value = json.loads(self._text)
        model = value["model"]
        self._on_bytes = byte_level.works_on_bytes(inner)
        name = str(model["type"]).lower()
        self.kind = f"byte-level-{name}" if self._on_bytes else name
        deciding = {key: part for key, part in model.items() if key != "dropout"}
        self.fingerprint = byte_level.fingerprint(value, model=deciding)
        self.lossless = self._on_bytes and byte_level.gives_text_back(value)
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
                table[id] = byte_level.bytes_of(token)
            elif single := _BYTE_TOKEN.fullmatch(token):
                table[id] = bytes.fromhex(single[1])
            else:
                table[id] = self.decode([*before, id]).removeprefix(start).encode()
        return table

    @property
    def named_tokens(self) -> dict[str, str]:
        return super().named_tokens | ({"unk_token": self._unknown} if self._unknown else {})


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


LARGEST = 2**30
"""Bytes of a tokenizer.json; those of large vocabularies have 20 million."""
MOST_IDS = 2**24
"""The largest vocabularies have a quarter of a million."""
LONGEST_PREFIX = 16
MOST_GROWTH = 1000
"""How many times longer all rules together may make a text."""
_PREFACE = "Cannot instantiate Tokenizer from buffer: "
_WORDS = (b"Replace", b"Prepend", b"Precompiled", b"\\u")
"""What a file must hold to be looked at: the rules in question, or letters that hide them."""


def read_definition(path: Path) -> bytes:
    """The bytes of a tokenizer.json that the library may see."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    if len(content) > LARGEST:
        raise DataError("larger than any tokenizer.json", where=path)
    if any(word in content for word in _WORDS):
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"this is not a tokenizer.json: {error}", where=path) from error
        for part in ("normalizer", "decoder") if isinstance(value, dict) else ():
            _check_rules(value.get(part), where=path)
    return content


def check_ids(ids: Collection[int]) -> None:
    """A `ValueError` for ids that no vocabulary has."""
    largest = max(ids, default=0)
    if largest >= MOST_IDS:
        raise ValueError(f"an id is {largest}, larger than that of any vocabulary")


def check_prefix(prefix: Sequence[int], *, size: int) -> None:
    """A `ValueError` for what no tokenizer puts before a text."""
    if len(prefix) > LONGEST_PREFIX or any(not 0 <= id < size for id in prefix):
        raise ValueError("its post-processor puts more before a text than a few tokens of its own")


@contextmanager
def library_errors(where: Path | str, what: str, *, remedy: str | None = None) -> Iterator[None]:
    """Errors of the library, which have no class of their own, as ours."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic in Rust is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, MemoryError):
            raise
        said = " ".join(str(error).removeprefix(_PREFACE).split())[:300]
        raise DataError(f"{what}: {said}", where=where, remedy=remedy) from error


def _check_rules(rule: Any, *, where: Path) -> None:
    growth = 1.0
    for step in _flat(rule):
        kind, content = step.get("type"), step.get("content") or step.get("prepend") or ""
        if kind in ("Replace", "Prepend") and isinstance(content, str):
            growth *= max(1, len(content))
        if kind == "Precompiled":
            _check_charsmap(step.get("precompiled_charsmap"), where=where)
    if growth > MOST_GROWTH:
        what = f"its rules can make a text {growth:.0e} times as long, which no tokenizer does"
        raise DataError(what, where=where)


def _flat(rule: Any) -> Iterator[dict[str, Any]]:
    """A rule, and those that it is a sequence of."""
    waiting = [rule]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += [inner for inner in part.values() if isinstance(inner, dict | list)]
        elif isinstance(part, list):
            waiting += part


def _check_charsmap(text: Any, *, where: Path) -> None:
    """It begins with the size of a table of 4-byte numbers, which is in it."""
    try:
        content = base64.b64decode(text or "", validate=True) if isinstance(text, str) else b""
    except ValueError as error:
        raise DataError(f"its charsmap is damaged: {error}", where=where) from error
    size = int.from_bytes(content[:4], "little")
    if content and (len(content) < 4 or size % 4 or size > len(content) - 4):
        raise DataError("its charsmap is damaged: a table is longer than all of it", where=where)
