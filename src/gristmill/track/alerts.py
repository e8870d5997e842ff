"""Tells somebody when a run needs them: a command is run, or a URL is posted to, once per reason.

    the records of the run   ─┐
    a thread that counts time ─┼─ Alerts ── one thread for each delivery ─┬─ a command
    the end of the run        ─┘                                         └─ a POST request

The facts are one JSON object, the same for both:

    {"rule": "no_progress", "text": "mini on node7: no step for 10m00s, …", "message": "no step …",
     "run": "mini", "folder": "/runs/mini", "host": "node7", "step": 1200, "steps": 5000,
     "tokens": 9830400, "loss": 3.21, "time": "2026-07-01T09:30:00+02:00"}

Nothing here holds up training or can fail it. What the log says of a delivery names the host that
was posted to and no more, since the rest of an address may be a password.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from gristmill.base.errors import UserError, on_one_line
from gristmill.base.units import Progress, format_bytes, format_seconds, parse_seconds, timestamp
from gristmill.config.track import AlertConfig, check_address, parse_bytes, url_variable
from gristmill.track.records import Record, StepRecord, StragglerRecord
from gristmill.track.sinks import straggler_event

Level = Literal["info", "warning", "error"]
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]*)://\S+", re.IGNORECASE)
Rule = Literal[
    "loss_above",
    "no_progress",
    "disk_below",
    "straggler",
    "diverged",
    "rank_lost",
    "failed",
    "done",
]
"""Why somebody is told, by the name of the setting."""

_ENDS = ("diverged", "rank_lost", "failed", "done")
"""A run ends for one of these reasons."""
_IN_A_ROW = 3
"""Recorded steps whose loss is too high, before that is told: one may be a bad batch."""
_SLOW_PHASE = 3600.0
"""Seconds that compiling, validation, evaluation and saving may take besides."""
_LONGEST_MESSAGE = 4000


class Target(Protocol):
    """Whoever is told."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Tell the facts, or raise `DeliveryError`."""


class DeliveryError(Exception):
    """Nobody was told, for this reason."""


class Alerts:
    """The alerts of one start of a run.

    Each rule tells of itself once, and only the first reason for the end of the run is told. Time
    is counted and deliveries are logged between `attach` and `detach`; a run that goes back to a
    checkpoint is attached again.
    """

    def __init__(
        self,
        config: AlertConfig,
        targets: Sequence[Target],
        *,
        run: str,
        folder: Path,
        steps: int,
        tick: float = 1.0,
        look: float = 60.0,
    ) -> None:
        """`tick` and `look`: seconds between two looks at the progress, and at the disk."""
        self.config, self.targets = config, tuple(targets)
        self.run, self.folder, self.steps = run, folder, steps
        self.tick, self.look = tick, look
        self._told = set[Rule]()
        self._deliveries = list[threading.Thread]()
        self._lock = threading.Lock()
        self._say: Callable[[str, Level], None] = lambda text, level: None
        self._progress: Callable[[], Progress] = Progress
        self._stop = threading.Event()
        self._phase: str | None = None
        self._loss: float | None = None
        self._was_below, self._above = False, 0

    # -------------------------------------------------------------- what the run does

    def attach(
        self, *, say: Callable[[str, Level], None], progress: Callable[[], Progress]
    ) -> None:
        """The run is about to train: begin to count time. `say` writes to its log."""
        self._stop.set()  # whoever was attached before
        self._say, self._progress, self._phase = say, progress, None
        self._was_below, self._above = False, 0
        self._stop = stop = threading.Event()
        watches = []
        if self.config.no_progress is not False:
            watches.append(self._watch_progress)
        if self.config.disk_below is not False:
            watches.append(self._watch_disk)
        for watch in watches:
            threading.Thread(target=watch, args=(stop,), name="alerts", daemon=True).start()

    def detach(self, *, seconds: float) -> None:
        """Stop to count time, and wait for deliveries this long at most."""
        self._stop.set()
        self.wait(seconds)

    def phase(self, name: str) -> None:
        """What the run does from now on: "step", or something that may take long."""
        self._phase = name

    def note(self, record: Record) -> None:
        """Look at a record of the run."""
        if isinstance(record, StepRecord):
            self._note_loss(record.loss)
        elif isinstance(record, StragglerRecord) and not record.over:
            self.tell("straggler", straggler_event(record).text)

    def tell(self, rule: Rule, message: str) -> None:
        """Tell of a reason in the background, unless it was told before or nobody asked for it."""
        with self._lock:
            ended = rule in _ENDS and not self._told.isdisjoint(_ENDS)
            if rule in self._told or ended or getattr(self.config, rule) in (None, False):
                return
            self._told.add(rule)
            facts = self._facts(rule, message)
            for target in self.targets:
                thread = threading.Thread(
                    target=self._deliver, args=(target, facts), name="alert", daemon=True
                )
                self._deliveries.append(thread)
                thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until everything is delivered, this long at most."""
        deadline = time.monotonic() + seconds
        for thread in tuple(self._deliveries):
            thread.join(max(0.0, deadline - time.monotonic()))

    # -------------------------------------------------------------- rules

    def _note_loss(self, loss: float) -> None:
        self._loss, limit = loss, self.config.loss_above
        if limit is None:
            return
        if loss <= limit:
            self._was_below, self._above = True, 0
        else:  # also if it is not a number
            self._above += 1
        if self._was_below and self._above >= _IN_A_ROW:
            self.tell("loss_above", f"the training loss is {loss:.4g}, which is above {limit:g}")

    def _watch_progress(self, stop: threading.Event) -> None:
        assert self.config.no_progress is not False
        limit = parse_seconds(self.config.no_progress)
        tick = min(self.tick, limit / 10)
        stall_timer = StallTimer(
            limit, step=self._progress().steps, tick=tick, now=time.monotonic()
        )
        while not stop.wait(tick):
            step = self._progress().steps
            still = stall_timer.exhausted(step, self._phase, now=time.monotonic())
            if still is not None:
                doing = "" if self._phase is None else f"; it is in the phase {self._phase!r}"
                what = f"no step for {format_seconds(still)}, since step {step}{doing}"
                self.tell("no_progress", what)
                return

    def _watch_disk(self, stop: threading.Event) -> None:
        """In a thread of its own, since a file system that is gone may not answer."""
        assert self.config.disk_below is not False
        limit = parse_bytes(self.config.disk_below)
        while True:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.folder).free
                if free < limit:
                    what = f"{format_bytes(free)} are free on the disk of the run folder, less than"
                    self.tell("disk_below", f"{what} {self.config.disk_below}")
                    return
            if stop.wait(self.look):
                return

    # -------------------------------------------------------------- deliveries

    def _facts(self, rule: Rule, message: str) -> dict[str, Any]:
        now, host, loss = self._progress(), socket.gethostname(), self._loss
        message = message.replace("\0", "")[:_LONGEST_MESSAGE]
        return {
            "rule": rule,
            "text": f"{self.run} on {host}: {message}",
            "message": message,
            "run": self.run,
            "folder": str(self.folder.absolute()),
            "host": host,
            "step": now.steps,
            "steps": self.steps,
            "tokens": now.tokens,
            "loss": loss if loss is None or math.isfinite(loss) else str(loss),
            "time": timestamp(),
        }

    def _deliver(self, target: Target, facts: Mapping[str, Any]) -> None:
        try:
            target.tell(facts)
        except DeliveryError as error:
            what = f"{target.name} could not be told of the alert {facts['rule']}: {error}"
            self._say(what, "warning")
        # Whatever it is: the run is worth more, and a message might repeat an address.
        except Exception as error:
            what = f"{target.name} could not be told of the alert {facts['rule']}"
            self._say(f"{what}: {type(error).__name__}", "warning")
        else:
            self._say(f"{target.name} was told of the alert {facts['rule']}", "info")


class StallTimer:
    """Detects that a run has made no progress for too long.

    Time is counted in small amounts: a process that was stopped, or a machine that slept, finds
    that hardly any has passed. Before the first step, which compiles, and outside of steps the
    limit is an hour longer.
    """

    def __init__(self, limit: float, *, step: int, tick: float, now: float) -> None:
        """It is asked every `tick` seconds."""
        self.limit, self.first, self.most = limit, step, 4 * tick
        self._seen: tuple[int, str | None] = (step, None)
        self._still, self._before = 0.0, now

    def exhausted(self, step: int, phase: str | None, *, now: float) -> float | None:
        """The seconds since the last sign of progress, if they are too many."""
        self._still += min(now - self._before, self.most)
        self._before = now
        if (step, phase) != self._seen:
            self._seen, self._still = (step, phase), 0.0
        steps = step > self.first and phase in (None, "step")
        return self._still if self._still > self.limit + (0 if steps else _SLOW_PHASE) else None


# ------------------------------------------------------------------ a command


class Command:
    """Runs a command, with the facts as JSON on standard input and in variables."""

    name = "alert.command"

    def __init__(self, command: str | tuple[str, ...], *, limit: float = 30.0) -> None:
        """A text is a line for the shell; `limit`: seconds after which it is killed."""
        self.command, self.limit = command, limit
        if not isinstance(command, str) and shutil.which(command[0]) is None:
            raise UserError(
                f"there is no command {on_one_line(command[0])!r}",
                where="alert.command",
                remedy="give its path; as one text, the whole line goes to the shell",
            )

    def tell(self, facts: Mapping[str, Any]) -> None:
        values = {
            f"GRISTMILL_ALERT_{name.upper()}": "" if value is None else str(value)
            for name, value in facts.items()
        }
        data = json.dumps(facts, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        # Into a file: a pipe would stay open for as long as something it left behind runs.
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    self.command,
                    shell=isinstance(self.command, str),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **values},
                    start_new_session=True,
                )
            except OSError as error:
                raise DeliveryError(error.strerror or type(error).__name__) from error
            try:
                process.communicate(data, timeout=self.limit)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                late = f"it took longer than {format_seconds(self.limit)}"
                raise DeliveryError(late) from None
            if process.returncode:
                output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
                said = output.read().decode(errors="replace").split("\n")
                last = next((line for line in reversed(said) if line.strip()), "")
                what = f"it ended with status {process.returncode}"
                raise DeliveryError(f"{what}: {_without_addresses(last)}" if last else what)


def _without_addresses(text: str) -> str:
    """A line of a program, without what may be secret in addresses."""
    return on_one_line(_ADDRESS.sub(r"\1://…", text.strip()))[:200]


# ------------------------------------------------------------------ an address


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any, **named: Any) -> None:
        """Follow nothing: the body would get lost on the way."""


class Webhook:
    """Posts the facts as JSON, and tries again a few times."""

    def __init__(
        self, url: str, *, timeout: float = 10.0, pauses: Sequence[float] = (1.0, 3.0)
    ) -> None:
        parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": "gristmill"}
        if parts.username is not None or parts.password is not None:
            user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            coded = base64.b64encode(user.encode()).decode()
            self._headers["Authorization"] = f"Basic {coded}"
        place = parts.netloc.rpartition("@")[2]
        self._url = urlunsplit((parts.scheme, place, parts.path or "/", parts.query, ""))
        self.name = f"alert.url ({parts.hostname})"
        self.timeout, self.pauses = timeout, tuple(pauses)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def tell(self, facts: Mapping[str, Any]) -> None:
        data = json.dumps(facts).encode()
        for pause in (*self.pauses, None):
            request = urllib.request.Request(self._url, data, self._headers, method="POST")
            try:
                self._opener.open(request, timeout=self.timeout).close()
                return
            except urllib.error.HTTPError as error:
                error.close()
                what = f"it answered {error.code} {on_one_line(str(error.reason))[:100]}"
                again = error.code >= 500 or error.code in (408, 425, 429)
            except urllib.error.URLError as error:
                what, again = f"it cannot be reached ({_why(error.reason)})", True
            except (OSError, HTTPException) as error:
                what, again = f"it cannot be reached ({_why(error)})", True
            if pause is None or not again:
                raise DeliveryError(what)
            time.sleep(pause)


def _why(reason: object) -> str:
    """What went wrong in a connection, in words that hold no address."""
    known = isinstance(reason, OSError) and reason.strerror
    return on_one_line(str(known or type(reason).__name__))


def build_targets(
    config: AlertConfig, *, environment: Mapping[str, str] | None = None
) -> list[Target]:
    """Whoever the settings name; refuses what cannot be told at all."""
    targets: list[Target] = []
    if config.command is not None:
        targets.append(Command(config.command))
    if config.url is not None:
        given = os.environ if environment is None else environment
        targets.append(Webhook(_address(config.url, given)))
    return targets


def _address(url: str, environment: Mapping[str, str]) -> str:
    variable = url_variable(url)
    if variable is None:
        return url
    if not environment.get(variable):
        raise UserError(
            f"the environment variable {variable}, which holds the address, is not set",
            where="alert.url",
            remedy=f"export {variable}=https://… before the run is started",
        )
    try:
        check_address(environment[variable])
    except ValueError as error:
        raise UserError(f"{variable} {error}", where=f"environment {variable}") from None
    return environment[variable]
