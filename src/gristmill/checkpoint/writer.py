"""Saving while training goes on, by one process or by many together.

    all       copy to host memory                        training waits for this only
    first     room for all? make the staging folder
    all       write, flush and fingerprint their files   at the same time
    first     everything there, exactly once? pieces.json, state.json, MANIFEST, rename, thin out

After each line all hear how it went. Where the disk refuses one of them, all give the save up, the
first removes the remains and says who could not write and why, and training continues: the
checkpoints that exist stay as they are. A defect, or the loss of a process, ends the run instead:
it is raised by the next `wait`. What it leaves has a name that says so.

One save is under way at a time: a second waits for the first.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import require_room, storage_errors, write_json
from gristmill.base.units import Progress, format_bytes
from gristmill.checkpoint.layout import ALONE, Best, CheckpointFolder, Fingerprint, verify
from gristmill.checkpoint.pieces import (
    MODEL,
    PIECES,
    Index,
    TensorShare,
    faults_of,
    join_shares,
    write_index,
)
from gristmill.checkpoint.state import IN_PIECES, STATE, Snapshot
from gristmill.config.schema import CheckpointConfig
from gristmill.parallel.control import ControlGroup, RefusedError

Words = dict[str, Any]
"""What a process tells the others, as JSON."""


class CheckpointWriter:
    """Writes snapshots into a run's checkpoint folder and thins out old ones. All processes save
    the same steps; the control is for this alone, since saving has a thread of its own."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        *,
        progress_at: Callable[[int], Progress],
        say: Callable[[str], None],
        control: ControlGroup = ALONE,
    ) -> None:
        self.folder, self.config, self.say = folder, config, say
        self.progress_at, self.control = progress_at, control
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

    def mark_best(self, best: Best) -> None:
        """Mark a step that is saved already as the best."""
        if self.control.is_rank0:
            self.folder.mark_best(best)

    def _write_aside(self, snapshot: Snapshot, best: Best | None) -> None:
        try:
            self._write(snapshot, best)
        except Exception as error:  # raised in the training thread by the next `wait`
            self._defect = error

    def _write(self, snapshot: Snapshot, best: Best | None) -> None:
        started = time.monotonic()
        try:
            size = self._write_together(snapshot, best)
        except RefusedError as refused:
            self.failure = refused
            if self.control.is_rank0:
                self.say(f"checkpoint at step {snapshot.step} was not saved: {refused}")
            return
        self.failure = None
        self.seconds = time.monotonic() - started
        if self.control.is_rank0:
            name = self.folder.path(snapshot.step).name
            self.say(f"saved checkpoint {name} ({format_bytes(size)})")

    def _write_together(self, snapshot: Snapshot, best: Best | None) -> int:
        """The drawing above; returns the bytes of all processes."""
        control, step = self.control, snapshot.step
        facts = control.gather({"step": step, "bytes": snapshot.bytes})
        assert all(one["step"] == step for one in facts), f"not all save the same step: {facts}"
        size: int = sum(one["bytes"] for one in facts)
        staging = self.folder.root / control.on_rank0(lambda: self._begin(step, size))
        try:
            told = control.on_all_ranks(lambda: self._contribute(snapshot, staging))
            control.on_rank0(lambda: self._commit(snapshot, staging, told, best))
        except RefusedError:
            if control.is_rank0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        return size

    def _begin(self, step: int, needed: int) -> str:
        require_checkpoint_room(self.folder.root, needed)
        return self.folder.begin(step).name

    def _contribute(self, snapshot: Snapshot, staging: Path) -> Words:
        """Write this process's files, and say what is in them."""
        files = snapshot.write(staging, rank=self.control.rank, ranks=self.control.size)
        return words_of(snapshot, files)

    def _commit(
        self, snapshot: Snapshot, staging: Path, told: Sequence[Words], best: Best | None
    ) -> None:
        commit_pieces(self.folder, staging, snapshot=snapshot, told=told)
        if best is not None and self.config.keep_best:
            self.folder.mark_best(best)
        keep, keep_every = self.config.keep, self.config.keep_every
        self.folder.thin_out(keep=keep, keep_every=keep_every, progress_at=self.progress_at)


# ------------------------------------------------------------------ without a word to others


def words_of(snapshot: Snapshot, files: Sequence[Fingerprint]) -> Words:
    """What a process that has written its files tells the one that commits."""
    shares = {
        kind: {name: share.plain() for name, share in one.shares.items()}
        for kind, one in snapshot.kinds.items()
    }
    return {"files": [astuple(file) for file in files], "shares": shares}


def commit_pieces(
    folder: CheckpointFolder, staging: Path, *, snapshot: Snapshot, told: Sequence[Words]
) -> Path:
    """Commit what processes, by rank, say they have written, if nothing is missing; `snapshot` is
    the first one's."""
    indexes, state = {kind: _complete(kind, told) for kind in snapshot.kinds}, snapshot.state
    missing = sorted(snapshot.names - indexes[MODEL].keys())
    assert not missing, f"this checkpoint would not be whole: nobody holds {missing[:5]}"
    files = [Fingerprint(*values) for words in told for values in words["files"]]
    with storage_errors(staging):
        if len(told) > 1 or any(map(_has_parts, indexes.values())):
            write_index(staging / PIECES, indexes)
            state = {**state, "version": IN_PIECES, "processes": len(told)}
        write_json(staging / STATE, state)
    path = folder.commit(staging, known=files)
    # Their writers have read these files back already.
    written = {file.name for file in files}
    problems = verify(path, read=lambda name: name not in written)
    if problems:
        raise UserError(problems, exit=Exit.STORAGE)
    return path


def _has_parts(index: Index) -> bool:
    return any(piece.key != name for name, one in index.items() for piece in one.pieces)


def _complete(kind: str, told: Sequence[Words]) -> Index:
    shares = [
        {name: TensorShare.from_plain(values) for name, values in words["shares"][kind].items()}
        for words in told
    ]
    index = join_shares(kind, shares)
    faults = faults_of(index)
    assert not faults, f"this checkpoint would not be whole: {kind} {'; '.join(faults[:5])}"
    return index


def require_checkpoint_room(folder: Path, needed: int) -> None:
    """Refuse when a disk lacks the room for one checkpoint."""
    larger = "set `folder` to a place on a larger disk"
    require_room(folder, needed=needed, purpose="a checkpoint", remedy=larger)
