"""Saving while training goes on.

One save is under way at a time: a second waits for the first. Training itself waits only for the
copy to host memory. A save that the disk refuses is reported and given up, its remains are
removed, and training continues: the checkpoints that exist stay as they are.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.units import Progress, format_bytes
from gristmill.checkpoint.layout import Best, CheckpointFolder, verify
from gristmill.checkpoint.state import Snapshot
from gristmill.config.schema import CheckpointConfig


class CheckpointWriter:
    """Writes snapshots into a run's checkpoint folder and thins out old ones."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        *,
        progress_at: Callable[[int], Progress],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.config, self.say = folder, config, say
        self.progress_at = progress_at
        self.seconds = 0.0
        self.failure: UserError | None = None
        self._thread: threading.Thread | None = None
        self._defect: Exception | None = None

    def save(self, snapshot: Snapshot, *, best: Best | None = None) -> None:
        """Begin to write a snapshot; `best` marks it as the best so far once it is committed."""
        self.wait()
        if not self.config.background:
            self._write(snapshot, best)
            return
        self._thread = threading.Thread(
            target=self._write_aside, args=(snapshot, best), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._defect is not None:
            raise self._defect

    def finish(self) -> None:
        """Wait for the last save, and raise what made it fail."""
        self.wait()
        if self.failure is not None:
            raise self.failure

    def _write_aside(self, snapshot: Snapshot, best: Best | None) -> None:
        try:
            self._write(snapshot, best)
        except Exception as error:  # raised in the training thread by the next `wait`
            self._defect = error

    def _write(self, snapshot: Snapshot, best: Best | None) -> None:
        started = time.monotonic()
        staging = self.folder.root / f".writing-step-{snapshot.step:08d}"
        try:
            require_room(self.folder.root, snapshot.bytes)
            staging = self.folder.begin(snapshot.step)
            snapshot.write(staging)
            path = self.folder.commit(staging)
            problems = verify(path)
            if problems:
                raise UserError(problems, exit=Exit.STORAGE)
            if best is not None and self.config.keep_best:
                self.folder.mark_best(best)
            self.folder.thin_out(
                keep=self.config.keep,
                keep_every=self.config.keep_every,
                progress_at=self.progress_at,
            )
        except UserError as error:
            self.failure = error
            shutil.rmtree(staging, ignore_errors=True)
            self.say(f"checkpoint at step {snapshot.step} was not saved: {error}")
            return
        self.failure = None
        self.seconds = time.monotonic() - started
        self.say(f"saved checkpoint {path.name} ({format_bytes(snapshot.bytes)})")


def require_room(folder: Path, needed: int) -> None:
    """Refuse when a disk lacks the room for one checkpoint."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            [
                Problem(
                    f"a checkpoint needs {format_bytes(needed)}, and {format_bytes(free)} are free",
                    str(folder),
                    "make room, or set `folder` to a place on a larger disk",
                )
            ],
            exit=Exit.STORAGE,
        )
