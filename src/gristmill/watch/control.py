"""Requests to a run, written as files that its rank 0 reads.

    runs/NAME/requests/20261119-041500-1a2b3c4d.json
        {"action": "until", "until": "20k steps", "asked": "2026-11-19T04:15:00", "by": "…"}

The run writes into its log what it did. This module only ever adds files to `requests/`.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError
from gristmill.base.files import write_json
from gristmill.base.units import Duration, timestamp
from gristmill.track.requests import ACTIONS
from gristmill.watch.run import WatchedRun
from gristmill.web.call import Call
from gristmill.web.fields import Fields
from gristmill.web.refusals import RefusalError, bad_request, bad_value

MOST_WAITING = 16
"""Requests of a run that may wait to be read."""


class Control:
    """Whether the page may ask anything of runs, and with which token."""

    def __init__(self, *, allowed: bool) -> None:
        self.token = secrets.token_urlsafe(24) if allowed else None

    def check(self, call: Call) -> None:
        """Refuse who may only look."""
        if self.token is None:
            what = "this page only shows runs; `gristmill watch --control` allows actions"
            raise RefusalError(403, what, code="no_control")
        scheme, _, given = call.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
        if not same or scheme.lower() != "bearer":
            what = "actions need the token in the address that `gristmill watch --control` printed"
            raise RefusalError(403, what, code="wrong_token")


def parse_action(body: dict[str, Any]) -> dict[str, str]:
    """The request of an action, without who asks and when."""
    fields = Fields(body)
    action = fields.text("action")
    if action not in ACTIONS:
        raise fields.wrong("action", f"one of {', '.join(ACTIONS)}")
    if action != "until":
        return {"action": action}
    until = fields.text("until")
    if until is None:
        raise fields.wrong("until", 'a horizon such as "20k steps"')
    try:
        horizon = Duration.parse(until)
    except UserError as error:
        raise bad_value(error, param="until") from None
    if horizon.amount <= 0:
        raise bad_request("until must be more than nothing", param="until")
    return {"action": action, "until": str(horizon)}


def request_action(run: WatchedRun, request: dict[str, str]) -> Path:
    """Ask a run for something; returns the file."""
    state = run.row.get("state")
    if state not in ("running", "silent"):
        what = f"{run.name} does not train: it is {state}"
        raise RefusalError(409, what, code="not_running")
    folder = run.folder.path / "requests"
    try:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "requests/ is a link")
        waiting = [name for name in os.listdir(folder) if not name.startswith(".")]
        if len(waiting) >= MOST_WAITING:
            what = f"{len(waiting)} requests wait for {run.name} already"
            raise RefusalError(409, what, code="too_many")
        file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.json"
        by = f"the live page on {socket.gethostname()}"
        write_json(file, {**request, "asked": timestamp(), "by": by})
    except OSError as error:
        what = f"the request could not be written: {error.strerror}"
        raise RefusalError(500, what, code="storage") from error
    except UserError as error:
        raise RefusalError(500, "; ".join(one.what for one in error.problems)) from error
    return file
