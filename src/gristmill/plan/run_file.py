"""Put settings into the text of a run file, and leave everything else in it as it is.

    [train]                             [train]
    batch = 512    # samples     ->     batch = 512    # samples
                                        micro_batch = 4

A setting that is there gets its new value in its line; one that is not comes at the end of its
table; a table that is not comes at the end of the file. Files that write tables in another form
(inline, or with dotted keys) are refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from gristmill.base.errors import UserError


def with_settings(text: str, changes: Mapping[str, object], *, where: Path) -> str:
    """The text with settings such as {"train.micro_batch": 4}; those that are None are removed."""
    lines = text.splitlines()
    for path, value in changes.items():
        table, _, key = path.rpartition(".")
        lines = _changed(lines, table, key, value)
    made = "\n".join(lines) + "\n"
    wrong = [path for path, value in changes.items() if _found(made, path) != value]
    if wrong:
        raise UserError(
            f"{', '.join(wrong)}: this file is not written in tables like [train]",
            where=where,
            remedy="write them in by hand",
        )
    return made


def _found(text: str, path: str) -> object:
    """The value of a setting in a text; None if it is not there."""
    try:
        values: object = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return "damaged"
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _changed(lines: list[str], table: str, key: str, value: object) -> list[str]:
    start = next((n for n, line in enumerate(lines) if _header(line) == table), None)
    if start is None:
        if value is None:
            return lines
        gap = [""] if lines and lines[-1].strip() else []
        return [*lines, *gap, f"[{table}]", _line(key, value)]
    end = next((n for n in range(start + 1, len(lines)) if _header(lines[n]) is not None), None)
    end = len(lines) if end is None else end
    own = re.compile(rf"^(\s*{re.escape(key)}\s*=\s*)([^#]*?)(\s*(#.*)?)$")
    for number in range(start + 1, end):
        match = own.match(lines[number])
        if match:
            if value is None:
                return [*lines[:number], *lines[number + 1 :]]
            new = match[1] + _line(key, value).partition("= ")[2] + match[3]
            return [*lines[:number], new, *lines[number + 1 :]]
    if value is None:
        return lines
    last = max(n for n in range(start, end) if n == start or lines[n].strip())
    return [*lines[: last + 1], _line(key, value), *lines[last + 1 :]]


def _header(line: str) -> str | None:
    """The table that a line begins."""
    match = re.match(r"^\s*\[\s*([\w.-]+)\s*\]\s*(#.*)?$", line)
    return match[1] if match else "?" if line.lstrip().startswith("[") else None


def _line(key: str, value: object) -> str:
    return tomli_w.dumps({key: value}).strip()
