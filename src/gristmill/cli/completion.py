"""Answers to the shell when somebody presses TAB, within a tenth of a second.

    gristmill tr                     verbs
    gristmill train --fr             options, and the values of those that have a few
    gristmill new --preset mod       presets
    gristmill generate runs/st       folders below runs/, for commands that take a run or model
    gristmill train st               run files here, for commands that take a run file

`gristmill --install-completion` is typer's, and so is the script that it installs, which asks this
program. typer would answer by importing the command, which takes a second for some. So the options
are written down when completion is installed, in the cache of this user, and those of a command
anew when it is completed after a file of `cli/` changed.
Whatever cannot be answered is left to the shell, which completes names of files.

Names with other characters than those of run names are left out: some shells evaluate the answer.
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
_HELP = 60
_RUN, _FILE, _PRESET = "run", "file", "preset"
_DEFAULT_COMMANDS = {"launch": "submit"}
"""The command of a group that is meant where none is named."""

Item = tuple[str, str]
"""A word, and what it means."""
Spec = Mapping[str, Any]
"""What a command takes: "options" by name, "arguments" as kinds, "commands" of a group by name."""


def answer(request: str) -> bool:
    """Answer a shell; False leaves it to typer."""
    shell = request.removeprefix("complete_")
    if request == shell or shell not in ("bash", "zsh", "fish"):
        return False
    items = [item for item in complete(*_typed(shell)) if _SAFE.fullmatch(item[0])]
    if shell == "bash":
        print("\n".join(word for word, _ in items))
    elif shell == "zsh":
        pairs = "\n".join(f'"{word}":"{_plain(what)}"' for word, what in items)
        print(f"_arguments '*: :(({pairs}))'" if items else "_files")
    elif os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        sys.exit(0 if items else 1)
    else:
        print("\n".join(f"{word}\t{_plain(what)}" for word, what in items))
    return True


def complete(words: Sequence[str], incomplete: str) -> list[Item]:
    """What may stand in place of an incomplete word behind others."""
    return [item for item in _choices(words, incomplete) if item[0].startswith(incomplete)]


def _typed(shell: str) -> tuple[list[str], str]:
    """The words behind the program's name, and the incomplete one."""
    if shell == "bash":
        words = _split(os.environ.get("COMP_WORDS", ""))
        at = int(os.environ.get("COMP_CWORD", "1"))
        return words[1:at], words[at] if at < len(words) else ""
    line = os.environ.get(_ARGUMENTS, "")
    words = _split(line)[1:]
    return (words, "") if line.endswith(" ") or not words else (words[:-1], words[-1])


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quotation that has not ended
        return line.split()


def _choices(words: Sequence[str], incomplete: str) -> Iterator[Item]:
    verb, *rest = [*words, ""]
    if not words:
        yield from ((name, one.summary) for name, one in VERBS.items())
        return
    if verb not in VERBS:
        return
    spec = _spec(verb)
    while spec["commands"]:
        name, *after = rest
        if name in spec["commands"]:
            spec, rest = spec["commands"][name], after
            continue
        if len(rest) == 1 and not incomplete.startswith("-"):
            yield from ((name, one["help"]) for name, one in spec["commands"].items())
        default = _DEFAULT_COMMANDS.get(verb)
        if default is None:
            return
        spec = spec["commands"][default]
    option = spec["options"].get(rest[-2]) if len(rest) > 1 else None
    if option is not None and option["values"] is not None:
        yield from _values(option["values"], incomplete)
    elif incomplete.startswith("-"):
        yield from ((name, one["help"]) for name, one in spec["options"].items())
    else:
        for kind in spec["arguments"]:
            yield from _values([kind], incomplete)


def _values(kinds: Sequence[str], incomplete: str) -> Iterator[Item]:
    """Values of an option or argument: of the kinds above, or its own few."""
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


def _plain(text: str) -> str:
    """A help text without what means something to a shell."""
    text = re.sub(r"[^\w ,.()/%=-]", "", text)
    return text if len(text) <= _HELP else f"{text[:_HELP].rpartition(' ')[0]}…"


# ------------------------------------------------------------------ what commands take


def _spec(verb: str) -> Spec:
    """What a command takes, from the cache, or from the command itself, which is then kept."""
    file, version = cache_folder() / "completion.json", _version()
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError, AttributeError):
        content = json.loads(file.read_text(encoding="utf-8"))
        kept = content["verbs"] if content.get("version") == version else {}
    if verb not in kept:
        from gristmill.cli.main import load_verb

        kept[verb] = spec_of(load_verb(verb))
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"version": version, "verbs": kept})
    spec: Spec = kept[verb]
    return spec


def remember_commands() -> None:
    """Write down what all commands take, so that the first answer is quick too."""
    for verb in VERBS:
        _spec(verb)


def _version() -> str:
    """Changes with the files that declare commands."""
    files = Path(__file__).parent.glob("*.py")
    return str(max(file.stat().st_mtime_ns for file in files))


def spec_of(command: Any) -> dict[str, Any]:
    """What a command of typer takes."""
    options: dict[str, Any] = {}
    arguments: list[str] = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments += _kinds(str(parameter.metavar or parameter.name))
        elif not getattr(parameter, "hidden", False):
            names = (*parameter.opts, *parameter.secondary_opts)
            values = None if parameter.is_flag else _few(parameter)
            options |= {name: {"help": parameter.help or "", "values": values} for name in names}
    inner = getattr(command, "commands", None) or {}
    return {
        "help": " ".join((command.help or "").split("\n\n")[0].split()),
        "options": options,
        "arguments": arguments,
        "commands": {name: spec_of(one) for name, one in inner.items()},
    }


def _kinds(metavar: str) -> list[str]:
    """What an argument may be, by what its help calls it."""
    if "RUN.toml" in metavar:
        return [_FILE, _RUN]
    return [_RUN] if re.search(r"\b(RUNS?|MODEL|BASE)\b", metavar) else []


def _few(parameter: Any) -> list[str]:
    """The values of an option: a kind, those that it declares, or nothing."""
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
