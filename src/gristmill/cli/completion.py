"""Completes command lines in bash, zsh and fish, within a tenth of a second.

    gristmill tr                     verbs
    gristmill train --fr             options, and values of options with fixed choices
    gristmill new --preset mod       presets
    gristmill generate runs/st       run folders in runs/, for commands that take a run or model
    gristmill train st               run files in this folder, for commands that take a run file

`gristmill --install-completion` and the script that it installs belong to typer. The script calls
this program. typer would import the command to complete it, which takes a second for some commands.
Options are therefore cached when completion is installed; after a file of `cli/` changes, those of
a command are cached again when it is next completed. Without candidates, the shell completes file
names.

Candidates with unusual characters are omitted, since some shells evaluate the completions.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from gristmill.base.caches import cache_folder
from gristmill.base.files import write_json
from gristmill.cli.verbs import VERBS

_ARGUMENTS = "_TYPER_COMPLETE_ARGS"
_SAFE = re.compile(r"[A-Za-z0-9._/=-]+")
_MAX_HELP = 60
_RUN, _FILE, _PRESET = "run", "file", "preset"
_DEFAULT_COMMANDS = {"launch": "submit"}
"""The default command of a group."""

Candidate = tuple[str, str]
"""A completed word and its help text."""
CommandSpec = Mapping[str, Any]
"""Parameters of a command: "options" and, for a group, "commands" by name; "arguments" as kinds."""


def print_completions(request: str) -> bool:
    """Print the candidates for the shell in `request`; False if typer has to handle it."""
    shell = request.removeprefix("complete_")
    if request == shell or shell not in ("bash", "zsh", "fish"):
        return False
    candidates = [
        candidate for candidate in complete(*_command_line(shell)) if _SAFE.fullmatch(candidate[0])
    ]
    if shell == "bash":
        print("\n".join(word for word, _ in candidates))
    elif shell == "zsh":
        pairs = "\n".join(f'"{word}":"{_sanitize(text)}"' for word, text in candidates)
        print(f"_arguments '*: :(({pairs}))'" if candidates else "_files")
    elif os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        sys.exit(0 if candidates else 1)
    else:
        print("\n".join(f"{word}\t{_sanitize(text)}" for word, text in candidates))
    return True


def complete(words: Sequence[str], incomplete: str) -> list[Candidate]:
    """Candidates for an incomplete word that follows other words."""
    candidates = _candidates(words, incomplete)
    return [candidate for candidate in candidates if candidate[0].startswith(incomplete)]


def _command_line(shell: str) -> tuple[list[str], str]:
    """The complete words after the program name, and the incomplete one."""
    if shell == "bash":
        words = _split(os.environ.get("COMP_WORDS", ""))
        current = int(os.environ.get("COMP_CWORD", "1"))
        return words[1:current], words[current] if current < len(words) else ""
    line = os.environ.get(_ARGUMENTS, "")
    words = _split(line)[1:]
    return (words, "") if line.endswith(" ") or not words else (words[:-1], words[-1])


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quotation
        return line.split()


def _candidates(words: Sequence[str], incomplete: str) -> Iterator[Candidate]:
    verb, *rest = [*words, ""]
    if not words:
        yield from ((name, command.summary) for name, command in VERBS.items())
        return
    if verb not in VERBS:
        return
    spec = _spec(verb)
    while spec["commands"]:
        name, *remaining = rest
        if name in spec["commands"]:
            spec, rest = spec["commands"][name], remaining
            continue
        if len(rest) == 1 and not incomplete.startswith("-"):
            yield from ((name, command["help"]) for name, command in spec["commands"].items())
        default = _DEFAULT_COMMANDS.get(verb)
        if default is None:
            return
        spec = spec["commands"][default]
    option = spec["options"].get(rest[-2]) if len(rest) > 1 else None
    if option is not None and option["values"] is not None:
        yield from _values(option["values"], incomplete)
    elif incomplete.startswith("-"):
        yield from ((name, details["help"]) for name, details in spec["options"].items())
    else:
        for kind in spec["arguments"]:
            yield from _values([kind], incomplete)


def _values(kinds: Sequence[str], incomplete: str) -> Iterator[Candidate]:
    """Candidates for a value: names of a kind such as presets, or the given choices."""
    for kind in kinds:
        if kind == _PRESET:
            folder = resources.files("gristmill.config") / "presets"
            names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())
            yield from ((name, "") for name in names)
        elif kind == _RUN:
            yield from ((str(file.parent), "") for file in sorted(Path("runs").glob("*/run.toml")))
        elif kind == _FILE:
            yield from ((file.name, "") for file in sorted(Path().glob("*.toml")))
        else:
            yield kind, ""


def _sanitize(text: str) -> str:
    """A help text without characters that are special to a shell."""
    text = re.sub(r"[^\w ,.()/%=-]", "", text)
    return text if len(text) <= _MAX_HELP else f"{text[:_MAX_HELP].rpartition(' ')[0]}…"


# ------------------------------------------------------------------ parameters of commands


def _spec(verb: str) -> CommandSpec:
    """The parameters of a command, from the cache or from the command itself."""
    file, version = cache_folder() / "completion.json", _version()
    cached: dict[str, Any] = {}
    with suppress(OSError, ValueError, AttributeError):
        content = json.loads(file.read_text(encoding="utf-8"))
        cached = content["verbs"] if content.get("version") == version else {}
    if verb not in cached:
        from gristmill.cli.main import load_verb

        cached[verb] = spec_of(load_verb(verb))
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"version": version, "verbs": cached})
    spec: CommandSpec = cached[verb]
    return spec


def cache_commands() -> None:
    """Cache the parameters of all commands, so that the first completion is fast too."""
    for verb in VERBS:
        _spec(verb)


def _version() -> str:
    """A version that changes with the files that declare commands."""
    files = Path(__file__).parent.glob("*.py")
    return str(max(file.stat().st_mtime_ns for file in files))


def spec_of(command: Any) -> dict[str, Any]:
    """The parameters of a typer command."""
    options: dict[str, Any] = {}
    arguments: list[str] = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments += _argument_kinds(str(parameter.metavar or parameter.name))
        elif not getattr(parameter, "hidden", False):
            names = (*parameter.opts, *parameter.secondary_opts)
            values = None if parameter.is_flag else _option_values(parameter)
            options |= {name: {"help": parameter.help or "", "values": values} for name in names}
    inner = getattr(command, "commands", None) or {}
    return {
        "help": " ".join((command.help or "").split("\n\n")[0].split()),
        "options": options,
        "arguments": arguments,
        "commands": {name: spec_of(nested) for name, nested in inner.items()},
    }


def _argument_kinds(metavar: str) -> list[str]:
    """The kinds of an argument, from its placeholder in the help."""
    if "RUN.toml" in metavar:
        return [_FILE, _RUN]
    return [_RUN] if re.search(r"\b(RUNS?|MODEL|BASE)\b", metavar) else []


def _option_values(parameter: Any) -> list[str]:
    """The values of an option: a kind, its declared choices, or an empty list."""
    from gristmill.config.launch import LauncherName
    from gristmill.plan.hardware import known_hardware

    if "--preset" in parameter.opts:
        return [_PRESET]
    if "--gpu" in parameter.opts:
        return list(known_hardware())
    if "--on" in parameter.opts:
        return list(get_args(LauncherName))
    kind = getattr(parameter, "type_descriptor", None) or parameter.type
    choices = getattr(kind, "choices", None) or ()
    return [str(getattr(choice, "value", choice)) for choice in choices]
