"""From a run file to a `RunConfig`, or to one error that lists everything wrong with it.

    class defaults  <  model.start  <  preset  <  config.json of model.hf  <  run file  <  a.b=c on
    the command line

The value "unset" removes what lower layers say. A setting without effect is dropped if a preset has
it, and refused if the user wrote it. Every problem names its place: the file and line, the preset,
or the word on the command line.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Protocol, cast

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.files import read_json
from gristmill.config.hf import architecture_settings, model_settings
from gristmill.config.invalid import (
    SettingPlaces,
    explain_invalid,
    find_field,
    find_tables,
    setting_paths,
)
from gristmill.config.launch import LaunchConfig
from gristmill.config.rules import check
from gristmill.config.schema import MODEL_KINDS, RunConfig
from gristmill.config.settings import UNSET, NoEffect, Path_

Values = dict[Path_, Any]
"""Settings of one or more layers by their path, such as ("optim", "lr")."""

_OPEN: tuple[Path_, ...] = (("model", "hf_config"),)
"""Tables with any keys, of which a higher layer may change some."""


RENAMED: dict[Path_, Path_] = {("train", "second_token"): ("train", "mtp")}
"""Settings by their old names, which are still read."""

_WRITTEN = re.compile(r"# by gristmill (\S+);")
"""The first line of the run file in a run folder."""


class FindModel(Protocol):
    """Finds the local folder of a model by its name."""

    def __call__(self, name: str, *, where: str) -> Path:
        """Its settings are needed, its weights are not; `where` is the setting with the name."""


def _local(name: str, *, where: str) -> Path:
    return Path(name)


def load_run(
    path: Path, overrides: Sequence[str] = (), *, find_model: FindModel = _local
) -> RunConfig:
    """Read a run file, or the one in a run folder; raises one error with all problems.

    `find_model` gives the local folder of `model.start` or `model.hf`: nothing in here uses the
    network. A run folder that was copied or moved is the folder of the run, unless it gets another
    name.
    """
    file = path / "run.toml" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the run file: {error.strerror}", where=file) from error
    except UnicodeDecodeError as error:
        raise UserError("the run file is not UTF-8 text", where=file) from error
    try:
        config = load_text(text, overrides, place=str(file), find_model=find_model)
    except UserError as error:
        raise _with_version(error, text, file) from error
    named = any(word.partition("=")[0] in ("name", "folder") for word in overrides)
    own = Path(config.folder or f"runs/{config.name}")
    if path == file or named or own.resolve() == path.resolve():
        return config
    folder = f"folder={tomli_w.dumps({'': str(path)}).partition('=')[2].strip()}"
    return load_text(text, (*overrides, folder), place=str(file), find_model=find_model)


def _with_version(error: UserError, text: str, file: Path) -> UserError:
    """The error, and that a newer program wrote the file if that may be why."""
    written = _WRITTEN.match(text)
    try:
        ours = metadata.version("gristmill")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return error
    if written is None or _numbers(written[1]) <= _numbers(ours):
        return error
    what = f"gristmill {written[1]} wrote this run file, and this program is the older {ours}"
    newer = Problem(what, str(file), f"use gristmill {written[1]} or a later one")
    return UserError([*error.problems, newer], exit=error.exit)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)[:3]]


def load_launch(words: Sequence[str]) -> LaunchConfig:
    """The `[launch]` table of words such as account=abc, for jobs that train nothing."""
    values, places = Values(), dict[Path_, str | None]()
    for word in words:
        found = {("launch", *path): value for path, value in parse_override(word).items()}
        values |= found
        places |= dict.fromkeys(found, f"command line {word!r}")
    try:
        return LaunchConfig.model_validate(_nest(values).get("launch", {}))
    except ValidationError as error:
        known = SettingPlaces("command line", "", places)
        errors = [{**details, "loc": ("launch", *details["loc"])} for details in error.errors()]
        raise UserError(
            explain_invalid(cast(ErrorDetails, error), known) for error in errors
        ) from None


def load_text(
    text: str,
    overrides: Sequence[str] = (),
    *,
    place: str,
    find_model: FindModel = _local,
    defaults: Collection[str] = (),
) -> RunConfig:
    """As `load_run`, from the text of a run file. `defaults` are settings of the text that the user
    did not ask for, such as optim.lr: they are dropped where they have no effect."""
    try:
        file = _flatten(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", where=place) from error
    written = SettingPlaces(place, text, dict.fromkeys(file))
    old_names = [path for path in RENAMED if path in file]
    for old in old_names:
        if RENAMED[old] in file:
            what = f"{'.'.join(old)} is the old name of {'.'.join(RENAMED[old])}"
            raise UserError(what, where=written.where(old), remedy="give one of the two")
        written.of[RENAMED[old]] = written.where(old).removesuffix(f": {'.'.join(old)}")
    file = _with_new_names(file)
    words: Values = {}
    for word in overrides:
        values = parse_override(word)
        old_names += [path for path in RENAMED if path in values]
        values = _with_new_names(values)
        words = _lay_over(words, values, within_layer=True)
        written.of.update(dict.fromkeys(values, f"command line {word!r}"))
    given = _lay_over(file, words)
    asked = {path for path in file if ".".join(path) not in defaults} | words.keys()

    lower: Values = {}
    places = SettingPlaces(place, text, {})
    weights: dict[str, Any] | None = None
    for path in (("model", "start"), ("preset",), ("model", "hf")):
        name, setting = given.get(path), ".".join(path)
        if name is None or name == UNSET:
            continue
        try:
            if path == ("preset",):
                values = _flatten(load_preset(name))
            elif not isinstance(name, str):
                continue
            elif path == ("model", "start"):
                weights = model_settings(find_model(name, where=setting))
                values = _flatten({"model": weights})
            elif (*_OPEN[0], "model_type") in file:
                continue  # the file has all of the architecture
            else:
                config = _read_architecture(find_model(name, where=setting))
                values = {path: name} | _flatten({"model": {"hf_config": config}})
        except UserError as error:
            first, *rest = error.problems
            what = first.what if first.where == setting else f"{first.where}: {first.what}"
            problem = Problem(what, written.where(path), first.remedy)
            raise UserError([problem, *rest], exit=error.exit) from error
        lower = _lay_over(lower, values)
        places.of.update(dict.fromkeys(values, f"{setting} {name}"))
    places.of.update(written.of)
    loaded = _validate(_lay_over(lower, given), places, asked, weights)
    loaded._old_names = tuple(
        f"{'.'.join(old)} is now called {'.'.join(RENAMED[old])}"
        for old in dict.fromkeys(old_names)
    )
    return loaded


def _with_new_names(values: Values) -> Values:
    return {RENAMED.get(path, path): value for path, value in values.items()}


def _read_architecture(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        what = f"'{folder}' holds no Hugging Face model (config.json)"
        raise DataError(what, where="model.hf")
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise DataError("this is not the config.json of a model: no model_type", where=file)
    return architecture_settings(content)


def dump_run(config: RunConfig) -> str:
    """The complete settings as a run file that loads to the same settings."""
    values = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    values.pop("preset", None)
    origin = f"# made from preset {config.preset}\n" if config.preset else ""
    return origin + tomli_w.dumps(values)


def changed_settings(file: Path, config: RunConfig) -> list[str]:
    """What differs between a written run file and settings, one line each; a `ValueError` if the
    file is damaged."""
    texts = (file.read_text(encoding="utf-8"), dump_run(config))
    flat = (_flatten(tomllib.loads(text), whole=()) for text in texts)
    before, now = map(_with_new_names, flat)
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
        near = ", ".join(difflib.get_close_matches(str(name), preset_names(), n=3))
        remedy = f"did you mean {near}?" if near else "see `gristmill config --presets`"
        raise UserError(f"there is no preset {name!r}", where="preset", remedy=remedy)
    return tomllib.loads(file.read_text())


# ------------------------------------------------------------------ layers


def parse_override(word: str) -> Values:
    """The settings of an `a.b=c` word; a value that is not TOML is taken as a string."""
    key, equals, value = word.partition("=")
    if not equals or not key or not all(part.isidentifier() for part in key.split(".")):
        raise UserError(
            f"{word!r} is not a setting",
            where="command line",
            remedy="write TABLE.KEY=VALUE, for example optim.lr=3e-4",
        )
    if not _is_utf8(value):
        raise UserError(
            "this is not UTF-8 text, and all settings are",
            where=f"command line {word!r}",
            remedy="rename the file or folder",
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *tables, name = key.split(".")
    return _flatten({name: parsed}, tuple(tables))


def _is_utf8(text: str) -> bool:
    """Whether text from the command line, such as a file name, can be written into a file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flatten(
    tables: Mapping[str, Any], path: Path_ = (), *, whole: Collection[Path_] | None = None
) -> Values:
    """Nested tables by path. Empty tables and those that are the value of a setting, such as
    data.paths, are kept whole."""
    whole = setting_paths() if whole is None else whole
    values: Values = {}
    for key, value in tables.items():
        inner = (*path, key)
        if isinstance(value, dict) and value and (inner not in whole or inner in _OPEN):
            values.update(_flatten(value, inner, whole=whole))
        else:
            values[inner] = value
    return values


def _nest(values: Values) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for path, value in values.items():
        table = tables
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value
    return tables


def _lay_over(below: Values, above: Values, *, within_layer: bool = False) -> Values:
    """One layer over another. A table that names another `type` replaces the one below, unless both
    are of a family with the same settings; within a layer the type may be named in any of the
    pieces of a table."""
    other_type = {"model"} if _other_model(below, above) else set()
    for key, info in RunConfig.model_fields.items():
        default = getattr(info.default, "type", None)
        kinds = [layer.get((key, "type")) for layer in (below, above)]
        before, now = (default if kind == UNSET else kind for kind in kinds)
        if default is None or now is None:
            continue
        if _family(key, now) != _family(key, before or default):
            other_type.add(key)
    # Tables further inside have no default type.
    inner = [p[:-1] for p, kind in above.items() if len(p) > 2 and p[-1] == "type"]
    replaced = [p for p in inner if below.get((*p, "type"), above[*p, "type"]) != above[*p, "type"]]
    if not within_layer:
        below = {
            path: value
            for path, value in below.items()
            if path[0] not in other_type and not any(path[: len(p)] == p for p in replaced)
        }
    # An empty table leaves the settings of the table below it as they are.
    filled = {p[:depth] for p in below for depth in range(1, len(p))}
    above = {path: value for path, value in above.items() if value != {} or path not in filled}
    kept = {p: value for p, value in below.items() if not any(_overlap(path, p) for path in above)}
    return {**kept, **above}


def _other_model(below: Values, above: Values) -> bool:
    """Whether a layer names a kind of model, or a Hugging Face model, that the one below is not."""
    layers = [{p: one for p, one in layer.items() if one != UNSET} for layer in (below, above)]
    kinds = [{kind for path in layer for kind in _marked(path)} for layer in layers]
    named = [layer.get(("model", "hf")) for layer in layers]
    other = None not in named and named[0] != named[1]
    return bool(kinds[1]) and (kinds[0] != kinds[1] or other)


def _marked(path: Path_) -> Iterator[str]:
    """The kind of model of which a setting is the mark, if it is one."""
    if path[0] == "model" and len(path) > 1:
        for name, kind in MODEL_KINDS.items():
            if path[1] in kind.marks:
                yield name


def _family(key: str, kind: Any) -> Any:
    """What kinds of a table with the same settings have in common; the kind itself if alone."""
    return getattr(find_tables(RunConfig, key).get(str(kind)), "family", kind)


def _overlap(path: Path_, other: Path_) -> bool:
    """Whether two paths are the same, or one is of a table around the other."""
    return all(one == two for one, two in zip(path, other, strict=False))


def _remove_unset(tables: dict[str, Any], model: type[BaseModel] = RunConfig) -> None:
    """Drop every setting whose value is `unset`. Unknown settings and required tables keep it, and
    are refused with their place."""
    for key, value in list(tables.items()):
        info, classes = find_field(model, key), find_tables(model, key)
        if value == UNSET and info is not None and (not classes or info.default is None):
            del tables[key]
        elif isinstance(value, dict) and classes:
            kind = value.get("type", UNSET)
            if kind == UNSET:
                kind = getattr(info.default, "type", None)
            marked = next((name for path in value for name in _marked((key, path))), None)
            _remove_unset(value, classes.get(str(marked or kind), next(iter(classes.values()))))


# ------------------------------------------------------------------ checking


def _validate(
    values: Values,
    places: SettingPlaces,
    written: Collection[Path_],
    weights: dict[str, Any] | None,
) -> RunConfig:
    """The settings, without those of lower layers that have no effect beside the user's own."""
    tables = _nest(values)
    _remove_unset(tables)
    for key, info in RunConfig.model_fields.items():
        kind = getattr(info.default, "type", None)
        if kind is not None and isinstance(tables.get(key), dict):
            tables[key] = {"type": kind, **tables[key]}
    try:
        config = RunConfig.model_validate(tables)
    except ValidationError as error:
        invalid = dict.fromkeys(explain_invalid(details, places) for details in error.errors())
        raise UserError(invalid) from None
    problems = check(config, written=written, weights=weights)
    broken = [(tuple(str(problem.where).split(".")), problem) for problem in problems]
    idle = [path for path, problem in broken if isinstance(problem, NoEffect)]
    if lower := [path for path in idle if not any(p[: len(path)] == path for p in written)]:
        left = {p: v for p, v in values.items() if not any(_overlap(path, p) for path in lower)}
        return _validate(left, places, written, weights)
    if broken:
        raise UserError(
            Problem(problem.what, places.where(path), problem.remedy) for path, problem in broken
        )
    return config
