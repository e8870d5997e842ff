"""Trying again, with growing waits, what may pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gristmill.base.errors import DataError
from gristmill.hub.client import tell_wait
from gristmill.hub.objects import PassingError

ATTEMPTS = 6
"""In a row, without a byte."""
FIRST_WAIT = 1.0
"""Seconds; doubled after each attempt."""
_LONGEST_WAIT = 60.0
Result = TypeVar("Result")


class Patience:
    """Waits after a failure, unless there were too many in a row."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._attempts = 0

    def renew(self) -> None:
        """Something went well."""
        self._attempts = 0

    def wait(self, error: PassingError) -> None:
        """Wait before the next attempt, or give up."""
        self._attempts += 1
        if self._attempts == ATTEMPTS:
            raise DataError(
                f"this cannot be reached: {error.what}; tried {ATTEMPTS} times in a row",
                where=self._name,
                remedy="check the network, then start the same command again: it resumes",
            ) from None
        seconds = FIRST_WAIT * 2.0 ** (self._attempts - 1) if error.wait is None else error.wait
        seconds = min(seconds, _LONGEST_WAIT)
        tell_wait(error.what, seconds, who=self._name)
        time.sleep(seconds)


def patiently(call: Callable[[], Result], name: str) -> Result:
    """Call until it goes well, or until there were too many failures."""
    patience = Patience(name)
    while True:
        try:
            return call()
        except PassingError as error:
            patience.wait(error)
