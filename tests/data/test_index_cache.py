"""Indices kept on disk."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from gristmill.data.index_cache import Arrays, cached


class Builder:
    """Counts how often it is asked to build."""

    def __init__(self, value: int = 1) -> None:
        self.value, self.times = value, 0

    def __call__(self) -> Arrays:
        self.times += 1
        return {"numbers": np.arange(1000) * self.value, "pairs": np.ones((3, 2), np.int32)}


def test_an_index_is_built_once_and_mapped_then(tmp_path: Path) -> None:
    build = Builder()
    first = cached(tmp_path / "index", {"seed": 1}, build)
    again = cached(tmp_path / "index", {"seed": 1}, build)
    assert build.times == 1
    for arrays in (first, again):
        assert arrays["numbers"].tolist() == list(range(1000))
        assert arrays["pairs"].dtype == np.int32
        assert not arrays["numbers"].flags.writeable
        assert type(arrays["numbers"]) is np.ndarray


def test_every_key_has_its_own(tmp_path: Path) -> None:
    build, other = Builder(), Builder(2)
    cached(tmp_path, {"content": "aa", "seed": 1}, build)
    found = cached(tmp_path, {"content": "bb", "seed": 1}, other)
    assert found["numbers"][1] == 2
    assert cached(tmp_path, {"seed": 1, "content": "aa"}, other)["numbers"][1] == 1
    assert (build.times, other.times) == (1, 1)


def test_a_new_version_of_the_program_builds_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builder()
    cached(tmp_path, {"seed": 1}, build)
    monkeypatch.setattr("gristmill.data.index_cache.VERSION", 999)
    cached(tmp_path, {"seed": 1}, build)
    assert build.times == 2


def damage_bit(entry: Path) -> None:
    file = entry / "numbers.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def damage_length(entry: Path) -> None:
    file = entry / "numbers.npy"
    file.write_bytes(file.read_bytes()[:-100])


def damage_missing(entry: Path) -> None:
    (entry / "pairs.npy").unlink()


def damage_list(entry: Path) -> None:
    (entry / "arrays.json").write_text("[1, 2")


@pytest.mark.parametrize("damage", [damage_bit, damage_length, damage_missing, damage_list])
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: object) -> None:
    build = Builder()
    cached(tmp_path, {"seed": 1}, build)
    (entry,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert callable(damage)
    damage(entry)
    assert cached(tmp_path, {"seed": 1}, build)["numbers"].tolist() == list(range(1000))
    assert build.times == 2
    cached(tmp_path, {"seed": 1}, build)
    assert build.times == 2
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [entry]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> Arrays:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached(tmp_path, {"seed": 1}, fail)
    assert cached(tmp_path, {"seed": 1}, Builder())["numbers"][1] == 1


def _slow_build(folder: Path) -> None:
    def build() -> Arrays:
        with (folder / "log").open("a") as log:
            log.write("built\n")
        time.sleep(0.3)
        return {"numbers": np.arange(10)}

    assert cached(folder / "index", {"seed": 1}, build)["numbers"].tolist() == list(range(10))


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_slow_build, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_without_locks_all_build_and_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("gristmill.data.index_cache.fcntl.flock", no_locks)
    other = Builder()

    def build_while_another_finishes() -> Arrays:
        cached(tmp_path, {"seed": 1}, other)
        return Builder()()

    found = cached(tmp_path, {"seed": 1}, build_while_another_finishes)
    assert found["numbers"].tolist() == list(range(1000))
    assert other.times == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
