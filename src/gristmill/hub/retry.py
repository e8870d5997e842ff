"""Retries of requests after transient errors, with exponential backoff."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gristmill.base.errors import DataError
from gristmill.hub.client import tell_wait
from gristmill.hub.objects import TransientError

ATTEMPTS = 6
"""Failures in a row, without a byte received, after which to give up."""
FIRST_WAIT = 1.0
"""Seconds; doubled after each attempt."""
_LONGEST_WAIT = 60.0
Result = TypeVar("Result")


class Retries:
    """Waits after each failure, and gives up after too many in a row."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._attempts = 0

    def renew(self) -> None:
        """Something succeeded: count failures from zero again."""
        self._attempts = 0

    def wait(self, error: TransientError) -> None:
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


def with_retries(call: Callable[[], Result], name: str) -> Result:
    """Call until it succeeds, or until it has failed too often."""
    retries = Retries(name)
    while True:
        try:
            return call()
        except TransientError as error:
            retries.wait(error)
