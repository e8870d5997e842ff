"""Findings of the checks of `gristmill doctor`."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM = 1
"""The exit status of a problem without a more specific one."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    what: str
    good: bool = True
    remedy: str | None = None
    exit: int = PROBLEM
    """The exit status if the finding is a problem."""


def problem(name: str, what: str, remedy: str, *, exit: int = PROBLEM) -> Finding:
    """A finding that reports a problem."""
    return Finding(name, what, False, remedy, exit)
