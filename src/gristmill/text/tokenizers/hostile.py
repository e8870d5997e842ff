"""Refuses a tokenizer.json that would take all memory, or end the process.

The library parses such a file in Rust. A length that it believes can end the whole process, which
nothing here could catch; so what can do that is looked at before the library sees the file:

    normalizer, decoder   rules that replace text by longer text, each after the other
    charsmap              how long its table is said to be
    ids                   a few tokens with ids of billions would be tables of billions of rows

Its errors and panics become ours. Patterns cannot loop for ever: its engine gives up.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, UserError

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
    for one in _flat(rule):
        kind, content = one.get("type"), one.get("content") or one.get("prepend") or ""
        if kind in ("Replace", "Prepend") and isinstance(content, str):
            growth *= max(1, len(content))
        if kind == "Precompiled":
            _check_charsmap(one.get("precompiled_charsmap"), where=where)
    if growth > MOST_GROWTH:
        what = f"its rules can make a text {growth:.0e} times as long, which no tokenizer does"
        raise DataError(what, where=where)


def _flat(rule: Any) -> Iterator[dict[str, Any]]:
    """A rule, and those that it is a sequence of."""
    waiting = [rule]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += [inner for inner in one.values() if isinstance(inner, dict | list)]
        elif isinstance(one, list):
            waiting += one


def _check_charsmap(text: Any, *, where: Path) -> None:
    """It begins with the size of a table of 4-byte numbers, which is in it."""
    try:
        content = base64.b64decode(text or "", validate=True) if isinstance(text, str) else b""
    except ValueError as error:
        raise DataError(f"its charsmap is damaged: {error}", where=where) from error
    size = int.from_bytes(content[:4], "little")
    if content and (len(content) < 4 or size % 4 or size > len(content) - 4):
        raise DataError("its charsmap is damaged: a table is longer than all of it", where=where)
