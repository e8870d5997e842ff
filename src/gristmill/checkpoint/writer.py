"""Saving while training continues, by one rank or by several together.

    all ranks   copy to host memory                        training waits for this only
    rank 0      is there room? make the staging folder
    all ranks   write, flush and fingerprint their files   at the same time
    rank 0      each element there once? pieces.json, state.json, MANIFEST, rename, thin out

After each line all ranks learn the result. If the disk refuses one of them, all give up this save,
rank 0 removes its files and reports who could not write and why, and training continues: existing
checkpoints stay as they are. A defect, or the loss of a process, ends the run instead: the next
`wait` raises it. The staging folder that it leaves is recognised by its name.

There is one save at a time. Its copy is in memory that is used again, so the next one cannot begin
before it is written: whoever asks then is told that the writer is not ready.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import require_room, storage_errors, write_json
from gristmill.base.units import Progress, format_bytes
from gristmill.checkpoint.host import HostMemory
from gristmill.checkpoint.layout import ALONE, Best, CheckpointFolder, Fingerprint, verify
from gristmill.checkpoint.pieces import MODEL, PIECES, find_faults, merge_reports, write_index
from gristmill.checkpoint.state import Snapshot
from gristmill.checkpoint.state_file import IN_PIECES, STATE
from gristmill.config.schema import CheckpointConfig
from gristmill.distributed.control import ControlGroup, RefusedError
from gristmill.track.records import SAVED_CHECKPOINT

_HOST = torch.device("cpu")
_SMALL, _PATIENCE = 2**26, 10.0
"""A save of so many bytes is waited for, up to so many seconds."""


class CheckpointWriter:
    """Writes snapshots into a run's checkpoint folder and thins out old ones. All ranks save the
    same steps; the control group is used for nothing else, since saving has its own thread."""

    def __init__(
        self,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        *,
        progress_at: Callable[[int], Progress],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        control: ControlGroup = ALONE,
        device: torch.device = _HOST,
    ) -> None:
        self.folder, self.config, self.say, self.warn = folder, config, say, warn
        self.progress_at, self.control = progress_at, control
        self.host = HostMemory(device)
        self.seconds = 0.0
        self.failure: UserError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._step, self._bytes, self._began, self._skipped = 0, 0, 0.0, 0

    def save(
        self, snapshot: Snapshot, *, best: Best | None = None, good_before: int | None = None
    ) -> None:
        """Begin to write a snapshot; `best` marks it as the best so far once it is committed.
        Checkpoints before step `good_before` are kept beside the newest."""
        self.wait()
        self._step, self._bytes, self._skipped = snapshot.step, snapshot.bytes, 0
        self._began = time.monotonic()
        if self.config.background:
            self._pending = self._thread.submit(self._write, snapshot, best, good_before)
        else:
            self._write(snapshot, best, good_before)

    def ready(self) -> bool:
        """Whether a save can begin. One of a small model is waited for, since it is done in a
        moment."""
        if self._pending is None:
            return True
        wait([self._pending], timeout=_PATIENCE if self._bytes <= _SMALL else 0)
        if not self._pending.done():
            return False
        self.wait()
        return True

    def skip(self, step: int) -> None:
        """Note that a step is not saved, because the writer is not ready."""
        self._skipped += 1
        if self.control.is_rank0 and self._skipped == 1:
            size, taken = format_bytes(self._bytes), time.monotonic() - self._began
            self.warn(
                f"no checkpoint at step {step}: that of step {self._step} ({size}) is still being "
                f"written after {taken:.1f}s; saves are skipped until it is done"
            )

    def wait(self) -> None:
        """Return when nothing is being written; raises a defect that ended the last save."""
        if self._pending is not None:
            self._pending.result()

    def finish(self) -> None:
        """Wait for the last save, and raise an error if it failed."""
        self.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Wait for the last save, and give the memory of its copy back."""
        self.wait()
        self.host.close()

    def mark_best(self, best: Best) -> None:
        """Mark a step that is saved already as the best."""
        if self.control.is_rank0:
            self.folder.mark_best(best)

    def _write(self, snapshot: Snapshot, best: Best | None, good_before: int | None) -> None:
        started = time.monotonic()
        try:
            size = self._write_together(snapshot, best, good_before)
        except RefusedError as refused:
            self.failure = refused
            if self.control.is_rank0:
                self.warn(f"checkpoint at step {snapshot.step} was not saved: {refused}")
        else:
            self.failure = None
            self.seconds = time.monotonic() - started
            name = self.folder.path(snapshot.step).name
            if self.control.is_rank0:
                self.say(f"{SAVED_CHECKPOINT} {name} ({format_bytes(size)})")

    def _write_together(
        self, snapshot: Snapshot, best: Best | None, good_before: int | None
    ) -> int:
        """The steps above; returns the bytes of all ranks."""
        control, folder, config, step = self.control, self.folder, self.config, snapshot.step
        sizes = control.gather({"step": step, "bytes": snapshot.bytes})
        assert all(report["step"] == step for report in sizes), (
            f"ranks save different steps: {sizes}"
        )
        size: int = sum(report["bytes"] for report in sizes)

        def begin() -> str:
            require_checkpoint_room(folder.root, size)
            return folder.begin(step).name

        def commit() -> None:
            commit_pieces(folder, staging, snapshot=snapshot, reports=reports)
            if best is not None and config.keep_best:
                folder.mark_best(best)
            try:
                folder.thin_out(
                    keep=config.keep,
                    keep_every=config.keep_every,
                    progress_at=self.progress_at,
                    good_before=good_before,
                )
            except OSError as error:
                # The new checkpoint is complete all the same.
                self.warn(f"an old checkpoint could not be deleted: {error}")

        staging = folder.root / control.on_rank0(begin)
        try:
            reports = control.on_all_ranks(
                lambda: snapshot.write(staging, rank=control.rank, ranks=control.size)
            )
            control.on_rank0(commit)
        except RefusedError:
            if control.is_rank0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        return size


def commit_pieces(
    folder: CheckpointFolder,
    staging: Path,
    *,
    snapshot: Snapshot,
    reports: Sequence[Mapping[str, Any]],
) -> Path:
    """Commit what all ranks report to have written, if nothing is missing; `snapshot` is that of
    rank 0."""
    indexes, state = {}, snapshot.state
    for kind in snapshot.kinds:
        index = merge_reports(kind, [report["tensors"][kind] for report in reports])
        faults = find_faults(index)
        assert not faults, f"this checkpoint would not be whole: {kind} {'; '.join(faults[:5])}"
        indexes[kind] = index
    missing = sorted(snapshot.names - indexes[MODEL].keys())
    assert not missing, f"this checkpoint would not be whole: no rank holds {missing[:5]}"
    whole = all(
        piece.key == name
        for index in indexes.values()
        for name, tensor in index.items()
        for piece in tensor.pieces
    )
    files = [Fingerprint(*values) for report in reports for values in report["files"]]
    with storage_errors(staging):
        if len(reports) > 1 or not whole:
            write_index(staging / PIECES, indexes)
            state = {**state, "version": IN_PIECES, "processes": len(reports)}
        write_json(staging / STATE, state)
    path = folder.commit(staging, known=files)
    # The ranks that wrote these files have read them back already.
    written = {file.name for file in files}
    problems = verify(path, read=lambda name: name not in written)
    if problems:
        raise UserError(problems, exit=Exit.STORAGE)
    return path


def require_checkpoint_room(folder: Path, needed: int) -> None:
    """Refuse when a disk lacks the room for one checkpoint."""
    larger = "set `folder` to a place on a larger disk"
    require_room(folder, needed=needed, purpose="a checkpoint", remedy=larger)
