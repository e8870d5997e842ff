"""Writing TOML, and finding the line of a key: the standard library only reads values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=(.*)")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRINGS = re.compile(r"""(\"{3}|'{3})|"(?:[^"\\]|\\.)*"|'[^']*'|#.*""")


def write_toml(tables: Mapping[str, Any]) -> str:
    """TOML text: plain values first, then one section per nested mapping."""
    return "\n".join(_lines(tables, path=())).strip() + "\n"


def _lines(table: Mapping[str, Any], *, path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    if path and (plain or not nested):
        lines = ["", f"[{'.'.join(_key(part) for part in path)}]", *lines]
    for key, value in nested.items():
        lines += _lines(value, path=(*path, key))
    return lines


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    assert isinstance(value, list | tuple), f"no TOML form for {value!r}"
    return "[" + ", ".join(_value(item) for item in value) + "]"


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, of every table and key that stands at the start of a line."""
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
