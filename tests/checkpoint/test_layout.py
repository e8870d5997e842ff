"""Committing, finding, checking and thinning out checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import DataError
from gristmill.base.units import Duration, Progress
from gristmill.checkpoint.layout import MANIFEST, Best, CheckpointFolder, step_of, verify


def progress_at(step: int) -> Progress:
    return Progress(step, step * 4, step * 400)


def write(folder: CheckpointFolder, step: int) -> Path:
    staging = folder.begin(step)
    (staging / "model.safetensors").write_bytes(random.Random(step).randbytes(2000))
    (staging / "state.json").write_text(f'{{"step": {step}}}')
    return folder.commit(staging)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_committed_checkpoints_are_intact_and_in_order(folder: CheckpointFolder) -> None:
    for step in (5, 100_000_000, 20):
        assert verify(write(folder, step)) == []
    assert [step_of(path) for path in folder.committed()] == [5, 20, 100_000_000]
    newest = folder.newest_intact()
    assert newest.path == folder.path(100_000_000)
    assert newest.damaged == []


def test_every_flipped_bit_is_found(folder: CheckpointFolder) -> None:
    path = write(folder, 7)
    files = sorted(path.iterdir())
    places = [(file, at) for file in files for at in range(file.stat().st_size)]
    rng = random.Random(0)
    manifest = [(path / MANIFEST, at) for at in range((path / MANIFEST).stat().st_size)]
    for file, at in [*rng.sample(places, 300), *manifest]:
        content = bytearray(file.read_bytes())
        original = bytes(content)
        content[at] ^= 1 << rng.randrange(8)
        # Some file systems wait for the disk where a file is cut to nothing and written anew.
        with file.open("r+b", buffering=0) as same:
            same.write(content)
            assert verify(path), f"bit at {at} of {file.name}"
            same.seek(0)
            same.write(original)
    assert verify(path) == []


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", MANIFEST])
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
        lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    ],
    ids=["missing", "empty", "cut by one", "longer", "half"],
)
def test_a_damaged_checkpoint_is_passed_over(
    folder: CheckpointFolder, name: str, damage: Callable[[Path], None]
) -> None:
    write(folder, 1)
    damage(write(folder, 2) / name)
    found = folder.newest_intact()
    assert found.path == folder.path(1)
    ((bad, problems),) = found.damaged
    assert bad == folder.path(2)
    assert name in str(problems[0])


def test_swapped_files_are_found(folder: CheckpointFolder) -> None:
    one, two = write(folder, 1), write(folder, 2)
    shutil.copy(one / "model.safetensors", two / "model.safetensors")
    assert [str(p.where) for p in verify(two)] == [str(two / "model.safetensors")]


class Crash(BaseException):
    """The process ends here."""


def test_a_crash_at_any_moment_of_a_save_leaves_a_usable_checkpoint(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop at the n-th flush or rename, for every n, and start again without cleaning."""
    calls = 0
    stop_at = -1
    real = {name: getattr(os, name) for name in ("fsync", "rename", "mkdir")}

    def counted(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Crash
            return real[name](*args, **kwargs)

        return call

    for name in real:
        monkeypatch.setattr(os, name, counted(name))
    write(folder, 1)
    calls = 0
    write(folder, 2)
    total, crashes = calls, 0
    for moment in range(1, total + 1):
        shutil.rmtree(folder.path(2))
        calls, stop_at = 0, moment
        with pytest.raises(Crash):
            write(folder, 2)
        crashes += 1
        stop_at = -1
        again = CheckpointFolder(folder.root)
        again.clean()
        assert [p.name for p in folder.root.iterdir() if p.name.startswith(".")] == []
        found = again.newest_intact().path
        assert found in (folder.path(1), folder.path(2))
        if found == folder.path(1):
            write(again, 2)  # the same step can be saved again
        assert again.newest_intact().path == folder.path(2)
    assert crashes >= 6


def test_thinning_out_keeps_the_newest_the_best_and_the_permanent(folder: CheckpointFolder) -> None:
    for step in range(1, 11):
        write(folder, step)
    folder.mark_best(Best(3, 1.5))
    folder.thin_out(keep=2, keep_every=Duration.parse("2k tokens"), progress_at=progress_at)
    assert [step_of(p) for p in folder.committed()] == [3, 5, 9, 10]
    assert folder.best() == Best(3, 1.5)


def test_permanent_checkpoints_are_those_at_multiples_while_the_batch_grows(
    folder: CheckpointFolder,
) -> None:
    samples = [0, 1, 2, 3, 5, 7, 9, 13, 17, 21, 25]
    for step in range(11):
        write(folder, step)
    folder.thin_out(
        keep=2,
        keep_every=Duration.parse("5 samples"),
        progress_at=lambda step: Progress(step, samples[step], samples[step] * 100),
    )
    assert [step_of(p) for p in folder.committed()] == [0, 4, 7, 8, 9, 10]


def test_a_half_deleted_checkpoint_is_never_used(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(folder, step)

    def crash(path: Path) -> None:
        (path / MANIFEST).unlink()
        raise Crash

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(Crash):
        folder.thin_out(keep=2, keep_every=None, progress_at=progress_at)
    monkeypatch.undo()
    assert [step_of(p) for p in folder.committed()] == [2, 3]
    folder.clean()
    assert sorted(p.name for p in folder.root.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_damaged_checkpoint_set_aside_is_kept(folder: CheckpointFolder) -> None:
    for name in ("damaged-step-00000004", "damaged-step-00000004.1"):
        assert folder.set_aside(write(folder, 4)).name == name
    assert folder.committed() == []
    assert len(list(folder.root.glob("damaged-*/model.safetensors"))) == 2


def test_no_flipped_bit_of_best_json_is_believed(folder: CheckpointFolder) -> None:
    folder.root.mkdir()
    best = Best(12, 4.00216007232666)
    folder.mark_best(best)
    content = folder.best_file.read_bytes()
    with folder.best_file.open("r+b", buffering=0) as same:
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            same.seek(0)
            same.write(flipped)
            with contextlib.suppress(DataError):
                # White space, or the case of an exponent.
                assert folder.best() == best, f"bit {bit}"


@pytest.mark.parametrize(
    "content", ["[]", "3", "{}", '{"step": 2}', '{"step": "2", "loss": 1.0}', "[" * 99_999]
)
def test_what_is_no_best_json_is_refused(folder: CheckpointFolder, content: str) -> None:
    write(folder, 2)
    folder.best_file.write_text(content)
    with pytest.raises(DataError):
        folder.best()


def test_a_best_json_of_an_older_version_is_compared_with_its_checkpoint(
    folder: CheckpointFolder,
) -> None:
    staging = folder.begin(2)
    (staging / "state.json").write_text('{"best": {"step": 2, "loss": 1.5}}')
    folder.commit(staging)
    folder.best_file.write_text('{"step": 2, "loss": 1.5}')
    assert folder.best() == Best(2, 1.5)
    folder.best_file.write_text('{"step": 2, "loss": 1.0}')
    with pytest.raises(DataError, match="has changed bytes"):
        folder.best()
    folder.best_file.write_text('{"step": 3, "loss": 1.0}')
    assert folder.best() == Best(3, 1.0)  # nothing is known about it


def test_nothing_is_deleted_while_the_best_is_not_known(folder: CheckpointFolder) -> None:
    for step in range(1, 6):
        write(folder, step)
    folder.best_file.write_text("damaged")
    folder.thin_out(keep=2, keep_every=None, progress_at=progress_at)
    assert len(folder.committed()) == 5


def test_only_the_link_to_a_checkpoint_is_deleted(folder: CheckpointFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2, 3):
        shutil.move(write(folder, step), elsewhere)
        folder.path(step).symlink_to(elsewhere / folder.path(step).name)
    assert folder.newest_intact().path == folder.path(3)
    folder.path(2).rename(folder.root / ".deleting-step-00000002")  # what a crash leaves
    folder.thin_out(keep=1, keep_every=None, progress_at=progress_at)
    folder.clean()
    assert [path.name for path in folder.root.iterdir()] == ["step-00000003"]
    assert all(verify(elsewhere / folder.path(step).name) == [] for step in (1, 2, 3))


def test_files_of_others_are_left_alone(folder: CheckpointFolder) -> None:
    write(folder, 1)
    strays = [".writing-x", ".writing-step-00000002.ab", ".deleting-me", "step-00000009", "notes"]
    for name in strays:
        (folder.root / name).write_text("mine")
    folder.clean()
    assert folder.newest_intact().path == folder.path(1)
    assert sorted(path.name for path in folder.root.iterdir()) == sorted([*strays, "step-00000001"])
