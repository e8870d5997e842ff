"""Pages made from the program itself, so that they cannot say anything else than it does.

    reference/settings.md   the classes of `config/`, their docstrings, types and defaults
    reference/cli.md        the commands as `--help` declares them, and the exit statuses
    llms.txt                all pages with what each is about
    run-file.schema.json    the JSON Schema of run files
    the metrics tables      the record classes of `track/records.py`, for the tracking guide

`hooks.py` hands them to MkDocs; nothing is written into the working copy. To read one without
building the site: python docs/generate.py settings, or cli, or metrics.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gristmill.base.errors import Exit
from gristmill.base.units import Duration
from gristmill.cli.main import app
from gristmill.config import schema
from gristmill.config.documentation import attribute_docstrings, docstrings
from gristmill.config.file_schema import run_file_schema
from gristmill.config.settings import Scheduled
from gristmill.track import records

_UNIONS = (Union, UnionType)


def settings_page() -> str:
    """Every table of a run file, in the order of `RunConfig`."""
    lines = [
        "# Settings",
        "",
        "Every key of a [run file](../guides/run-files.md), made from the program's own schema. A",
        "key without a default must be given; one that may be left out says what happens then.",
        "`gristmill config RUN.toml` prints all of them for one run.",
        "",
        "## The top of the file",
        "",
        _plain(schema.RunConfig.__doc__),
        "",
        *_table(schema.RunConfig),
    ]
    # Several kinds of a table may have the same table inside.
    for path, models in dict(_tables(schema.RunConfig)).items():
        lines += ["", f"## `{path}`", ""]
        for model in models:
            if len(models) > 1:
                lines += ["", f"### {_kind(model)}", ""]
            lines += [_plain(model.__doc__), "", *_table(model)]
    return "\n".join(lines) + "\n"


def _kind(model: type[BaseModel]) -> str:
    """What tells a table of this class from others in its place."""
    if "type" in model.model_fields:
        return f"`type = {_toml(model.model_fields['type'].default)}`"
    marks = [name for name in model.model_fields if name in getattr(model, "marks", ())]
    return f"With {' or '.join(f'`{name}`' for name in marks)}" if marks else "By default"


def _tables(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, list[type[BaseModel]]]]:
    """Every table below a model as it is headed in a file, with the classes that may stand in
    it."""
    for name, info in model.model_fields.items():
        inner = _models(info.annotation)
        if inner:
            here = f"{path}.{info.alias or name}" if path else info.alias or name
            listed = any(get_origin(option) is tuple for option in _options(info.annotation))
            yield (f"[[{here}]]" if listed else f"[{here}]"), inner
            for table in inner:
                yield from _tables(table, here)


def _options(annotation: Any) -> list[Any]:
    """The types that a setting may have, without what annotates them."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in _UNIONS:
        return [option for choice in get_args(annotation) for option in _options(choice)]
    return [annotation]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _models(get_args(annotation)[0])
    if get_origin(annotation) in (*_UNIONS, tuple):
        return [model for option in get_args(annotation) for model in _models(option)]
    return []


def _table(model: type[BaseModel]) -> list[str]:
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    ordered = sorted(model.model_fields.items(), key=lambda item: item[0] != "type")
    for name, info in ordered:
        if _models(info.annotation):
            continue
        meaning = _plain(docstrings(model).get(info.alias or name))
        assert meaning, f"{model.__name__}.{name} has no docstring"
        rows.append(
            f"| `{info.alias or name}` | {_type(info.annotation, info.metadata)} "
            f"| {_default(info)} | {_cell(meaning)} |"
        )
    return rows


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type in the words of a person who writes TOML."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _type(inner, [*more, *metadata])
    if origin is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in get_args(annotation))
    if origin in _UNIONS:
        options = [option for option in get_args(annotation) if option is not type(None)]
        return " or ".join(_type(option, metadata) for option in options)
    if origin is tuple:
        return f"list of {_type(get_args(annotation)[0], [])}"
    if origin is dict:
        key, value = get_args(annotation)
        if value is Any:
            return "table"
        return f"table from {_type(key, [])} to {_type(value, [])}"
    if origin is Scheduled:
        number = _type(get_args(annotation)[0], [_limits(metadata)])
        return f"{number}; or a table from durations to such numbers"
    names = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}
    if annotation is Duration:
        return "duration"
    return names[annotation] + _bounds(annotation, metadata)


def _limits(metadata: list[Any]) -> Any:
    """The bounds of a number that may change along the run."""
    words = next(one.func.keywords for one in metadata if isinstance(one, PlainValidator))
    lower = {"gt" if words["excluded"] else "ge": words["least"]}
    return SimpleNamespace(**lower, lt=words["below"] if words["below"] < math.inf else None)


def _bounds(annotation: Any, metadata: list[Any]) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found: dict[str, Any] = {}
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            for name in words:
                if getattr(part, name, None) is not None:
                    found[name] = getattr(part, name)
    if annotation is int and found.get("lt") == 2**63:
        found["lt"] = "2^63"
    parts = [f"{words[name]} {bound}" for name, bound in found.items()]
    return f", {' and '.join(parts)}" if parts else ""


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "required"
    return "none" if info.default is None else f"`{_toml(info.default)}`"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Scheduled():
            return _toml(value.values[0])
        case str() | Duration():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case float() if value.is_integer():
            return str(int(value))
        case _:
            return str(value)


# ------------------------------------------------------------------ the command line


def cli_page() -> str:
    """Every command with its arguments and options, and what its exit status means."""
    group = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Every command with its arguments, options and examples, made from the same declarations",
        "as `gristmill --help`. Every command takes `-h` and `--help`; `gristmill --version`",
        "prints the version. `gristmill` alone shows how to begin.",
        "",
        "`gristmill --install-completion` makes bash, zsh or fish complete verbs, options, presets",
        "and run files, and run folders below `runs/`. It takes effect in the next shell;",
        "`--show-completion` prints the script instead.",
    ]
    for words, command in _commands(group):
        lines += ["", f"## {' '.join(words[1:])}", "", _plain(command.help), ""]
        if not hasattr(command, "commands"):
            lines += ["```text", _usage(words, command), "```", "", *_parameters(command)]
        lines += _examples(command)
    return "\n".join([*lines, "", *_exit_statuses()]) + "\n"


def _commands(command: Any, words: tuple[str, ...] = ("gristmill",)) -> Iterator[Any]:
    """Every command with its words, and every group that has examples of its own before those in
    it."""
    if not hasattr(command, "commands") or (len(words) > 1 and _examples(command)):
        yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*words, name))


def _examples(command: Any) -> list[str]:
    """The examples at the end of a help page."""
    lines = [line for line in (command.epilog or "").splitlines() if line.strip()]
    return ["", "```text", *lines[1:], "```"] if lines[:1] == ["Examples:"] else []


def _usage(words: tuple[str, ...], command: Any) -> str:
    """The command with its arguments; those that may be left out in brackets."""
    pieces = [*words, "[OPTIONS]"]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar + ("…" if parameter.nargs < 0 else "")
            pieces.append(name if parameter.required else f"[{name}]")
    return " ".join(pieces)


def _parameters(command: Any) -> list[str]:
    rows = ["| argument or option | default | meaning |", "| --- | --- | --- |"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            names = f"`{_cell(parameter.metavar)}`"
        else:
            both = [*parameter.opts, *parameter.secondary_opts]
            names = ", ".join(f"`{name}`" for name in both)
        rows.append(f"| {names} | {_value(parameter)} | {_cell(_plain(parameter.help))} |")
    return rows if len(rows) > 2 else []


def _value(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or default == () or default == [] or callable(default):
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default.value if isinstance(default, enum.Enum) else default}`"


def _exit_statuses() -> list[str]:
    texts = attribute_docstrings(Exit)
    rows = [f"| {int(item)} | {_cell(texts[item.name])} |" for item in Exit]
    return [
        "## Exit status",
        "",
        "| status | meaning |",
        "| --- | --- |",
        *rows,
        "| 130 | Interrupted with Ctrl-C outside of training, or a second time during it. |",
        "",
        "`doctor` ends with 1 when it found a problem; `doctor --cluster` also with 71 for wrong "
        "results or a faulty GPU, 74 for a folder that runs cannot share, and 76 for a process "
        "that is missing or does not answer.",
    ]


# ------------------------------------------------------------------ metrics.jsonl


def metrics_tables() -> str:
    """One table per kind of record."""
    shared = [field.name for field in dataclasses.fields(records.ProgressStamp)]
    lines = ["#### All records", "", *_fields(records.ProgressStamp, leave_out=())]
    for record in get_args(records.Record):
        lines += ["", f'#### `"kind": "{record.kind}"`', "", _plain(record.__doc__), ""]
        lines += _fields(record, leave_out=shared)
    return "\n".join(lines) + "\n"


def _fields(record: Any, *, leave_out: Any) -> list[str]:
    texts = attribute_docstrings(record)
    rows = ["| key | type | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(record):
        if field.name not in leave_out:
            kind = _cell(_json_type(str(field.type)))
            rows.append(f"| `{field.name}` | {kind} | {_cell(texts[field.name])} |")
    return rows


def _json_type(annotation: str) -> str:
    """A field's annotation in the words of JSON."""
    names = {"int": "whole number", "float": "number", "str": "text", "None": "null"}
    names["Breakdown"] = "table of tables"
    if annotation.startswith("Literal["):
        return " or ".join(f'"{value}"' for value in ast.literal_eval(annotation[7:]))
    return " or ".join(names.get(part, part) for part in annotation.split(" | "))


# ------------------------------------------------------------------ texts


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/cli.md": cli_page,
}
"""Pages that do not lie in docs/, by the path they would have there."""


# ------------------------------------------------------------------ for programs


def schema_file() -> str:
    """The JSON Schema of run files, as `gristmill config --schema` prints it."""
    return json.dumps(run_file_schema(), indent=1) + "\n"


def page_index(settings: Mapping[str, Any]) -> str:
    """All pages with what each is about, from the settings of MkDocs: llms.txt, which programs that
    read documentation look for."""
    lines = [f"# {settings['site_name']}", "", f"> {settings['site_description']}", "", _FIRST, ""]
    lines += [
        "- [run-file.schema.json](run-file.schema.json): every key of a run file as JSON Schema",
    ]
    sections = dict[str, list[str]]()
    decisions = _decisions()
    for section, title, page in _pages(settings["nav"]):
        text = PAGES[page]() if page in PAGES else (DOCS / page).read_text(encoding="utf-8")
        name, about = _opening(text)
        about = decisions.get(page, about)
        target = page.removesuffix(".md") + ".html"
        sections.setdefault(section, []).append(f"- [{title or name}]({target}): {about}")
    for section, listed in sections.items():
        lines += ["", f"## {section}", "", *listed]
    return "\n".join(lines) + "\n"


def _pages(entries: Iterable[Any], section: str = "") -> Iterator[tuple[str, str | None, str]]:
    """The innermost section, title and path of every page in a navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield section, None, entry
            continue
        ((title, inside),) = entry.items()
        if isinstance(inside, str):
            yield section, title, inside
        else:
            yield from _pages(inside, title)


def _opening(markdown: str) -> tuple[str, str]:
    """The title of a page, and its first sentence."""
    title, _, rest = markdown.partition("\n")
    for paragraph in _CODE.sub("", rest).split("\n\n"):
        text = _plain(_LINK.sub(r"\1", paragraph))
        if text and text[0] not in "#|<!-":
            sentence = _SENTENCE.split(text)[0]
            return title.removeprefix("# "), sentence.removesuffix(":") + "." * sentence.endswith(
                ":"
            )
    return title.removeprefix("# "), ""


def _decisions() -> dict[str, str]:
    """The sentence of every decision, from the table of them."""
    table = (DOCS / "decisions/index.md").read_text(encoding="utf-8")
    return {f"decisions/{page}": sentence for page, sentence in _DECISION.findall(table)}


DOCS = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.?!])\s")
_DECISION = re.compile(r"^\| \[\d+\]\(([^)]+)\) \| (.+?) \|$", re.MULTILINE)
_FIRST = """\
A run is one TOML file, and its results are one folder. `gristmill new TEXT` writes the file,
`gristmill prepare` makes token files of text, and `gristmill train RUN.toml` starts or resumes
the run. `gristmill config RUN.toml` checks all settings and prints them. Every command has
`--help`."""


def main() -> None:
    """Print one of the texts."""
    texts = {Path(path).stem: make for path, make in PAGES.items()} | {"metrics": metrics_tables}
    if len(sys.argv) != 2 or sys.argv[1] not in texts:
        sys.exit(f"usage: python docs/generate.py {'|'.join(texts)}")
    sys.stdout.write(texts[sys.argv[1]]())


if __name__ == "__main__":
    main()
