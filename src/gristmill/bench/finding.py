"""What a check found, for `gristmill doctor`."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM = 1
"""The exit status of a finding that is not good, where no other says more."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    what: str
    good: bool = True
    remedy: str | None = None
    exit: int = PROBLEM
    """The exit status if it is not good."""


def problem(name: str, what: str, remedy: str, *, exit: int = PROBLEM) -> Finding:
    """A finding that is not good."""
    return Finding(name, what, False, remedy, exit)
