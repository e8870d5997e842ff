"""What others ask of a run while it trains: files in `requests/`, such as the live page writes.

    requests/NAME.json   {"action": "stop" | "save" | "validate" | "until", "until": "20k steps",
                          "by": "…"}

Rank 0 reads a request, removes its file, and tells all processes in the sum that every step
all-reduces anyway. They act after the same step: the first by which all have read that sum.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gristmill.base.errors import UserError, on_one_line
from gristmill.base.units import Duration

Action = Literal["stop", "save", "validate", "until"]
ACTIONS: tuple[Action, ...] = get_args(Action)
_LARGEST = 1 << 16
_LONGEST = 200


@dataclass(frozen=True)
class RunRequest:
    """Something that is asked of a run."""

    action: Action
    until: str | None = None
    """The new horizon."""
    by: str = "somebody"

    def __str__(self) -> str:
        what = {
            "stop": "to stop",
            "save": "to save a checkpoint",
            "validate": "to validate",
            "until": f"to train until {self.until}",
        }
        return f"{self.by} asked {what[self.action]}"


def parse_request(text: bytes) -> RunRequest:
    """The request in a file; a `ValueError` says what is wrong with it."""
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("action") not in ACTIONS:
        raise ValueError(f"the action must be one of {', '.join(ACTIONS)}")
    until, by = value.get("until"), value.get("by", "somebody")
    if value["action"] == "until":
        if not isinstance(until, str) or not Duration.matches(until):
            raise ValueError('`until` must be a horizon such as "20k steps" or "1B tokens"')
        until = str(Duration.parse(until))
    return RunRequest(value["action"], until, on_one_line(str(by))[:_LONGEST])


class RequestBox:
    """The request that a run is to fulfil next; filled by one thread, emptied by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._request: RunRequest | None = None
        self._flagged = False

    def put(self, request: RunRequest) -> bool:
        """Whether there was room for it."""
        with self._lock:
            if self._request is not None:
                return False
            self._request, self._flagged = request, False
            return True

    def flag(self) -> bool:
        """Whether the other processes are to be told in this step: only once for a request, so
        that all of them act after the same step."""
        with self._lock:
            flags = self._request is not None and not self._flagged
            self._flagged = self._flagged or flags
            return flags

    def unflag(self) -> None:
        """Tell the others again: the step in which they were told is taken back."""
        with self._lock:
            self._flagged = False

    def take(self) -> RunRequest | None:
        with self._lock:
            request, self._request = self._request, None
            return request


def read_requests(folder: Path, box: RequestBox, *, refuse: Callable[[str], None]) -> None:
    """Take the oldest request of a folder that can be taken now, and remove its file. `refuse` is
    called with what is wrong with one."""
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except OSError:
        return  # there is no such folder: nobody asks
    for file in files:
        if file.name.startswith("."):
            continue
        try:
            with file.open("rb") as opened:
                request = parse_request(opened.read(_LARGEST))
        except (OSError, ValueError, RecursionError, UserError) as error:
            file.unlink(missing_ok=True)
            refuse(f"a request in {folder.name}/ was refused: {on_one_line(str(error))[:_LONGEST]}")
            continue
        if not box.put(request):
            return
        file.unlink(missing_ok=True)


def as_message(request: RunRequest | None) -> dict[str, Any] | None:
    """A request as the control group sends it."""
    return None if request is None else vars(request)
