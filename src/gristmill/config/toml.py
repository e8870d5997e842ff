"""Writing TOML, and finding the line of a key: the standard library only reads values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


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
    return key if _BARE.match(key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, list | tuple), f"no TOML form for {value!r}"
    return "[" + ", ".join(_value(item) for item in value) + "]"


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, of every table and key that stands at the start of a line."""
    places: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    quote: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if quote:
            quote = None if quote in line else quote
            continue
        if header := _HEADER.match(line):
            table = _parts(header[1])
            places.setdefault(table, number)
        elif key := _KEY.match(line):
            parts = _parts(key[1])
            for end in range(1, len(parts) + 1):
                places.setdefault((*table, *parts[:end]), number)
            quote = next((q for q in ('"""', "'''") if line.count(q) == 1), None)
    return places


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.split(r"\s*\.\s*", dotted))
