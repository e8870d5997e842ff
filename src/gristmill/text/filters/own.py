"""A filter of the user's own: a Python function, for a classifier of theirs and whatever else.

def good(document):                  {"text": "…", "url": "…"}
    return True                      keeps it
    return False, or "a reason"      drops it
    return {"text": "…"}             keeps it with another text
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.base.errors import UserError
from gristmill.text.filters.document import TextDocument, Verdict
from gristmill.text.filters.settings import WHERE, OwnSettings
from gristmill.text.sources.source import Reason

OWN = "own"
_LONGEST_REASON = 100
Function = Callable[[dict[str, str]], Any]


class OwnFilterError(Exception):
    """The user's function failed on a document."""

    place = 0
    """The line where the document begins, counted from the beginning of its block."""


class OwnFilter:
    """Asks the user's function."""

    def __init__(self, settings: OwnSettings) -> None:
        self._name = settings.function
        self._function = find_function(settings.function)

    def __call__(self, document: TextDocument) -> Verdict:
        try:
            answer = self._function({**document.fields, "text": document.text})
        except Exception as error:
            what = f"{self._name} raised {type(error).__name__}: {error}"
            raise OwnFilterError(what) from error
        match answer:
            case str() if answer:
                return Reason(f"{OWN}: {answer[:_LONGEST_REASON]}")
            case {"text": str() as text}:
                return None if text == document.text else text
            case bool() | np.bool_():
                return None if answer else Reason(f"{OWN}: {self._name.rpartition(':')[2]}")
        raise OwnFilterError(
            f"{self._name} returned {answer!r}, which is not True, False, a reason or "
            'a dictionary with a "text"'
        )


def source_file(function: str) -> Path | None:
    """The file of a function that is named with one."""
    place = function.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None


def find_function(function: str) -> Function:
    """The function that a setting names."""
    place, _, name = function.rpartition(":")
    where = f"{WHERE} own={function}"
    try:
        path = source_file(function)
        module = _module_of(path) if path else _import(place)
    except Exception as error:  # whatever the user's module raises
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise UserError(what, where=where, remedy="check its name and what it imports") from error
    found = vars(module).get(name)
    if not callable(found):
        raise UserError(f"there is no function {name!r} in {place}", where=where)
    return found  # type: ignore[no-any-return]


def _import(name: str) -> Any:
    """A module that is installed, or in the folder of the command."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _module_of(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"gristmill_filter_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the module defines may look it up by its name, as dataclasses do.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
