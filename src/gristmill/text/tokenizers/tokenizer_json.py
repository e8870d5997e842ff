"""A tokenizer.json of unknown origin, checked before the `tokenizers` library parses it.

The library is written in Rust, and a length that it believes can take all memory or end the whole
process, which nothing here could catch. So whatever can do that is checked first:

    normalizer, decoder   rules that replace text by longer text, one after the other
    charsmap              the length that its table claims to have

The library's errors and panics become ours. Patterns need no check: its engine gives up on those
that would run for ever.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, UserError

LARGEST = 2**30
"""Bytes of a tokenizer.json; those of large vocabularies have 20 million."""
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
