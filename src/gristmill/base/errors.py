"""Errors that the user can fix, and the exit status of every command.

A `UserError` carries one or more problems, each with three parts: what is wrong, where, and what to
do about it. The command line prints them without a traceback and exits with the error's status.
What only a programmer can break is an `assert` instead. Any other exception is a defect, which the
command line shows with a traceback and `Exit.INTERNAL`.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


class Exit(enum.IntEnum):
    """Exit statuses of every command, after the BSD `sysexits` where one fits."""

    DONE = 0
    """All that was asked for is done."""
    USAGE = 2
    """The command line itself could not be read."""
    DATA = 65
    """Input data (text, token files, a tokenizer) is missing or damaged."""
    INTERNAL = 70
    """A defect of the program, with a traceback. The last line names it, and the log if there is
    one: please report it, with the command."""
    STORAGE = 74
    """The disk refused: full, read-only, or every checkpoint is damaged."""
    STOPPED = 75
    """Stopped on request with everything saved; run the same command again to resume."""
    PEER = 76
    """Another process of the run was lost or hung."""
    REFUSED = 77
    """Refused for safety, for example a second process in the same run folder."""
    CONFIG = 78
    """A setting is wrong; nothing was started."""

    @property
    def meaning(self) -> str:
        """A few words for messages."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done",
    Exit.USAGE: "wrong command line",
    Exit.DATA: "bad data",
    Exit.INTERNAL: "a defect",
    Exit.STORAGE: "storage",
    Exit.STOPPED: "stopped and saved",
    Exit.PEER: "another process was lost",
    Exit.REFUSED: "refused for safety",
    Exit.CONFIG: "wrong settings",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it was found, and how to fix it."""

    what: str
    where: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n    {self.remedy}" if self.remedy else text


class UserError(Exception):
    """One or more problems that the user can fix."""

    def __init__(
        self,
        what: str | Iterable[Problem],
        *,
        where: str | None = None,
        remedy: str | None = None,
        exit: Exit = Exit.CONFIG,
    ) -> None:
        self.problems = [Problem(what, where, remedy)] if isinstance(what, str) else list(what)
        assert self.problems, "a UserError needs at least one problem"
        self.exit = exit
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(UserError):
    """Input data (text, token files, a tokenizer) is missing or damaged."""

    def __init__(
        self,
        what: str | Iterable[Problem],
        *,
        where: Path | str | None = None,
        remedy: str | None = None,
    ) -> None:
        place = None if where is None else str(where)
        super().__init__(what, where=place, remedy=remedy, exit=Exit.DATA)


def optional(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a package that only an extra installs, or name the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {module.split('.')[0]!r}, which is not installed",
            remedy=f"pip install 'gristmill[{extra}]'",
        ) from error
