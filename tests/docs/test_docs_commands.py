"""Help texts are complete, and no page shows a command or setting that does not exist."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from gristmill.cli import main
from gristmill.cli.main import app
from gristmill.config.invalid import setting_paths
from gristmill.text.filters.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
GROUP: Any = typer.main.get_command(app)
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`gristmill ([^`]+)`")
HEREDOC = re.compile(r"<<'END'\n.*?^END$", re.MULTILINE | re.DOTALL)
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*words, name))
    if not hasattr(command, "commands"):
        yield words, command


VERBS = dict(leaves(GROUP))


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_help_mentions_everything(words: tuple[str, ...]) -> None:
    environment = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    done = CliRunner().invoke(app, [*words, "--help"], env=environment)
    text = STYLE.sub("", done.output)
    assert done.exit_code == 0
    for parameter in VERBS[words].params:
        if parameter.param_type_name == "argument":
            assert (parameter.metavar or parameter.name) in text
        else:
            assert max(parameter.opts, key=len) in text
        assert parameter.help, f"{parameter.name} has no help"


def test_the_list_of_commands_says_what_their_help_says() -> None:
    for name, verb in main.VERBS.items():
        first = (GROUP.commands[name].help or "").strip().partition("\n\n")[0]
        assert verb.summary == first.replace("\n", " ")


def test_no_option_takes_its_name_from_its_placeholder() -> None:
    """As typer 0.27 does where both are the same word and no name is given."""
    for words, command in VERBS.items():
        names = [p.opts for p in command.params if p.param_type_name == "option"]
        assert all(name == name.lower() for options in names for name in options), words
        hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
        for name, hint in hints.items():
            options = (x for x in getattr(hint, "__metadata__", ()) if isinstance(x, OptionInfo))
            for option in options:
                # In annotations typer takes the name for the default first.
                named = str(option.default).startswith("-")
                assert named or option.metavar != name.upper(), (words, name)


@pytest.mark.parametrize(
    "words", [(), ("tokens",), ("tokenizer",)], ids=["all", "tokens", "tokenizer"]
)
def test_help_of_groups_lists_their_commands(words: tuple[str, ...]) -> None:
    command = [str(Path(sys.executable).with_name("gristmill")), *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    group = GROUP
    for word in words:
        group = group.commands[word]
    assert [name for name in group.commands if name not in done.stdout] == []


@pytest.mark.parametrize("name", NAMES)
def test_command_lines_can_be_read(name: str) -> None:
    for line in shown_commands((ROOT / name).read_text(encoding="utf-8")):
        command, rest = find(line)
        try:
            command.make_context("gristmill", rest)
        except typer.Exit:
            # An option such as --corpora has done all there was to do.
            continue
        except Exception as error:
            message = getattr(error, "message", repr(error))
            pytest.fail(f"{name}: gristmill {' '.join(line)}: {message}")


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_sentences_exist(name: str) -> None:
    for text in INLINE.findall((ROOT / name).read_text(encoding="utf-8")):
        words = text.split()
        if words[0] == "VERB":
            continue
        command, rest = (GROUP, words) if words[0].startswith("-") else find(words)
        known = {option for parameter in command.params for option in parameter.opts}
        options = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
        assert set(options) <= {*known, "-h", "--help"}, f"{name}: gristmill {text}"


@pytest.mark.parametrize("name", NAMES)
def test_settings_in_examples_exist(name: str) -> None:
    known = set(setting_paths())
    if name.endswith("filters.md"):
        known = {
            (table, setting)
            for table, settings in SETTINGS.items()
            for setting in settings.model_fields
        }
    for kind, block in FENCED.findall((ROOT / name).read_text(encoding="utf-8")):
        texts = (
            [block]
            if kind == "toml"
            else re.findall(r"\.toml <<'END'\n(.*?)^END$", block, re.S | re.M)
        )
        for text in texts:
            # The value of a setting may itself be a table, as the paths of a blend are.
            unknown = [
                path
                for path in keys(tomllib.loads(text))
                if not any(path[:end] in known for end in range(1, len(path) + 1))
            ]
            assert unknown == [], f"{name}: {text}"


def test_the_pages_show_commands() -> None:
    lines = [line for page in PAGES for line in shown_commands(page.read_text(encoding="utf-8"))]
    assert len(lines) > 30
    assert {line[0] for line in lines} >= {"prepare", "train", "generate", "export", "tokens"}


def test_the_list_of_presets_is_the_current_one() -> None:
    listed = CliRunner().invoke(app, ["config", "--presets"]).output
    assert listed in (ROOT / "docs/guides/run-files.md").read_text(encoding="utf-8")


def shown_commands(text: str) -> Iterator[list[str]]:
    """The words after `gristmill` of every command in the shell blocks of a page."""
    for kind, block in FENCED.findall(text):
        if kind != "sh":
            continue
        for line in HEREDOC.sub("", block).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for command in split(words):
                if command[:1] in (["until"], ["do"]):
                    command = command[1:]
                if command[:1] == ["gristmill"]:
                    yield command[1:]


def split(words: list[str]) -> Iterator[list[str]]:
    """The commands of a shell line; a semicolon may cling to the word before it."""
    current: list[str] = []
    for word in words:
        bare = word.removesuffix(";")
        if word not in ("|", "&&", "||", ";"):
            current.append(bare)
        if word in ("|", "&&", "||", ";") or bare != word:
            yield current
            current = []
    yield current


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the words after them."""
    command, rest = GROUP, list(words)
    while hasattr(command, "commands"):
        if "submit" in command.commands and rest[:1] not in [[one] for one in command.commands]:
            # `launch RUN.toml` is `launch submit RUN.toml`.
            rest.insert(0, "submit")
        assert rest and rest[0] in command.commands, f"gristmill {' '.join(words)}: no such verb"
        command = command.commands[rest.pop(0)]
    return command, rest


def keys(tables: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from keys(value, (*path, key))
        elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for table in value:
                yield from keys(table, (*path, key))
        else:
            yield (*path, key)
