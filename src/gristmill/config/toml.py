"""The lines of keys in TOML text, which `tomllib` does not report."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, on which every table and key is first given: the first one up to
    which the text contains it. A value of several lines is on its first."""
    lines = text.replace("\r\n", "\n").split("\n")
    places: dict[tuple[str, ...], int] = {}
    first = 0
    for end in range(1, len(lines) + 1):
        try:
            tables = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        for path in _paths(tables):
            places.setdefault(path, first + 1)
        first = end
    return places


def _paths(tables: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tables.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _paths(value, (*path, key))
