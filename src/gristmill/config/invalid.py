"""From what pydantic says of a wrong setting to an error with its place and a remedy: the file and
line, the preset, or the word on the command line; the nearest name, or what the setting means."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic_core import ErrorDetails

from gristmill.base.errors import Problem
from gristmill.config.documentation import docstrings, key_lines
from gristmill.config.schema import RunConfig
from gristmill.config.settings import UNSET, Path_


@dataclass(frozen=True)
class SettingPlaces:
    """Where every setting was written."""

    file: str
    text: str
    of: dict[Path_, str | None]
    """None for a setting in the file."""

    def where(self, path: Path_) -> str:
        """A setting with its place, or that of the nearest table around it."""
        setting = ".".join(path)
        for end in range(len(path), 0, -1):
            if inside := [known for known in self.of if known[:end] == path[:end]]:
                known = path[:end] if path[:end] in inside else inside[0]
                place = self.of[known] or f"{self.file}:{self._line(path, known)}"
                return f"{place}: {setting}"
        return f"{self.file}: {setting}"

    def _line(self, path: Path_, known: Path_) -> int:
        """The line of a setting in the file, which may be in a list of tables below a known one."""
        lines = key_lines(self.text)
        ends = range(len(path), len(known), -1)
        return lines[next((path[:end] for end in ends if path[:end] in lines), known)]


def explain_invalid(details: ErrorDetails, places: SettingPlaces) -> Problem:
    """One of pydantic's errors in words."""
    path, model = _locate(details)
    dotted = ".".join(path)
    where = places.where(path)
    match details["type"]:
        case "extra_forbidden":
            return Problem("there is no such setting", where, _nearest(path, model))
        case "missing":
            return Problem("this setting is required", where, _description(path, model))
        case "union_tag_invalid":
            got, choices = details["ctx"]["tag"], details["ctx"]["expected_tags"]
            return Problem(f"there is no type {got!r}", f"{where}.type", f"one of {choices}")
        case "union_tag_not_found" if isinstance(details["input"], dict):
            names = " or ".join(map(repr, find_tables(model, path[-1])))
            return Problem("the table does not say its type", f"{where}.type", f"give {names}")
        case "model_type" | "model_attributes_type" | "union_tag_not_found":
            if details["input"] == UNSET:
                return Problem("every run has this table", where, "unset its settings one by one")
            message = f"must be a table, [{dotted}]"
        case "tuple_type" if find_tables(model, path[-1]):
            message = f"must be a list of tables: write [[{dotted}]], with two brackets"
        case "value_error":
            message = str(details["ctx"]["error"])
        case _:
            message = details["msg"][0].lower() + details["msg"][1:]
    # An address may hold a password.
    given = "" if dotted == "alert.url" else f" (it is {details['input']!r})"
    return Problem(f"{message}{given}", where, _description(path, model))


def _locate(details: ErrorDetails) -> tuple[Path_, type[BaseModel]]:
    """The key's path without the tags that unions add, and the class of the table it is in."""
    path: list[str] = []
    model: type[BaseModel] = RunConfig
    parts = [str(part) for part in details["loc"]]
    for position, part in enumerate(parts):
        candidates = find_tables(model, path[-1]) if path else {}
        if part in candidates and position < len(parts) - 1:
            model = candidates[part]
            continue
        if path and len(candidates) == 1:
            model = next(iter(candidates.values()))
        path.append(part)
    return tuple(path), model


def find_field(model: type[BaseModel], key: str) -> Any:
    """The field behind a key of a table."""
    fields = model.model_fields.items()
    return next((info for name, info in fields if key in (name, info.alias)), None)


def find_tables(model: type[BaseModel], key: str) -> dict[str, type[BaseModel]]:
    """The table classes a field may hold, by their `type` or tag."""
    return _table_classes(getattr(find_field(model, key), "annotation", None))


def _table_classes(option: Any) -> dict[str, type[BaseModel]]:
    table, *tags = get_args(option) if get_origin(option) is Annotated else (option,)
    if isinstance(table, type) and issubclass(table, BaseModel):
        kind = table.model_fields.get("type")
        tag = next((tag.tag for tag in tags if isinstance(tag, Tag)), table.__name__)
        return {str(kind.default) if kind else tag: table}
    if get_origin(table) not in (Union, UnionType, tuple):
        return {}
    # A tuple is a list of tables.
    classes = [_table_classes(member) for member in get_args(table)]
    return {kind: one for some in classes for kind, one in some.items()}


def _description(path: Path_, model: type[BaseModel]) -> str | None:
    return " ".join(docstrings(model).get(path[-1], "").split()) or None


def _nearest(path: Path_, model: type[BaseModel]) -> str:
    known = [info.alias or name for name, info in model.model_fields.items()]
    kinds = [
        kind
        for kind, table in find_tables(RunConfig, path[0]).items()
        if find_field(table, path[-1])
    ]
    if len(path) == 2 and kinds and path[0] == "model":
        if "hf" in kinds:
            return "only a Hugging Face model has it: give model.hf too"
        return "not with model.hf: set what its architecture has in model.hf_config"
    if len(path) == 2 and kinds:
        return f"{path[0]} has it with type = {' or '.join(map(repr, kinds))}"
    keys = difflib.get_close_matches(path[-1], {p[-1] for p in setting_paths()}, n=1, cutoff=0.81)
    near = (
        difflib.get_close_matches(path[-1], known, n=2, cutoff=0.6)
        or [".".join(p) for p in setting_paths() if p[-1] in keys][:3]
        or difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
    )
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(known)}"


@cache
def setting_paths(model: type[BaseModel] = RunConfig, path: Path_ = ()) -> tuple[Path_, ...]:
    """Every setting a user can write, as paths."""
    found: dict[Path_, None] = {}
    for name, info in model.model_fields.items():
        key = info.alias or name
        tables = find_tables(model, key)
        if not tables:
            found[(*path, key)] = None
        for table in tables.values():
            found.update(dict.fromkeys(setting_paths(table, (*path, key))))
    return tuple(found)
