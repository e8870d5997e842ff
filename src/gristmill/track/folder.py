"""The run folder: where everything that one run leaves behind lies.

    runs/NAME/
    ├── run.toml            the complete settings, runs again as it is
    ├── origin.txt          the command as typed
    ├── environment.json    versions, commit, host, device
    ├── train.log           the run in lines for people
    ├── metrics.jsonl       the run in records for programs
    ├── status.json         how the run stands
    ├── tokenizer/          the tokenizer the run was trained with
    ├── checkpoints/        step-00012000/ and its like
    ├── evals/ · samples/   results and texts
    ├── logs/               rank-00001.log and its like: what processes beside the first print
    ├── report.html         the page made from all this
    └── .lock               held by the process that trains

This module names the places and knows the format of `status.json` only; every other format belongs
to the module that writes it. Of checkpoints it knows the names of their folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from gristmill.base.files import FolderLock, read_json, storage_errors, write_json
from gristmill.config.schema import RunConfig

State = Literal["running", "done", "stopped", "failed"]
_STEP = re.compile(r"step-(\d{8,})")
_TAIL = 1 << 16
"""Bytes of the metrics that are searched for the last record."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def settings(self) -> Path:
        """The complete settings; its presence makes the folder a run."""
        return self.path / "run.toml"

    @property
    def origin(self) -> Path:
        """The command as typed, and its translation if it came from a dialect."""
        return self.path / "origin.txt"

    @property
    def environment(self) -> Path:
        """Versions, commit, host and device."""
        return self.path / "environment.json"

    @property
    def log(self) -> Path:
        """The run in lines for people."""
        return self.path / "train.log"

    @property
    def metrics(self) -> Path:
        """The run in records for programs, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:
        """How the run stands."""
        return self.path / "status.json"

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        """The folder of the step folders."""
        return self.path / "checkpoints"

    @property
    def evals(self) -> Path:
        """The folder of evaluation results."""
        return self.path / "evals"

    @property
    def samples(self) -> Path:
        """The folder of generated texts."""
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        """The folder of what processes print that have no terminal of their own."""
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        """What one process prints."""
        return self.logs / f"rank-{rank:05d}.log"

    @property
    def report(self) -> Path:
        """The page with the curves."""
        return self.path / "report.html"

    @property
    def lock(self) -> Path:
        """The file that the training process holds locked."""
        return self.path / ".lock"

    def create(self) -> bool:
        """Make the folder and its subfolders; those that exist are left as they are. Whether the
        folder is new."""
        new = not self.path.exists()
        for folder in (self.path, self.checkpoints, self.evals, self.samples, self.logs):
            with storage_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        return new

    def take_back(self) -> None:
        """Undo `create` where no run came of it; what anybody has put there stays."""
        if self.holds_run():
            return
        for folder in (self.checkpoints, self.evals, self.samples, self.logs):
            with contextlib.suppress(OSError):
                folder.rmdir()
        # Somewhere an open file cannot be removed; then an empty folder stays.
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [self.lock.name]:
                self.lock.unlink()
                self.path.rmdir()

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.settings.is_file()

    def newest_step(self) -> int | None:
        """The step of the newest committed checkpoint, whole or not; None if there is none."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        steps = [int(match[1]) for match in map(_STEP.fullmatch, names) if match]
        return max(steps, default=None)

    def last_step(self) -> int:
        """The last step that anything tells of: a checkpoint, or the end of the metrics."""
        return max(self.newest_step() or 0, _last_recorded(self.metrics))

    def write_status(self, state: State, **facts: Any) -> None:
        """Say how the run stands, with facts such as the step, and the time of saying so."""
        updated = datetime.now().astimezone().isoformat(timespec="seconds")
        write_json(self.status, {"state": state, **facts, "updated": updated})

    def read_status(self) -> dict[str, Any]:
        """What `write_status` wrote last; empty before the first time."""
        return dict(read_json(self.status)) if self.status.is_file() else {}


def _last_recorded(metrics: Path) -> int:
    """The step of the last whole record; 0 if there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        # The first line of the piece may be the end of a record, the last the beginning of one.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)["step"])
    return 0


def run_folder(config: RunConfig) -> RunFolder:
    """Where a run keeps its files."""
    return RunFolder(Path(config.folder or f"runs/{config.name}"))


def move_aside(folder: RunFolder) -> None:
    """Give an existing run another name, so that nothing is lost."""
    if not folder.holds_run():
        return
    lock = FolderLock(folder.path)
    lock.acquire()
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    os.rename(folder.path, folder.path.with_name(f"{folder.path.name}.old-{stamp}"))
    lock.release()
