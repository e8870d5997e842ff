"""Tokenizers of the `tokenizers` library: byte-level BPEs, and those of T5, BERT, Llama 2.

    Unigram     the most likely pieces           "▁the" "▁mill" "s"
    WordPiece   the longest piece, then on       "the" "mill" "##s"
    BPE         with single bytes for the rest   "▁mill" "<0xE2>" "<0x86>" "<0x92>"

Byte-level tokenizers have ids for bytes and for frequent sequences of bytes:

    text  -> words, by a pattern       "don't stop"  ->  "don"  "'t"  " stop"
    word  -> bytes, one character each " stop"       ->  "Ġstop"
    bytes -> merged pairs              "Ġ s t o p"   ->  "Ġs t o p"  ->  "Ġst o p"  ->  ...

Each of the 256 bytes is written as one printable character (`BYTE_OF`). If all of them are in the
vocabulary, every text can be encoded and decode(encode(x)) == x, unless the tokenizer changes the
text first: with a normalizer, a space added in front, or spaces removed. `lossless` says so.

Text that looks like a control token is encoded as text, nothing is added around it, and the token
that ends a document is a control token even if the files define it as an ordinary one.

Most tokenizers that do not work on bytes change text before they split it: they drop line ends,
fold case, or write a token for "unknown"; they are not `lossless`. The bytes of an id are then what
`decode` adds for it in the middle of a text, and none for an unknown, so bits per byte are at worst
too high. Their vocabularies hold control tokens as ordinary pieces, so a page with "</s>" in it
would end the document. Splitting every such word after its first character keeps text from becoming
a control token. The split is added when a tokenizer is opened, and never saved.

Files are checked before the library parses them (`tokenizer_json.py`), and their ids after that: a
few tokens with ids of billions would become tables of billions of rows.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gristmill.base.files import sha256_text, storage_errors, write_atomic, write_json
from gristmill.text.tokenizers.tokenizer_json import library_errors

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
BYTES_FILE = "gristmill_tokenizer.json"
MOST_IDS = 2**24
"""The largest vocabularies have a quarter of a million."""
LONGEST_PREFIX = 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


# ------------------------------------------------------------------ bytes


def _byte_characters() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte, with that byte.

    Visible Latin-1 characters stand for themselves, the other bytes are written as U+0100 and up.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    itself = {chr(byte): byte for byte in visible}
    return itself | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
LONGEST_WORD = 100
SHORT_WORDS = pre_tokenizers.Split(tokenizers.Regex(f".{{1,{LONGEST_WORD}}}"), behavior="isolated")
"""Splits words to a length that WordPiece can encode."""


class _OnlyBytes(dict[int, int | None]):
    """For `str.translate`: drops the characters that stand for no byte."""

    def __missing__(self, character: int) -> None:
        return None


_BYTES = _OnlyBytes({ord(character): byte for character, byte in BYTE_OF.items()})


def _bytes_of(token: str) -> bytes:
    """The bytes that a token is written for; a token with other characters, no text can produce."""
    return token.translate(_BYTES).encode("latin-1")


def byte_level(model: models.Model, *, pattern: str | None = None) -> tokenizers.Tokenizer:
    """A tokenizer of the library that works on bytes; the pattern is GPT-2's if not given."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        cut = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    inner.decoder = decoders.ByteLevel()
    return inner


def works_on_bytes(inner: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer writes bytes as characters before it splits, and undoes that after."""
    parts = (inner.pre_tokenizer, inner.decoder)
    # The state of a part is its piece of the tokenizer.json.
    return all(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)


def _gives_text_back(value: dict[str, Any]) -> bool:
    """Whether a tokenizer that works on bytes has all 256 and changes nothing before it splits."""
    vocabulary = value["model"]["vocab"]
    # A Unigram holds a list of tokens with their scores.
    known = {entry[0] for entry in vocabulary} if isinstance(vocabulary, list) else vocabulary
    if value["normalizer"] is not None or any(character not in known for character in BYTE_OF):
        return False
    strips = any(
        (token["lstrip"] or token["rstrip"]) and not token["special"]
        for token in value["added_tokens"]
    )
    steps = _steps(value["pre_tokenizer"])
    return not strips and all(map(_only_cuts, steps)) and _can_write(value["model"], steps)


def _is_as_gpt2(value: dict[str, Any]) -> bool:
    """Whether GPT-2's pattern and the merges alone decide ids."""
    cutting = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return (
        not value["model"].get("ignore_merges")
        and all(token["special"] for token in value["added_tokens"])
        and all(value["pre_tokenizer"].get(name) == part for name, part in cutting.items())
    )


def _can_write(model: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Whether a model with all 256 bytes can encode every word of them."""
    if model["type"] == "WordPiece":
        short = {"Regex": f".{{1,{LONGEST_WORD}}}"} in [step.get("pattern") for step in steps]
        whole = model["max_input_chars_per_word"] >= LONGEST_WORD
        return short and whole and model["continuing_subword_prefix"] == ""
    return model["type"] in {"BPE", "Unigram"}


def _steps(part: dict[str, Any]) -> list[dict[str, Any]]:
    nested = part["pretokenizers"] if part["type"] == "Sequence" else None
    return [step for each in nested for step in _steps(each)] if nested else [part]


def _only_cuts(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Split" | "Punctuation":
            return bool(step["behavior"] != "Removed")
        case other:
            return bool(other == "Digits")


def _fingerprint(value: dict[str, Any], **model: Any) -> str:
    """SHA-256 of the parts of a tokenizer.json that decide ids; `model` are those of its model."""
    parts = {
        **model,
        "normalizer": value["normalizer"],
        "pre_tokenizer": _without_offsets(value["pre_tokenizer"]),
        # Special tokens are never looked for in text.
        "added_tokens": [
            [token["id"], token["content"]] if token["special"] else token
            for token in value["added_tokens"]
        ],
    }
    return sha256_text(json.dumps(parts, sort_keys=True))


def _without_offsets(value: Any) -> Any:
    """Drop the setting that only changes the offsets a tokenizer reports."""
    if isinstance(value, dict):
        return {key: _without_offsets(v) for key, v in value.items() if key != "trim_offsets"}
    return [_without_offsets(item) for item in value] if isinstance(value, list) else value


# ------------------------------------------------------------------ tokenizers


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
        self.size = max(ids.values()) + 1
        if self.size > MOST_IDS:
            what = f"an id is {self.size - 1}, larger than that of any vocabulary"
            raise ValueError(what)
        self.end_of_text = ids[end_of_text]
        self._inner = inner
        self.prefix = _prefix(inner)
        outside = any(not 0 <= id < self.size for id in self.prefix)
        if len(self.prefix) > LONGEST_PREFIX or outside:
            what = "its post-processor puts more before a text than a few tokens of its own"
            raise ValueError(what)
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
        self.fingerprint = _fingerprint(
            value,
            vocab=value["model"]["vocab"],
            # Pairs or strings, depending on the version of the library that wrote them.
            merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
            ignore_merges=value["model"].get("ignore_merges", False),
        )
        self.lossless = _gives_text_back(value)
        self._as_gpt2 = self.lossless and _is_as_gpt2(value)

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
                table[id] = _bytes_of(token)
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
        self._on_bytes = works_on_bytes(inner)
        name = str(model["type"]).lower()
        self.kind = f"byte-level-{name}" if self._on_bytes else name
        deciding = {key: part for key, part in model.items() if key != "dropout"}
        self.fingerprint = _fingerprint(value, model=deciding)
        self.lossless = self._on_bytes and _gives_text_back(value)
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
                table[id] = _bytes_of(token)
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
