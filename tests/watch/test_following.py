"""Reading a file that grows, is cut, replaced or written again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.track.metrics import cut_metrics
from gristmill.watch import following
from gristmill.watch.following import Follower, LineIndex


def all_of(follower: Follower, limit: int = 1 << 16) -> tuple[bytes, bool]:
    """What can be read now, and whether it began again."""
    data, restarted = b"", False
    while (piece := follower.read(limit)) is not None:
        if piece.restarted:
            data, restarted = b"", True
        assert piece.offset + len(piece.data) == follower.offset
        data += piece.data
    return data, restarted


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@given(st.lists(st.binary(max_size=9), max_size=20), st.integers(1, 12))
def test_lines_are_read_once_each_however_they_come(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], limit: int
) -> None:
    file = tmp_path_factory.mktemp("grows") / "lines"
    follower, written, read = Follower(file), b"", b""
    for piece in pieces:
        with file.open("ab") as opened:
            opened.write(piece)
        written += piece
        data, restarted = all_of(follower, limit)
        read += data
        assert not restarted
        assert read == written[: written.rfind(b"\n") + 1]


def test_a_cut_last_line_waits_for_its_end(file: Path) -> None:
    file.write_bytes(b"one\ntw")
    follower = Follower(file)
    assert all_of(follower) == (b"one\n", False)
    assert not follower.look()  # nothing is asked of the file again until it changes
    with file.open("ab") as opened:
        opened.write(b"o\n")
    assert follower.look()
    assert all_of(follower) == (b"two\n", False)


def test_a_smaller_file_is_read_again(file: Path) -> None:
    file.write_bytes(b"one\ntwo\nthree\n")
    follower = Follower(file)
    all_of(follower)
    os.truncate(file, 4)
    assert all_of(follower) == (b"one\n", True)


def test_a_file_that_was_replaced_is_read_again(file: Path) -> None:
    file.write_bytes(b"one\ntwo\n")
    follower = Follower(file)
    all_of(follower)
    file.rename(file.with_name("metrics.jsonl.1"))
    file.write_bytes(b"one\ntwo\nmore\n")  # the same beginning, but another file
    assert all_of(follower) == (b"one\ntwo\nmore\n", True)


def test_a_run_that_went_back_is_read_again_even_if_its_file_is_longer(
    file: Path, line_of: Callable[..., str]
) -> None:
    file.write_text("".join(line_of(step) for step in range(1, 50)))
    follower = Follower(file)
    all_of(follower)
    cut_metrics(file, after=30)
    again = "".join(line_of(step, time=9000.0 + step) for step in range(31, 80))
    with file.open("a") as opened:
        opened.write(again)
    assert file.stat().st_size > follower.offset
    data, restarted = all_of(follower)
    assert restarted
    assert data == file.read_bytes()


def test_a_file_that_goes_and_comes_back(file: Path) -> None:
    follower = Follower(file)
    assert all_of(follower) == (b"", False)
    file.write_bytes(b"one\n")
    assert all_of(follower) == (b"one\n", False)
    file.unlink()
    assert follower.look()
    assert all_of(follower) == (b"", True)
    assert all_of(follower) == (b"", False)
    file.write_bytes(b"new\n")
    assert all_of(follower) == (b"new\n", False)


def test_a_line_that_is_too_long_is_passed_over(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_LONGEST", 64)
    follower = Follower(file)
    file.write_bytes(b"one\n" + b"x" * 500)
    assert all_of(follower, 16) == (b"one\n", False)
    with file.open("ab") as opened:
        opened.write(b"x" * 100 + b"\ntwo\n")
    assert all_of(follower, 16) == (b"two\n", False)
    assert follower.skipped == 1


def test_parts_are_refused_when_the_file_is_another(file: Path) -> None:
    file.write_bytes(b"one\ntwo\nthree\n")
    follower = Follower(file)
    all_of(follower)
    assert follower.part(4, 8) == b"two\n"
    file.write_bytes(b"one\nTWO\nthree\n")
    os.utime(file, ns=(0, 0))
    assert follower.part(4, 8) == b"TWO\n" or follower.part(4, 8) is None
    os.truncate(file, 9)
    assert follower.part(4, 8) is None


def test_samples_are_complete_lines(file: Path, line_of: Callable[..., str]) -> None:
    lines = [line_of(step).encode() for step in range(1, 3000)]
    file.write_bytes(b"".join(lines) + b'{"kind": "step", "st')
    pieces = list(Follower(file).sampled(32, 1 << 14))
    known = set(lines)
    for piece in pieces:
        assert set(piece.splitlines(keepends=True)) <= known
    assert pieces[0].startswith(lines[0]) and pieces[-1].endswith(lines[-1])


@given(st.integers(1, 300), st.integers(2, 40), st.data())
def test_the_index_finds_all_lines_between_two_places(
    count: int, most: int, data: st.DataObject
) -> None:
    index = LineIndex(most)
    for number in range(count):
        index.add(10 * number, (float(number), 0.0, 2.0 * number), 100.0 + number)
    low = data.draw(st.integers(0, count))
    high = data.draw(st.integers(low, count))
    part = index.span(0, low, high, 10 * count)
    # Line i begins at 10 i and has the place i + 1.
    for number in range(count):
        if low <= number + 1 <= high:
            assert part.begin <= 10 * number < part.end
    assert part.seconds == 2.0 * (part.begin // 10)
    assert part.end - part.begin <= 10 * (high - low) + 50 * (1 + 2 * count // most)
