"""From a run file to a `RunConfig`, or to one error that lists everything wrong with it.

    class defaults  <  sizes of model.start  <  preset  <  run file  <  a.b=c on the command line

The value "unset" takes away what lower layers say. What comes from a preset and does nothing beside
the user's own settings is left out; only what the user wrote is refused for it.

Every problem names its place: the file and line, the preset, or the word on the command line; an
unknown name comes with the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.config.hf import model_settings
from gristmill.config.rules import check
from gristmill.config.schema import RunConfig
from gristmill.config.settings import UNSET, NoEffect, Path_
from gristmill.config.toml import key_lines, write_toml

FindModel = Callable[[str], Path]


@dataclass
class _Layers:
    """The merged tables, and for every key the place it came from."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path_, str] = field(default_factory=dict)

    def add(self, tables: Mapping[str, Any], *, place: str, lines: Mapping[Path_, int]) -> None:
        """Lay tables over those that are there."""
        self.note(tables, place=place, lines=lines)
        _merge(self.values, tables)

    def note(self, tables: Mapping[str, Any], *, place: str, lines: Mapping[Path_, int]) -> None:
        """Remember where the keys of tables were written."""
        for path in _leaves(tables):
            line = next(
                (lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None
            )
            self.places[path] = f"{place}:{line}" if line else place

    def place(self, path: Path_) -> str:
        """Where a key, or the nearest table around it, was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
            inside = [p for p in self.places if p[:end] == path[:end]]
            if inside:
                return self.places[inside[0]]
        return self.file


def load_run(
    path: Path, overrides: Sequence[str] = (), *, find_model: FindModel = Path
) -> RunConfig:
    """Read a run file, or the one in a run folder; raises one error with all problems.

    `find_model` gives the local folder of `model.start`: nothing in here uses the network.
    """
    if path.is_dir():
        path = path / "run.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the run file: {error.strerror}", where=str(path), exit=Exit.CONFIG
        ) from error
    except UnicodeDecodeError as error:
        raise UserError("the run file is not UTF-8 text", where=str(path)) from error
    return load_text(text, overrides, place=str(path), find_model=find_model)


def load_text(
    text: str, overrides: Sequence[str] = (), *, place: str, find_model: FindModel = Path
) -> RunConfig:
    """As `load_run`, from the text of a run file."""
    tables = _parse(text, place=place)
    words = _parse_overrides(overrides)
    chosen: dict[str, Any] = {}
    for table in words.values():
        _merge(chosen, table, apart=False)
    written = _Layers(place)
    written.add(tables, place=place, lines=key_lines(text))
    for word, table in words.items():
        written.note(table, place=f"command line {word!r}", lines={})
    _merge(written.values, chosen)

    layers, weights = _Layers(place), None
    start = _value_at(written.values, ("model", "start"))
    if isinstance(start, str) and start != UNSET:
        with _placed(written, ("model", "start")):
            weights = model_settings(find_model(start))
        layers.add({"model": weights}, place=f"model.start {start}", lines={})
    preset = _value_at(written.values, ("preset",))
    if preset not in (None, UNSET):
        with _placed(written, ("preset",)):
            layers.add(load_preset(preset), place=f"preset {preset}", lines={})
    _merge(layers.values, written.values)
    layers.places.update(written.places)
    _take_away(layers.values)
    return _validate(layers, written=written.places, weights=weights)


@contextmanager
def _placed(layers: _Layers, path: Path_) -> Iterator[None]:
    """Say where a setting stands whose value cannot be used."""
    try:
        yield
    except UserError as error:
        where = f"{layers.place(path)}: {'.'.join(path)}"
        first, *rest = error.problems
        inner = f"{first.where}: {first.what}" if first.where != ".".join(path) else first.what
        raise UserError([Problem(inner, where, first.remedy), *rest], exit=error.exit) from error


def dump_run(config: RunConfig) -> str:
    """The complete settings as a run file that loads to the same settings."""
    values = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    values.pop("preset", None)
    origin = f"# made from preset {config.preset}\n" if config.preset else ""
    return origin + write_toml(values)


def changed_settings(file: Path, config: RunConfig) -> list[str]:
    """What differs between a written run file and settings, one line each."""
    before, now = (
        {path: _value_at(tables, path) for path in _leaves(tables)}
        for tables in (tomllib.loads(file.read_text()), tomllib.loads(dump_run(config)))
    )
    return [
        f"{'.'.join(path)} from {before.get(path)!r} to {now.get(path)!r}"
        for path in dict.fromkeys((*before, *now))
        if before.get(path) != now.get(path)
    ]


def preset_names() -> list[str]:
    """All presets, smallest model first within a family."""
    folder = resources.files("gristmill.config") / "presets"
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir()]
    return sorted(names, key=lambda name: (name.split("-")[0], load_preset(name)["model"]["width"]))


def load_preset(name: Any) -> dict[str, Any]:
    """The tables of one preset."""
    file = resources.files("gristmill.config") / "presets" / f"{name}.toml"
    if not isinstance(name, str) or "/" in name or not file.is_file():
        near = difflib.get_close_matches(str(name), preset_names(), n=3)
        raise UserError(
            f"there is no preset {name!r}",
            where="preset",
            remedy=f"did you mean {', '.join(near)}?"
            if near
            else "see `gristmill config --presets`",
        )
    return tomllib.loads(file.read_text())


# ------------------------------------------------------------------ reading


def _parse(text: str, *, place: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", where=place) from error


def _parse_overrides(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`a.b=c` words as nested tables; a value that is not TOML is taken as a string."""
    result = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not all(part.isidentifier() for part in key.split(".")):
            raise UserError(
                f"{word!r} is not a setting",
                where="command line",
                remedy="write TABLE.KEY=VALUE, for example optim.lr=3e-4",
            )
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        result[word] = parsed
    return result


def _value_at(tables: Mapping[str, Any], path: Path_) -> Any:
    value: Any = tables
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _leaves(tables: Mapping[str, Any], path: Path_ = ()) -> Iterator[Path_]:
    for key, value in tables.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _merge(
    target: dict[str, Any], tables: Mapping[str, Any], path: Path_ = (), *, apart: bool = True
) -> None:
    """Lay tables over others. A table that names another `type` replaces the one below it, and so
    does one that is the value of a setting, such as the paths of a blend. Tables that do not lie
    apart, one below the other, are pieces of one, of which a single piece names the type."""
    for key, value in tables.items():
        below = target.get(key)
        if not (isinstance(value, dict) and isinstance(below, dict)):
            target[key] = dict(value) if isinstance(value, dict) else value
        elif (*path, key) in _value_tables() or _changes_type((*path, key), below, value, apart):
            target[key] = dict(value)
        else:
            _merge(below, value, (*path, key), apart=apart)


def _changes_type(
    path: Path_, below: Mapping[str, Any], above: Mapping[str, Any], apart: bool
) -> bool:
    """Whether a table is of another type than the one below, which has the default if it names
    none."""
    field = RunConfig.model_fields.get(path[0]) if apart and len(path) == 1 else None
    default = getattr(getattr(field, "default", None), "type", None)
    before, now = (
        default if kind == UNSET else kind
        for kind in (below.get("type", default), above.get("type"))
    )
    return None not in (before, now) and bool(before != now)


@cache
def _value_tables() -> frozenset[Path_]:
    return frozenset(setting_paths())


def _take_away(values: dict[str, Any], model: type[BaseModel] = RunConfig) -> None:
    """Drop every setting whose value is `unset`. What is no setting, and a table that there must
    be, keep the word, which is no value for them, and are refused with their place."""
    for key, value in list(values.items()):
        info, tables = _field(model, key), _tables(model, key)
        if value == UNSET and info is not None and (not tables or info.default is None):
            del values[key]
        elif isinstance(value, dict) and tables:
            kind = value.get("type", UNSET)
            if kind == UNSET:
                kind = getattr(info.default, "type", None)
            _take_away(value, tables.get(str(kind), next(iter(tables.values()))))


# ------------------------------------------------------------------ checking


def _validate(
    layers: _Layers, *, written: Collection[Path_], weights: Mapping[str, Any] | None
) -> RunConfig:
    """The settings, without those of lower layers that do nothing beside what the user wrote."""
    try:
        config = RunConfig.model_validate({**layers.values, **_default_types(layers.values)})
    except ValidationError as error:
        invalid = dict.fromkeys(_problem(details, layers) for details in error.errors())
        raise UserError(invalid) from None
    broken = check(config, written=written, weights=weights)
    idle = [path for path, problem in broken if isinstance(problem, NoEffect)]
    if lower := [path for path in idle if not any(p[: len(path)] == path for p in written)]:
        for *table, key in lower:
            del _value_at(layers.values, tuple(table))[key]
        return _validate(layers, written=written, weights=weights)
    if broken:
        raise UserError(
            Problem(problem.what, f"{layers.place(path)}: {'.'.join(path)}", problem.remedy)
            for path, problem in broken
        )
    return config


def _default_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables that come in several types but name none, with the type that is the default."""
    return {
        key: {"type": info.default.type, **values[key]}
        for key, info in RunConfig.model_fields.items()
        if len(_tables(RunConfig, key)) > 1
        and isinstance(values.get(key), dict)
        and "type" not in values[key]
    }


def _problem(details: ErrorDetails, layers: _Layers) -> Problem:
    path, model = _locate(details)
    dotted = ".".join(path)
    where = f"{layers.place(path)}: {dotted}"
    either = _alternatives(_field(model, path[-1]))
    match details["type"]:
        case _ if either:
            # Every alternative has a complaint of its own; all become this one.
            message = f"must be {either}"
        case "extra_forbidden":
            return Problem("there is no such setting", where, _nearest(path, model))
        case "missing":
            return Problem("this setting is required", where, _description(path, model))
        case "union_tag_invalid":
            got, choices = details["ctx"]["tag"], details["ctx"]["expected_tags"]
            return Problem(f"there is no type {got!r}", f"{where}.type", f"one of {choices}")
        case "model_type" | "model_attributes_type" if details["input"] == UNSET:
            return Problem("every run has this table", where, "unset its settings one by one")
        case "model_type" | "model_attributes_type" | "union_tag_not_found":
            message = f"must be a table, [{dotted}]"
        case "value_error":
            message = str(details["ctx"]["error"])
        case _:
            message = details["msg"][0].lower() + details["msg"][1:]
    return Problem(f"{message} (it is {details['input']!r})", where, _description(path, model))


def _locate(details: ErrorDetails) -> tuple[Path_, type[BaseModel]]:
    """The key's path without the tags that unions add, and the class of the table it is in."""
    path: list[str] = []
    model: type[BaseModel] = RunConfig
    parts = [str(part) for part in details["loc"]]
    for position, part in enumerate(parts):
        candidates = _tables(model, path[-1]) if path else {}
        if part in candidates and position < len(parts) - 1:
            model = candidates[part]
            continue
        if path and len(candidates) == 1:
            model = next(iter(candidates.values()))
        path.append(part)
        if _alternatives(_field(model, part)):
            break
    return tuple(path), model


def _field(model: type[BaseModel], key: str) -> Any:
    for name, info in model.model_fields.items():
        if key in (name, info.alias):
            return info
    return None


def _alternatives(info: Any) -> str | None:
    """What a setting may be that is a number or one of some words; None for any other setting."""
    annotation = getattr(info, "annotation", None)
    if get_origin(annotation) not in (Union, UnionType):
        return None
    words = [_kind_words(kind) for kind in get_args(annotation) if kind is not NoneType]
    return " or ".join(map(str, words)) if len(words) > 1 and all(words) else None


def _kind_words(kind: Any) -> str | None:
    if get_origin(kind) is Literal:
        return " or ".join(json.dumps(value) for value in get_args(kind))
    number, *rules = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    bounds = [bound for rule in rules for bound in getattr(rule, "metadata", ())]
    least = next((bound.ge for bound in bounds if hasattr(bound, "ge")), None)
    words = {int: "a whole number", float: "a number"}.get(number)
    return words if words is None or least is None else f"{words} from {least}"


def _tables(model: type[BaseModel], key: str) -> dict[str, type[BaseModel]]:
    """The table classes a field may hold, by their `type`."""
    info = _field(model, key)
    found: dict[str, type[BaseModel]] = {}
    if info is None:
        return found
    for option in (info.annotation, *get_args(info.annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            kind = option.model_fields.get("type")
            found[str(kind.default) if kind else option.__name__] = option
    return found


def _description(path: Path_, model: type[BaseModel]) -> str | None:
    info = _field(model, path[-1])
    return " ".join(info.description.split()) if info is not None and info.description else None


def _nearest(path: Path_, model: type[BaseModel]) -> str:
    known = [info.alias or name for name, info in model.model_fields.items()]
    kinds = [kind for kind, table in _tables(RunConfig, path[0]).items() if _field(table, path[-1])]
    if len(path) == 2 and kinds:
        return f"{path[0]} has it with type = {' or '.join(map(repr, kinds))}"
    keys = difflib.get_close_matches(path[-1], {p[-1] for p in setting_paths()}, n=1, cutoff=0.8)
    near = (
        difflib.get_close_matches(path[-1], known, n=2, cutoff=0.6)
        or [".".join(p) for p in setting_paths() if p[-1] in keys][:3]
        or difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
    )
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known here: {', '.join(known)}"


def setting_paths(model: type[BaseModel] = RunConfig, path: Path_ = ()) -> list[Path_]:
    """Every setting a user can write, as paths."""
    found: dict[Path_, None] = {}
    for name, info in model.model_fields.items():
        key = info.alias or name
        tables = _tables(model, key)
        if not tables:
            found[(*path, key)] = None
        for table in tables.values():
            found.update(dict.fromkeys(setting_paths(table, (*path, key))))
    return list(found)
