"""What the help of each command ends with: examples that the command understands."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from gristmill.cli.main import load_verb
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
