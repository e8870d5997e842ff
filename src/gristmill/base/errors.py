"""Errors that the user can fix, and the exit status of every command.

The command line prints the problems of a `UserError` without a traceback and exits with its status.
What only a programmer can break is an `assert` instead. Any other exception is a defect, which the
command line shows with a traceback and `Exit.INTERNAL`.
"""

from __future__ import annotations

import enum
import importlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


class Exit(enum.IntEnum):
    """Exit statuses of every command, after the BSD `sysexits` where one fits."""

    meaning: str
    """A few words for messages."""

    def __new__(cls, status: int, meaning: str = "") -> Exit:
        member = int.__new__(cls, status)
        member._value_, member.meaning = status, meaning
        return member

    DONE = 0, "done"
    """All that was asked for is done."""
    USAGE = 2, "wrong command line"
    """The command line itself could not be read."""
    DATA = 65, "bad data"
    """Input data (text, token files, a tokenizer) is missing or damaged."""
    INTERNAL = 70, "a defect"
    """A defect of the program, with a traceback. The last line names it, and the log if there is
    one: please report it, with the command."""
    DEVICE = 71, "a faulty device"
    """Two computations that must agree to the bit do not: a device or its memory is faulty."""
    STORAGE = 74, "storage"
    """The disk refused: full, read-only, or every checkpoint is damaged."""
    STOPPED = 75, "stopped and saved"
    """Stopped on request with everything saved; run the same command again to
    resume."""
    PEER = 76, "another process was lost"
    """Another process of the run was lost or hung."""
    REFUSED = 77, "refused for safety"
    """Refused for safety, for example a second process in the same run folder."""
    CONFIG = 78, "wrong settings"
    """A setting is wrong; nothing was started."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it was found, and how to fix it."""

    what: str
    where: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        text = f"{on_one_line(self.where)}: {self.what}" if self.where else self.what
        return printable(f"{text}\n    {self.remedy}" if self.remedy else text)


class UserError(Exception):
    """One or more problems that the user can fix."""

    exit = Exit.CONFIG

    def __init__(
        self,
        what: str | Iterable[Problem],
        *,
        where: Path | str | None = None,
        remedy: str | None = None,
        exit: Exit | None = None,
    ) -> None:
        place = None if where is None else str(where)
        self.problems = [Problem(what, place, remedy)] if isinstance(what, str) else list(what)
        assert self.problems, "a UserError needs at least one problem"
        self.exit = self.exit if exit is None else exit
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(UserError):
    """Data that is read (text, token files, a tokenizer, a checkpoint) is missing or damaged."""

    exit = Exit.DATA


def optional(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a package that only an extra installs, or name the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {module.split('.')[0]!r}, which is not installed",
            remedy=f"pip install 'gristmill[{extra}]'",
        ) from error


def printable(text: str) -> str:
    """The text without characters that could control a terminal; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        else character
        for character in text
    )


def on_one_line(text: str) -> str:
    """The text on one line: what cannot be printed is written as its escape sequence."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
