"""Byte-level BPE: ids for bytes and for frequent sequences of bytes, so that no text is lost.

    text  -> words, by a pattern       "don't stop"  ->  "don"  "'t"  " stop"
    word  -> bytes, one character each " stop"       ->  "Ġstop"
    bytes -> merged pairs              "Ġ s t o p"   ->  "Ġs t o p"  ->  "Ġst o p"  ->  ...

Each of the 256 bytes is written as one printable character (`BYTE_OF`). If all of them are in the
vocabulary, every text can be encoded and decode(encode(x)) == x, unless the tokenizer changes the
text first: with a normalizer, a space added in front, or spaces removed. `lossless` says so.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gristmill.base.files import sha256_text


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


def bytes_of(token: str) -> bytes:
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


def gives_text_back(value: dict[str, Any]) -> bool:
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


def is_as_gpt2(value: dict[str, Any]) -> bool:
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


def fingerprint(value: dict[str, Any], **model: Any) -> str:
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
