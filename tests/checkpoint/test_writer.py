"""Saving in the background, and disks that refuse."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import Progress
from gristmill.checkpoint import writer as module
from gristmill.checkpoint.layout import Best, CheckpointFolder, step_of, verify
from gristmill.checkpoint.state import Snapshot, TrainState, capture
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.schema import CheckpointConfig
from gristmill.optim.spec import ParameterOptimizer


def snapshot(step: int) -> Snapshot:
    model = torch.nn.Linear(3, 2)
    optimizer = ParameterOptimizer(dict(model.named_parameters()), [])
    state = TrainState(model, optimizer, {}, {}, progress=Progress(step, step, step))
    return capture(state)


class Written:
    """A writer and what it said."""

    def __init__(self, root: Path, *, background: bool = True) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.folder = CheckpointFolder(root)
        self.writer = CheckpointWriter(
            self.folder,
            CheckpointConfig(keep=2, background=background),
            progress_at=lambda step: Progress(step, step, step),
            say=self.said.append,
            warn=self.warned.append,
        )

    @property
    def steps(self) -> list[int]:
        return [step_of(path) for path in self.folder.committed()]


def test_snapshots_are_written_and_thinned_out(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.writer.save(snapshot(1), best=Best(1, 2.0))
    for step in (2, 3, 4):
        written.writer.save(snapshot(step))
    written.writer.finish()
    assert written.steps == [1, 3, 4]
    assert all(verify(path) == [] for path in written.folder.committed())
    assert written.said[-1].startswith("saved checkpoint step-00000004")


def test_training_continues_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    real = Snapshot.write

    def slow(self: Snapshot, folder: Path, **rank: int) -> dict[str, Any]:
        assert go_on.wait(60)
        return real(self, folder, **rank)

    monkeypatch.setattr(Snapshot, "write", slow)
    written = Written(tmp_path)
    written.writer.save(snapshot(1))
    assert written.steps == []  # returned before anything was written
    go_on.set()
    written.writer.finish()
    assert written.steps == [1]


def test_a_defect_while_writing_is_raised_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Snapshot, folder: Path, **rank: int) -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr(Snapshot, "write", broken)
    written = Written(tmp_path)
    written.writer.save(snapshot(1))
    with pytest.raises(AssertionError, match="a defect"):
        written.writer.finish()


def test_a_snapshot_is_not_changed_by_training(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = TrainState(model, ParameterOptimizer(dict(model.named_parameters()), []), {}, {})
    taken = capture(state)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(taken.kinds["model"].tensors["weight"], before)


def test_a_full_disk_is_found_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(tmp_path, background=False)
    written.writer.save(snapshot(1))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    written.writer.save(snapshot(2))
    assert written.steps == [1]
    assert "a checkpoint needs 32 B, and the disk has 10 B free" in written.warned[-1]
    with pytest.raises(UserError) as error:
        written.writer.finish()
    assert error.value.exit is Exit.STORAGE


def test_a_disk_that_changes_what_is_written_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(tmp_path, background=False)
    written.writer.save(snapshot(1))
    real = os.fsync

    def flip(handle: int) -> None:
        """Change the last byte that was written, once it has left our hands."""
        file = Path(f"/proc/self/fd/{handle}").readlink()
        if file.name == "model.safetensors":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", flip)
        written.writer.save(snapshot(2))
    assert "does not read back as it was written" in written.warned[-1]
    assert written.steps == [1] and list(tmp_path.glob(".*")) == []


def test_any_refusal_of_the_disk_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(tmp_path / "checkpoints", background=False)

    def gone(self: Snapshot, folder: Path, **rank: int) -> dict[str, Any]:
        shutil.rmtree(folder.parent)  # someone tidies up
        return real(self, folder, **rank)

    real = Snapshot.write
    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "write", gone)
        written.writer.save(snapshot(1))
    assert "the disk refused: No such file or directory" in written.warned[-1]
    written.writer.save(snapshot(2))
    written.writer.finish()
    assert written.steps == [2]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {small} 2>/dev/null"):
        pytest.skip("no tmpfs can be mounted here")
    try:
        written = Written(small / "checkpoints", background=False)
        written.writer.save(snapshot(1))
        (small / "ballast").write_bytes(bytes(240 * 1024))
        big = snapshot(2)
        big.kinds["model"].tensors["weight"] = torch.zeros(30_000)
        module_room = module.require_checkpoint_room
        module.require_checkpoint_room = lambda folder, needed: None  # it fills up after the check
        try:
            written.writer.save(big)
        finally:
            module.require_checkpoint_room = module_room
        assert "the disk is full" in written.warned[-1]
        assert written.steps == [1]
        assert verify(written.folder.path(1)) == []
        assert list((small / "checkpoints").glob(".*")) == []
        (small / "ballast").unlink()
        written.writer.save(snapshot(3))
        written.writer.finish()
        assert written.steps == [1, 3]
    finally:
        os.system(f"umount {small}")


def test_a_save_is_skipped_while_a_large_one_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SMALL", 0)
    written, goes_on = Written(tmp_path), threading.Event()
    real = Snapshot.write

    def slow(self: Snapshot, *args: Any, **options: Any) -> dict[str, Any]:
        assert goes_on.wait(60)
        return real(self, *args, **options)

    monkeypatch.setattr(Snapshot, "write", slow)
    assert written.writer.ready()
    written.writer.save(snapshot(1))
    for step in (2, 3):
        assert not written.writer.ready()
        written.writer.skip(step)
    goes_on.set()
    written.writer.finish()
    assert written.writer.ready()
    written.writer.save(snapshot(4))
    written.writer.finish()
    assert written.steps == [1, 4]
    (warning,) = written.warned
    assert warning.startswith(
        "no checkpoint at step 2: that of step 1 (32 B) is still being written"
    )


def test_a_small_save_under_way_is_waited_for(tmp_path: Path) -> None:
    written = Written(tmp_path)
    for step in (1, 2):
        assert written.writer.ready()
        written.writer.save(snapshot(step))
    written.writer.close()
    assert written.steps == [1, 2]
