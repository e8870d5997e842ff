"""Where the wall time of a run went, over all its restarts: `time.jsonl`.

One line for each checkpoint and the end of an attempt, and one that is replaced every ten seconds.
An attempt begins when a process starts, and each time that a run goes back to a checkpoint.

    {"began": 1763…, "first": 500, "step": 1000, "parts": {"start": 9.1, "compute": 250.3, …}, …}

    began    when the attempt began, in seconds since 1970; it has lasted for the sum of its parts
    queued   since when its job had waited for a machine, null if it was not submitted as a job
    first    the step at which it began
    step     the step that it had reached
    parts    seconds spent in each part: exactly one part at any time
    joules   energy of GPUs and CPUs so far, of those that tell; null if none does
    end      how it ended: done, stopped, failed; null while it runs, and for ever if it was killed

The parts of a step are measured on the device, which works behind the host. Host time that was
spent on steps is divided in their proportion, so the parts add up.

Read together, the attempts tell three more parts. What an attempt trained after the step at which a
later one began was lost. Between the end of an attempt and the beginning of the next the run was in
a queue, or down. If it was stopped on purpose, that time is not part of its wall time.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PARTS = {
    "compute": "forward and backward",
    "communication": "waiting for other processes",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "start": "start",
    "restart": "starts after an interruption",
    "compile": "compiling",
    "validation": "validation",
    "evaluation": "evaluation",
    "samples": "samples",
    "save": "saving checkpoints",
    "check": "checks",
    "lost": "steps lost to interruptions",
    "down": "down",
    "queue": "in the queue",
}
"""The parts of a run's wall time, and what they are called."""
STEP_PARTS = ("compute", "communication", "optimizer", "data", "compile")
"""The parts of the time that is spent on steps."""
_TRAINED = ("compute", "communication", "optimizer")
_LOST = (*_TRAINED, "data")
_EVERY = 10.0
"""Seconds after which the last line is replaced."""
_PHASES = {"content check": "check", "comparison": "check", "end": "save", "step": "steps"}
End = Literal["done", "stopped", "failed"]


class WallAccount:
    """The account of this process. It charges the time to one part after the other."""

    def __init__(self, path: Path | None, *, began: float, queued: float | None = None) -> None:
        """`path`: the file; None for a process that only measures. `began`: when this process, or
        the job around it, began."""
        self.path, self.began, self.queued = path, began, queued
        self.joules: Callable[[], float | None] = lambda: None
        """The energy of all hosts so far, None if nothing tells."""
        self._parts: dict[str, float] = {"start": max(0.0, time.time() - began)}
        self._steps: dict[str, float] = {}
        """What the device measured."""
        self._host = 0.0
        """Seconds that the host spent on steps."""
        self._part, self._since = "start", time.monotonic()
        self._first = self._size = self._kept = 0
        self._written = -math.inf

    # ------------------------------------------------------------------ measuring

    def phase(self, name: str) -> None:
        """Charge the time from now on to a part: one of `PARTS`, "steps", or a phase of the run."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        if self._part == "steps":
            self._host += passed
        else:
            self._parts[self._part] = self._parts.get(self._part, 0.0) + passed
        self._part = _PHASES.get(name, name)

    def add_step(self, parts: Mapping[str, float]) -> None:
        """Add what a step took by the device's clock."""
        for name, seconds in parts.items():
            self._steps[name] = self._steps.get(name, 0.0) + seconds

    def parts(self) -> dict[str, float]:
        """Seconds of each part so far; their sum is the time since the beginning."""
        self.phase(self._part)
        parts, measured = dict(self._parts), sum(self._steps.values())
        # No step has been measured yet: its time may still be that of compiling.
        shares = self._steps if measured else {"compute": 1.0}
        for name, seconds in shares.items():
            share = self._host * seconds / (measured or 1.0)
            parts[name] = parts.get(name, 0.0) + share
        return parts

    # ------------------------------------------------------------------ writing

    def begin(self, step: int) -> None:
        """An attempt begins at a step: the first of this process, or one that goes back. If
        another process led the run meanwhile, what it wrote counts."""
        now, last = self.began + sum(self.parts().values()), self.began
        if self.path is not None:
            with contextlib.suppress(OSError):
                last = max((line.time for line in _read(self.path)), default=last)
        if last > self.began or self._kept:
            self.began, self.queued = min(now, max(last, self.began)), None
            self._parts, self._steps, self._host = {}, {}, 0.0
            self._parts["start"] = now - self.began
        self._part, self._first, self._kept = "start", step, 0
        self._size = -1  # to be looked at
        self.write(step, keep=True)

    def note(self, step: int, *, keep: bool = False) -> None:
        """Write where the run is, once in a while and to `keep` it."""
        if keep or time.monotonic() - self._written > _EVERY:
            self.write(step, keep=keep)

    def write(self, step: int, *, keep: bool = False, end: End | None = None) -> None:
        """Write the account. A line that is not kept is replaced by the next. A disk that refuses
        it must not cost the run: the next line tells the same."""
        self._written = time.monotonic()
        if self.path is None:
            return
        line = {
            "began": round(self.began, 3),
            "queued": self.queued,
            "first": self._first,
            "step": step,
            "parts": {name: round(seconds, 3) for name, seconds in self.parts().items()},
            "joules": self.joules(),
            "end": end,
        }
        data = json.dumps(line).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.path.touch()
            with self.path.open("r+b") as file:
                size = file.seek(0, 2)
                if size != self._size:
                    file.seek(0)
                    self._kept = file.read().rfind(b"\n") + 1
                file.seek(self._kept)
                file.write(data)
                file.truncate()
            self._size = self._kept + len(data)
            self._kept += len(data) if keep or end else 0


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Line:
    began: float
    queued: float | None
    first: int
    step: int
    parts: dict[str, float]
    joules: float | None
    end: str | None

    @property
    def time(self) -> float:
        return self.began + sum(self.parts.values())


@dataclass(frozen=True)
class RunTime:
    """Where the wall time of a run went."""

    wall: float
    """Seconds from its beginning to the last that is known, without those in which it was stopped
    on purpose."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of `PARTS` that took any; they add up to the wall time."""
    kwh: float | None = None
    """Energy of the GPUs and CPUs that tell."""
    attempts: int = 1
    """How often it was started or went back."""

    @property
    def goodput(self) -> float | None:
        """The share of the wall time that trained steps which were kept."""
        trained = sum(self.parts.get(name, 0.0) for name in _TRAINED)
        return trained / self.wall if self.wall > 0 and trained else None

    def table(self) -> list[tuple[str, float, float]]:
        """What each part is called, its seconds and its share, the largest first."""
        rows = [(PARTS.get(name, name), s, s / self.wall) for name, s in self.parts.items() if s]
        return sorted(rows, key=lambda row: -row[1])


def read_run_time(path: Path) -> RunTime | None:
    """The account in a file; None if there is none. Lines that cannot be read are left out."""
    try:
        attempts = _by_attempt(_read(path))
    except OSError:
        return None
    if not attempts:
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    later, joules = math.inf, list[float]()
    for number in reversed(range(len(attempts))):
        lines = attempts[number]
        last = lines[-1]
        for name, seconds in last.parts.items():
            name = "restart" if name == "start" and number else name
            parts[name if name in parts else "check"] += seconds
        if last.step > later:
            kept = _at_step(lines, int(later))
            for name in _LOST:
                lost = max(0.0, last.parts.get(name, 0.0) - kept.get(name, 0.0))
                parts[name] -= lost
                parts["lost"] += lost
        later = min(later, last.first)
        # Energy is counted per process: a rollback goes on counting.
        if last.joules is not None and (
            number + 1 == len(attempts) or (attempts[number + 1][0].joules or 0.0) < last.joules
        ):
            joules.append(last.joules)
        before = attempts[number - 1][-1] if number else None
        for name, seconds in _between(before, lines[0]).items():
            parts[name] += seconds
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    kwh = sum(joules) / 3.6e6 if joules else None
    return RunTime(sum(parts.values()), parts, kwh, len(attempts))


def _between(before: _Line | None, line: _Line) -> dict[str, float]:
    """What the time before an attempt was."""
    end = line.began if before is None else min(before.time, line.began)
    if before is None and line.queued is not None:
        end = min(line.queued, line.began)
    waited = 0.0 if line.queued is None else line.began - max(end, min(line.queued, line.began))
    rest = line.began - end - waited
    # A run that was stopped on purpose was not down.
    on_purpose = before is None or before.end in ("done", "stopped")
    return {"queue": waited, "down": 0.0 if on_purpose else rest}


def _at_step(lines: list[_Line], step: int) -> Mapping[str, float]:
    """The parts of an attempt when it had reached a step, between two lines in proportion."""
    before, after = lines[0], lines[-1]
    for line in lines:
        if line.step <= step:
            before = line
        else:
            after = line
            break
    if before.step >= step or after.step <= before.step:
        return before.parts if before.step <= step else {}
    share = (step - before.step) / (after.step - before.step)
    return {
        name: before.parts.get(name, 0.0) + share * (seconds - before.parts.get(name, 0.0))
        for name, seconds in after.parts.items()
    }


def _by_attempt(lines: Iterable[_Line]) -> list[list[_Line]]:
    attempts = list[list[_Line]]()
    for line in lines:
        if attempts and attempts[-1][-1].began == line.began:
            attempts[-1].append(line)
        else:
            attempts.append([line])
    return attempts


def _read(path: Path) -> list[_Line]:
    lines = list[_Line]()
    for text in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            lines.append(_line(json.loads(text)))
    return lines


def _line(value: Mapping[str, Any]) -> _Line:
    parts = {str(name): _seconds(seconds) for name, seconds in value["parts"].items()}
    queued, joules = value.get("queued"), value.get("joules")
    return _Line(
        _seconds(value["began"]),
        None if queued is None else _seconds(queued),
        int(value["first"]),
        int(value["step"]),
        parts,
        None if joules is None else _seconds(joules),
        value.get("end"),
    )


def _seconds(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError("no time")
    return number
