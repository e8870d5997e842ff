"""Find the lines of keys in TOML text, which `tomllib` does not report."""

from __future__ import annotations

import re
import tomllib

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=(.*)")
_STRINGS = re.compile(r"""(\"{3}|'{3})|"(?:[^"\\]|\\.)*"|'[^']*'|#.*""")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, of every table and key that begins a line."""
    places: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    quote: str | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        if quote:
            quote = _open_quote(line.partition(quote)[2]) if quote in line else quote
        elif header := _HEADER.fullmatch(line.rstrip("\r")):
            table = _parts(header[1])
            places.setdefault(table, number)
        elif key := _KEY.match(line):
            parts = _parts(key[1])
            for end in range(1, len(parts) + 1):
                places.setdefault((*table, *parts[:end]), number)
            quote = _open_quote(key[2])
    return places


def _open_quote(rest: str) -> str | None:
    """The triple quote that a line opens and does not close."""
    position = 0
    while match := _STRINGS.search(rest, position):
        if match[1] is None:
            position = match.end()
            continue
        end = rest.find(match[1], match.end())
        if end < 0:
            return match[1]
        position = end + 3
    return None


def _parts(dotted: str) -> tuple[str, ...]:
    parts = re.findall(_PART, dotted)
    return tuple(tomllib.loads(f"x = {p}")["x"] if p[0] in "\"'" else p for p in parts)
