"""What the help of each command ends with: examples that the command understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.cli.main import app, load_verb
from gristmill.cli.verbs import EXAMPLES, VERBS

LINES = [line for lines in EXAMPLES.values() for line in lines]


def test_every_command_has_examples() -> None:
    for verb in VERBS:
        epilog = load_verb(verb).epilog
        assert verb in EXAMPLES or any(one.epilog for one in load_verb(verb).commands.values()), (
            verb
        )
        if verb in EXAMPLES:
            assert epilog.startswith("Examples:")


def _commands() -> Iterator[tuple[str, Any]]:
    for verb in VERBS:
        command = load_verb(verb)
        inner = getattr(command, "commands", {})
        yield from ((f"{verb} {name}", one) for name, one in inner.items())
        if not inner:
            yield verb, command


def test_commands_inside_others_have_examples() -> None:
    assert [words for words, command in _commands() if not command.epilog] == []


def test_values_are_called_by_what_they_are_not_by_their_type() -> None:
    """A placeholder in capitals, such as N or FILE, or the few values there are."""
    width = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    for words, _ in _commands():
        shown = CliRunner().invoke(app, [*words.split(), "--help"], env=width).output
        options = "\n".join(line for line in shown.splitlines() if re.search(r"--[a-z]", line))
        assert re.findall(r"<(?:list\[)?(?:str|int|float|path|Path)\b", options) == [], words
        usage = next(line for line in shown.splitlines() if "Usage:" in line)
        assert "[[" not in usage and "…" not in usage, words


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_understood(line: str) -> None:
    """All options are known and have their values, and no required argument is missing."""
    program, verb, *words = shlex.split(line.partition("    (")[0])
    assert program == "gristmill"
    command: Any = load_verb(verb)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context(verb, list(words), resilient_parsing=True)
    missing = [
        one.name
        for one in command.params
        if one.required and context.params.get(one.name) in (None, ())
    ]
    assert missing == []
    own = words[: words.index("--")] if "--" in words else words
    known = {name for one in command.params for name in one.opts}
    assert [word for word in own if word.startswith("-") and word not in known] == []
