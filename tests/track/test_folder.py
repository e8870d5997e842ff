"""The run folder: its names, what makes it a run, and its status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.locks import FolderLock
from gristmill.track.folder import RunFolder, move_aside


def test_every_path_has_its_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = {
        folder.settings: "run.toml",
        folder.origin: "origin.txt",
        folder.environment: "environment.json",
        folder.log: "train.log",
        folder.metrics: "metrics.jsonl",
        folder.status: "status.json",
        folder.tokenizer: "tokenizer",
        folder.checkpoints: "checkpoints",
        folder.evals: "evals",
        folder.samples: "samples",
        folder.logs: "logs",
        folder.rank_log(12): "logs/rank-00012.log",
        folder.report: "report.html",
        folder.lock: ".lock",
    }
    assert len(names) == 14
    assert all(path == tmp_path / name for path, name in names.items())


def test_a_folder_holds_a_run_once_its_settings_are_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "first")
    assert not folder.holds_run()
    assert folder.create()
    assert not folder.create()
    assert folder.checkpoints.is_dir()
    assert not folder.holds_run()
    folder.settings.write_text('name = "first"\n')
    assert folder.holds_run()


def test_a_folder_is_taken_back_only_if_nothing_is_in_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "first")
    for name in (None, "run.toml", "notes.txt", "logs/rank-00001.log"):
        folder.create()
        folder.lock.touch()
        if name is None:
            folder.remove_unused()
            assert not folder.path.exists()
            continue
        (folder.path / name).touch()
        folder.remove_unused()
        assert (folder.path / name).exists() and folder.lock.exists()
        (folder.path / name).unlink()


def test_the_last_status_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_status() == {}
    folder.write_status("running", step=3)
    folder.write_status("failed", step=4, reason="out of memory")
    status = folder.read_status()
    assert list(status) == ["state", "step", "reason", "updated"]
    assert (status["state"], status["step"]) == ("failed", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_the_newest_step_is_that_of_a_committed_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_step() is None
    names = (
        "step-00000009",
        "step-123456789",
        ".writing-step-999999999",
        "damaged-step-99999999999",
    )
    for name in names:
        (folder.checkpoints / name).mkdir(parents=True)
    assert folder.newest_step() == 123456789


def test_a_run_is_moved_aside_unless_somebody_uses_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    move_aside(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "there was no run in it"
    folder.settings.touch()
    lock = FolderLock(folder.path)
    lock.acquire()
    with pytest.raises(UserError) as caught:
        move_aside(folder)
    assert caught.value.exit is Exit.REFUSED
    lock.release()
    move_aside(folder)
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("run.old-") and (aside / "run.toml").exists()


def test_the_last_step_is_that_of_a_checkpoint_or_of_the_last_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last_step() == 0
    folder.metrics.write_text('{"step": 78}\n' + " " * 100_000 + '\n{"step": 85}\n{"step": 8')
    assert folder.last_step() == 85
    (folder.checkpoints / "step-00000090").mkdir(parents=True)
    assert folder.last_step() == 90
    folder.metrics.write_text('"step"\n[]\n{"loss": 1}\n')
    assert folder.last_step() == 90


@pytest.mark.parametrize("link", [True, False])
def test_a_folder_that_is_none_is_named(tmp_path: Path, link: bool) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    if link:
        folder.checkpoints.symlink_to(tmp_path / "nowhere")
    else:
        folder.checkpoints.touch()
    with pytest.raises(UserError, match="this is no folder") as error:
        folder.create()
    assert error.value.problems[0].where == str(folder.checkpoints)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"state": "done", "step": "7"}', "[" * 99_999])
def test_a_damaged_status_is_none(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    folder.status.write_text(content)
    assert folder.read_status() == {}


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "status.json", "run.toml", ".lock"])
def test_a_run_does_not_write_through_links(tmp_path: Path, name: str) -> None:
    folder, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    folder.create()
    outside.write_text("not ours")
    (folder.path / name).symlink_to(outside)
    with pytest.raises(UserError, match="this is a link") as caught:
        folder.create()
    assert caught.value.exit is Exit.REFUSED and outside.read_text() == "not ours"


def test_folders_of_a_run_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.checkpoints.symlink_to(tmp_path / "disk")
    assert not folder.create()


@pytest.mark.parametrize("place", ["evals/x.json", "status.json", "checkpoints/step-00000001/x"])
def test_pipes_and_devices_in_a_run_folder_are_refused(tmp_path: Path, place: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    file = folder.path / place
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    with pytest.raises(UserError, match="a pipe or a device"):
        folder.create()
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a pipe or a device"):
        folder.create()
    file.unlink()
    # A folder in itself is looked through once.
    (folder.path / "again").symlink_to(folder.path)
    assert not folder.create()
