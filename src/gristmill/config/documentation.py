"""What messages and tools say about settings: docstrings, and the lines of a file.

Python itself forgets the docstrings below the attributes of a class, and `tomllib` does not report
the lines of keys.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from gristmill.config.settings import Settings


def attribute_docstrings(owner: type) -> dict[str, str]:
    """By attribute, from the source of the class; those of its bases are not among them. None if
    the source is not there, as in an installation of bytecode alone."""
    try:
        source = inspect.getsource(owner)
    except OSError:
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in pairwise(definition.body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


@cache
def docstrings(table: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings below the fields of a table, by their keys in a run file."""
    owners = [owner for owner in reversed(table.__mro__) if issubclass(owner, Settings)]
    found = {name: text for owner in owners for name, text in attribute_docstrings(owner).items()}
    fields = table.model_fields
    return {fields[name].alias or name: text for name, text in found.items() if name in fields}


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
        elif isinstance(value, list):
            tables = {str(number): one for number, one in enumerate(value) if isinstance(one, dict)}
            yield from _paths(tables, (*path, key))
