"""One run that is watched: its digest as its file grows, and its row in the list.

A long file is read in slices over seconds or minutes. Until that is done, a digest of a few hundred
lines from all over the file stands in for it, so that every curve is there at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError
from gristmill.base.units import Duration, Unit
from gristmill.config.track import without_address
from gristmill.report.plots import DigestLimits, RunDigest
from gristmill.report.reading import ERROR
from gristmill.track.account import RunTime, read_run_time
from gristmill.track.folder import RunFolder
from gristmill.watch.folders import FoundRun
from gristmill.watch.following import Follower, LineIndex
from gristmill.watch.regular import is_regular, read_regular

LIMITS = DigestLimits(
    steps=1536,
    others=384,
    values=500,
    samples=0,
    newest_samples=3,
    sample_places=1000,
    events=200,
    stragglers=100,
)
_FULL_RUNS = 150
"""If there are more runs, fewer buckets are kept of each."""
_FEWEST_BUCKETS = 192
_SAMPLED_PLACES = 128
_SAMPLED_TAIL = 1 << 16
SLICE = 1 << 17
"""Bytes that are read at a time."""
SILENT_SECONDS = 300.0
"""A run that says that it runs, but wrote nothing for so long, is silent."""
_GONE_SECONDS = 30.0
"""The same where its process is known to have ended."""
_MOST_BYTES = 1 << 22
"""Of a small file: more is not looked at."""
_STATES = ("running", "done", "stopped", "failed")


def limits_for(runs: int) -> DigestLimits:
    """What is kept of each of so many runs."""
    steps = LIMITS.steps
    while runs > _FULL_RUNS and steps > _FEWEST_BUCKETS:
        steps, runs = steps // 2, runs // 2
    return replace(LIMITS, steps=steps, others=min(LIMITS.others, steps))


class WatchedRun:
    """A run folder, as far as it was read. `lock` is held by whoever reads or changes it."""

    def __init__(self, found: FoundRun, *, limits: DigestLimits = LIMITS) -> None:
        self._limits = limits
        self.id, self.name, self.folder = found.id, found.name, RunFolder(found.path)
        self.lock = threading.Lock()
        self.epoch = 0
        """How often the digest was begun: what was drawn of another is no longer true."""
        self.revision = 0
        """Grows with everything that changes."""
        self.read_share = 0.0
        self.unread = True
        """Whether there may be lines that were not read."""
        self.row: dict[str, Any] = {"id": found.id}
        self.flops_per_token: float | None = None
        self.follower = Follower(self.folder.metrics)
        self._preview: RunDigest | None = None
        self._damaged = 0
        self._files: dict[Path, tuple[float, int, Any]] = {}
        self._begin_digest()

    def _begin_digest(self) -> None:
        self.epoch += 1
        self._damaged = 0
        self._digest = RunDigest(damaged=self._count_damaged, limits=self._limits)
        self.index = LineIndex()

    def _count_damaged(self, number: int, why: str) -> None:
        self._damaged += 1

    @property
    def damaged(self) -> int:
        """Lines that cannot be read."""
        return self._damaged + self.follower.skipped

    @property
    def digest(self) -> RunDigest:
        """What the run's curves are; before all was read, an approximation."""
        return self._digest if self._preview is None else self._preview

    @property
    def generation(self) -> int:
        """Another one for each digest that is shown."""
        return 2 * self.epoch + (self._preview is not None)

    # ------------------------------------------------------------------ reading

    def look(self) -> bool:
        """See whether files have changed; whether there is something to read."""
        self.unread = self.follower.look() or self.unread
        return self.unread

    def sample(self) -> bool:
        """If there is much to read, read a little from all over the file first."""
        begun = self.follower.offset > SLICE
        if begun or self._preview is not None or self.follower.size < 8 * SLICE:
            return False
        preview = RunDigest(limits=self._limits)
        if lines := b"".join(self.follower.sampled(_SAMPLED_PLACES, _SAMPLED_TAIL)):
            preview.add_lines(lines)
        with self.lock:
            self._preview = preview
            self.revision += 1
        return True

    def read(self) -> bool:
        """Read one slice; whether there was anything."""
        with self.lock:
            piece = self.follower.read(SLICE)
            if piece is None:
                self.unread = False
                if self._preview is not None or self.read_share < 1.0:
                    self._preview = None
                    self.revision += 1
                self.read_share = 1.0
                return False
            if piece.restarted:
                self._preview = None
                self._begin_digest()
            if piece.data:
                digest = self._digest
                place = (float(digest.step), float(digest.tokens), digest.seconds)
                self.index.add(piece.offset, place, digest.time)
                digest.add_lines(piece.data, offset=piece.offset)
            self.read_share = piece.end / max(self.follower.size, piece.end, 1)
            if self._preview is None:
                self.revision += 1
            elif piece.end >= self.follower.size:
                self._preview = None
                self.revision += 1
        if piece.restarted:
            self.sample()
        return True

    # ------------------------------------------------------------------ small files

    def file(self, path: Path, parse: Any) -> Any:
        """What a small file holds, read again when it has changed; None if it is missing or
        damaged."""
        if not is_regular(path):
            self._files.pop(path, None)
            return None
        try:
            facts = path.stat()
        except OSError:
            return None
        known = self._files.get(path)
        if known is not None and known[:2] == (facts.st_mtime, facts.st_size):
            return known[2]
        value = None
        with contextlib.suppress(OSError, ValueError, RecursionError, UserError):
            if facts.st_size <= _MOST_BYTES:
                value = parse(path)
        self._files[path] = (facts.st_mtime, facts.st_size, value)
        return value

    def json(self, path: Path) -> dict[str, Any]:
        """A JSON object in a file; empty if there is none."""
        value = self.file(path, lambda path: json.loads(read_regular(path)))
        return value if isinstance(value, dict) else {}

    def settings(self) -> dict[str, Any]:
        """The settings of the run; empty if they cannot be read."""
        value = self.file(self.folder.settings, _toml)
        return value if isinstance(value, dict) else {}

    def run_time(self) -> RunTime | None:
        """Where the wall time of the run went."""
        value = self.file(self.folder.path / "time.jsonl", read_run_time)
        return value if isinstance(value, RunTime) else None

    # ------------------------------------------------------------------ the row

    def update_row(self) -> bool:
        """Sum the run up in a row; whether anything is new."""
        status, account = self.json(self.folder.status), self.run_time()
        environment = self.json(self.folder.environment)
        settings = self.settings()
        state, reason = self._state(status)
        with self.lock:
            digest = self.digest
            summary = digest.summary()
            flops = _flops_per_token(environment)
            if flops != self.flops_per_token:
                self.flops_per_token = flops
                self.revision += 1
            steps = _horizon(status, settings, digest)
            pace = digest.pace()
            eta = None
            if state == "running" and steps is not None and pace is not None:
                eta = round(max(0, steps - digest.step) * pace)
            row = {
                "id": self.id,
                "name": self.name,
                "folder": str(self.folder.path),
                "state": state,
                "reason": reason,
                "step": digest.step,
                "steps": steps,
                "tokens": digest.tokens,
                "seconds": round(digest.seconds, 3),
                "loss": _short(summary["train_loss"]),
                "validation": _short(summary["best_loss"]),
                "tokens_per_second": _short(digest.recent("tokens_per_second")),
                "mfu": _short(digest.recent("mfu")),
                "eta": eta,
                "goodput": _short(account.goodput) if account else None,
                "updated": _short_time(digest.time or self.follower.changed or None),
                "read": int(100 * self.read_share) / 100,
                "revision": self.revision,
                "names": sorted(
                    curve_name(group, name)
                    for group, curves in digest.groups.items()
                    for name in curves.names
                    if name != ERROR
                ),
            }
        new = row != self.row
        self.row = row
        return new

    def _state(self, status: dict[str, Any]) -> tuple[str, str | None]:
        state = status.get("state")
        state = state if state in _STATES else "unknown"
        words = (status.get("reason"), status.get("error"))
        reason = next((word for word in words if isinstance(word, str)), None)
        if state == "running" and self._is_silent():
            return "silent", reason
        return state, reason

    def _is_silent(self) -> bool:
        newest = 0.0
        for name in ("metrics.jsonl", "status.json", "train.log", "processes.json", "time.jsonl"):
            with contextlib.suppress(OSError):
                newest = max(newest, (self.folder.path / name).stat().st_mtime)
        quiet = time.time() - newest
        if quiet > SILENT_SECONDS:
            return not _is_locked_here(self.folder.lock)
        return quiet > _GONE_SECONDS and _has_ended_here(self.folder.lock)


def curve_name(group: str, name: str) -> str:
    """What a curve is called: the value of an evaluation by the evaluation alone."""
    return group.removesuffix(".") if group.startswith("evaluation.") else group + name


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(without_address(read_regular(path).decode()))


def _flops_per_token(environment: dict[str, Any]) -> float | None:
    for name, factor in (("flops_per_token", 1.0), ("parameters", 6.0)):
        value = environment.get(name)
        if isinstance(value, int | float) and 0 < value < 1e300:
            return float(value) * factor
    return None


def _horizon(status: dict[str, Any], settings: dict[str, Any], digest: RunDigest) -> int | None:
    """How many steps the run shall take: by its own account, or by its settings."""
    steps = status.get("steps")
    if type(steps) is int and steps >= 0:
        return steps
    train = settings.get("train")
    until = train.get("until") if isinstance(train, dict) else None
    if not isinstance(until, str) or not Duration.matches(until):
        return None
    try:
        horizon = Duration.parse(until)
    except UserError:
        return None
    if horizon.unit is Unit.STEPS:
        return horizon.amount
    if horizon.unit is Unit.TOKENS and digest.tokens:
        return round(horizon.amount * digest.step / digest.tokens)
    return None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _short_time(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


# ------------------------------------------------------------------ who has the folder


def _holder(lock: Path) -> tuple[int, str] | None:
    """The process that locked a folder last, and its host: `process 7 on node3`."""
    try:
        words = read_regular(lock, most=1024).decode(errors="replace").split()
    except OSError:
        return None
    if len(words) == 4 and words[0] == "process" and words[1].isdigit():
        return int(words[1]), words[3]
    return None


def _has_ended_here(lock: Path) -> bool:
    """Whether a process of this machine had the folder and is no more."""
    holder = _holder(lock)
    if holder is None or holder[1] != socket.gethostname():
        return False
    return not Path(f"/proc/{holder[0]}").exists() and os.path.isdir("/proc/self")


def _is_locked_here(lock: Path) -> bool:
    """Whether a process of this machine holds the lock. It is not tried: that would keep a run from
    starting at that moment."""
    try:
        facts = lock.stat()
        name = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
        return any(name in line.split() for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False
