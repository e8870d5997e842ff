"""The run folder: where everything that one run leaves behind lies.

    runs/NAME/
    ├── run.toml            the complete settings, runs again as it is; makes the folder a run
    ├── origin.txt          the command as typed, and what it amounts to if it was another program's
    ├── environment.json    versions, commit, host, device
    ├── train.log           the run in lines for people
    ├── metrics.jsonl       the run in records for programs
    ├── time.jsonl          where its wall time went, over all restarts
    ├── status.json         the state of the run
    ├── processes.json      what each process does, while several train
    ├── tokenizer/          the tokenizer the run was trained with
    ├── checkpoints/        step-00012000/ and so on
    ├── evals/ · samples/   evaluation results, generated texts
    ├── logs/               rank-00001.log and so on: what processes other than rank 0 print
    ├── job/                the job that was submitted to a cluster
    ├── requests/           what the live page asks of the run
    ├── set-aside/          what came after a checkpoint that the run went back to
    ├── report.html         the page with the curves
    ├── .lock               locked by the process that trains
    └── .key                of an elastic run: with it workers sign what they tell each other

This module names the places and knows the format of `status.json` only; every other format belongs
to the module that writes it. Of checkpoints it knows the names of their folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import (
    read_json,
    refuse_devices,
    require_utf8,
    storage_errors,
    write_json,
)
from gristmill.base.locks import FolderLock
from gristmill.base.units import timestamp
from gristmill.config.schema import RunConfig
from gristmill.track.records import SAVED_CHECKPOINT

State = Literal["running", "done", "stopped", "failed"]
_STEP = re.compile(r"step-(\d{8,})")
_SAVED = f'"text": "{SAVED_CHECKPOINT} '.encode()
_TAIL = 1 << 16
"""Bytes at the end of the metrics that are searched for the last record."""


class RunFolder:
    """The paths of one run, as drawn above."""

    def __init__(self, path: Path, *, translation: str = "") -> None:
        self.path = require_utf8(path)
        self.translation = translation
        """What the command amounts to, if it was that of another program; for origin.txt."""
        self.settings = path / "run.toml"
        self.origin = path / "origin.txt"
        self.environment = path / "environment.json"
        self.log = path / "train.log"
        self.metrics = path / "metrics.jsonl"
        self.time = path / "time.jsonl"
        self.status = path / "status.json"
        self.processes = path / "processes.json"
        self.requests = path / "requests"
        self.tokenizer = path / "tokenizer"
        self.checkpoints = path / "checkpoints"
        self.evals = path / "evals"
        self.samples = path / "samples"
        self.logs = path / "logs"
        self.job = path / "job"
        self.set_aside = path / "set-aside"
        self.report = path / "report.html"
        self.lock = path / ".lock"
        self.key = path / ".key"
        self._subfolders = (self.checkpoints, self.evals, self.samples, self.logs)
        self.held: FolderLock | None = None
        """The lock of the process that trains, in that process."""

    def rank_log(self, rank: int) -> Path:
        """What one process prints."""
        return self.logs / f"rank-{rank:05d}.log"

    def create(self) -> bool:
        """Make the folder and its subfolders unless they exist; whether the folder is new."""
        new = not self.path.exists()
        if not new:
            self._refuse_links()
        for folder in (self.path, *self._subfolders):
            try:
                with storage_errors(folder):
                    folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise UserError(
                    "this is no folder, or a link to one that is not there",
                    where=folder,
                    remedy="remove or repair it, or set `folder` to another place",
                    exit=Exit.STORAGE,
                ) from error
        return new

    @property
    def is_taken_away(self) -> bool:
        """Whether the folder that this process has locked is no longer at its path."""
        return self.held is not None and not self.held.is_here

    def require_here(self) -> None:
        """Refuse to write into a folder that is no longer this run's: it would belong to nobody,
        or to another run."""
        if self.held is None or not self.is_taken_away:
            return
        now = self.held.moved_to
        raise UserError(
            "this folder was moved or deleted while the run was training"
            + (f"; it is now {now}" if now is not None else ""),
            where=self.path,
            remedy="leave it in place until a run has ended; to resume, start it again with "
            + (f"folder={now}" if now is not None else "the folder where it was"),
            exit=Exit.STORAGE,
        )

    def _refuse_links(self) -> None:
        """Refuse pipes and devices, and links in place of the files that a run appends to or locks:
        it would write to whatever they point to."""
        refuse_devices(self.path)
        written = (self.settings, self.metrics, self.log, self.status, self.lock)
        for file in written:
            if file.is_symlink():
                raise UserError(
                    "this is a link, and a run writes only to files of its own folder",
                    where=file,
                    remedy="remove it, or copy there what it points to; folders may be links",
                    exit=Exit.REFUSED,
                )

    def remove_unused(self) -> None:
        """Undo `create` if no run was started; files that anybody put there stay."""
        if self.holds_run():
            return
        for folder in self._subfolders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        # Some file systems cannot remove an open file; an empty folder then stays.
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [self.lock.name]:
                self.lock.unlink()
                self.path.rmdir()

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.settings.is_file()

    def has_records(self) -> bool:
        """Whether anything is left of a run, even without its settings."""
        files = (self.settings, self.metrics, self.log, self.status)
        checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return checkpoints or any(file.exists() for file in files)

    def has_saved(self) -> bool:
        """Whether the run has saved a checkpoint by its own account. Reads the metrics up to the
        first that was saved."""
        status = self.read_status()
        if status.get("state") in ("done", "stopped") and status.get("step", 0) > 0:
            return True
        if not self.metrics.is_file():
            return False
        with self.metrics.open("rb") as file:
            return any(_SAVED in line for line in file)

    def newest_step(self) -> int | None:
        """The step of the newest committed checkpoint, intact or not; None if there is none."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        steps = [int(match[1]) for match in map(_STEP.fullmatch, names) if match]
        return max(steps, default=None)

    def last_step(self) -> int:
        """The last known step: that of a checkpoint, or of the last complete record."""
        step, lines = self.newest_step() or 0, list[bytes]()
        with contextlib.suppress(OSError), self.metrics.open("rb") as file:
            file.seek(max(0, self.metrics.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
        for line in reversed(lines):
            # The first line may be the end of a record, the last the beginning of one.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return max(step, int(json.loads(line)["step"]))
        return step

    def write_status(self, state: State, **facts: Any) -> None:
        """Record the state of the run, with facts such as the step, and the time."""
        if self.is_taken_away:
            return
        write_json(self.status, {"state": state, **facts, "updated": timestamp()})

    def read_status(self) -> dict[str, Any]:
        """What `write_status` wrote last; empty before the first time, or if it is damaged: the
        next start writes it anew."""
        with contextlib.suppress(DataError):
            status = read_json(self.status)
            if isinstance(status, dict) and isinstance(status.get("step", 0), int):
                return status
        return {}


def run_folder(config: RunConfig, *, translation: str = "") -> RunFolder:
    """The folder of a run."""
    return RunFolder(Path(config.folder or f"runs/{config.name}"), translation=translation)


def move_aside(folder: RunFolder) -> Path | None:
    """Rename an existing run, or what is left of one, so that nothing is lost; returns where it is
    then."""
    if not folder.has_records():
        return None
    lock = FolderLock(folder.path)
    lock.acquire()
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    aside, number = folder.path.with_name(f"{folder.path.name}.old-{stamp}"), 1
    while aside.exists():
        number += 1
        aside = folder.path.with_name(f"{folder.path.name}.old-{stamp}-{number}")
    os.rename(folder.path, aside)
    lock.release()
    return aside
