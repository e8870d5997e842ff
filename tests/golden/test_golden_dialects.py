"""The commands of other programs, translated as when someone last changed that on purpose."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.config.load import load_text
from gristmill.dialects.table import load_table, table_names
from gristmill.dialects.translate import Translation, translate
from gristmill.dialects.words import read_options, split_launcher

FOLDER = Path(__file__).parent / "dialects"
COMMANDS = tomllib.loads((FOLDER / "commands.toml").read_text(encoding="utf-8"))


def translated(name: str, monkeypatch: pytest.MonkeyPatch) -> Translation:
    monkeypatch.chdir(FOLDER)
    command = COMMANDS[name]
    return translate(load_table(command["dialect"]), shlex.split(command["words"]))


def test_every_table_has_a_command() -> None:
    assert {command["dialect"] for command in COMMANDS.values()} == set(table_names())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_translated(
    name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    golden(f"dialects/{name}.txt", translated(name, monkeypatch).text)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option, as it was written, stands beside what became of it."""
    made = translated(name, monkeypatch)
    launcher, words = split_launcher(made.dialect, made.command)
    below = made.text.partition("\n")[2]
    # The last one counts, as of a file and the words behind it.
    given = {one.name: one.written for one in read_options(made.dialect, words)}
    assert given or not words
    assert [written for written in given.values() if written not in below] == []
    assert [word for word in launcher if shlex.quote(word) not in below] == []


RUNS = [name for name, one in COMMANDS.items() if load_table(one["dialect"]).verb == "train"]


@pytest.mark.parametrize("name", RUNS)
def test_a_translation_is_a_run_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = translated(name, monkeypatch)
    made.check()
    try:
        load_text(made.text, place="translation")
    except UserError as error:
        # Models of the Hub are not here; nothing else may be wrong.
        for problem in error.problems:
            assert re.fullmatch(r"translation:\d+: model\.(hf|start)", str(problem.where))
