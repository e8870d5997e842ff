"""Files that survive a crash, and a folder that one process holds."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import random
import signal
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import (
    open_bytes,
    read_json,
    require_room,
    sha256_file,
    sha256_text,
    storage_errors,
    write_atomic,
    write_json,
)
from gristmill.base.locks import FolderLock, OutputLock

TEXT = "one line of grain\n" * 100
HOLD = """
import pathlib, sys
from gristmill.base.locks import FolderLock
FolderLock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


# ------------------------------------------------------------------ writing


def test_content_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    write_atomic(path, b"new \xff")
    assert path.read_bytes() == b"new \xff"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises((UserError, OSError)):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_is_named_with_the_path_and_the_remedy(tmp_path: Path, number: int) -> None:
    path = tmp_path / "not" / "there" / "yet.bin"
    with pytest.raises(UserError) as caught, storage_errors(path):
        raise OSError(number, os.strerror(number))
    assert caught.value.exit is Exit.STORAGE
    message = str(caught.value)
    assert message.startswith(f"{path}: the disk is full (")
    assert "iB free)\n" in message
    assert message.endswith("    make room, then start the same command again")


def test_a_quota_is_not_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, storage_errors(tmp_path / "new" / "x.bin"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert caught.value.exit is Exit.STORAGE
    message = str(caught.value)
    assert "your disk quota is used up (the disk itself has " in message
    assert "the disk is full" not in message and "quota -s" in message


def test_a_disk_without_inodes_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    for files, free, words in (
        (1000, 0, "all of its 1,000 inodes are in use"),
        # Some file systems do not count inodes.
        (0, 0, "the disk is full ("),
        (1000, 7, "the disk is full ("),
    ):
        numbers = [*real[:5], files, free, free, *real[8:]]
        monkeypatch.setattr(os, "statvfs", lambda path, numbers=numbers: os.statvfs_result(numbers))
        with pytest.raises(UserError) as caught, storage_errors(tmp_path / "x.bin"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_disk_that_refuses_says_why(tmp_path: Path, number: int, reason: str) -> None:
    path = tmp_path / "out.bin"
    with pytest.raises(UserError) as caught, storage_errors(path):
        raise OSError(number, reason)
    assert caught.value.exit is Exit.STORAGE
    assert str(caught.value) == f"{path}: cannot write: {reason}"


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), storage_errors(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file")
    with pytest.raises(ZeroDivisionError), storage_errors(tmp_path):
        _ = 1 / 0


def test_json_keeps_the_order_of_keys_and_the_letters(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_json(path, {"zebra": 1, "apple": ["Mühle", None]})
    assert read_json(path) == {"zebra": 1, "apple": ["Mühle", None]}
    assert "Mühle" in path.read_text(encoding="utf-8")
    assert path.read_text().index("zebra") < path.read_text().index("apple")


def test_damaged_and_missing_json_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with pytest.raises(UserError) as caught:
        read_json(path)
    assert (str(caught.value), caught.value.exit) == (f"{path}: no such file", Exit.DATA)
    path.write_text('{"cut": ')
    with pytest.raises(UserError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: not valid JSON: ")
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(path)


@given(st.text())
def test_fingerprints_are_sha256(text: str) -> None:
    assert sha256_text(text) == hashlib.sha256(text.encode()).hexdigest()


def test_a_file_has_the_fingerprint_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(TEXT)
    assert sha256_file(path) == sha256_text(TEXT)


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        gzip.compress(TEXT.encode()),
        gzip.compress(TEXT[:700].encode()) + gzip.compress(TEXT[700:].encode()),
        bz2.compress(TEXT.encode()),
        lzma.compress(TEXT.encode()),
    ],
    ids=["plain", "gzip", "gzip in two members", "bzip2", "xz"],
)
def test_compressed_files_are_known_by_their_first_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "named-anyhow.txt"
    path.write_bytes(content)
    with open_bytes(path) as file:
        assert file.read().decode() == TEXT


def test_zstd_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "text.zst"
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(TEXT[:700].encode()) + compress(TEXT[700:].encode()))
    with open_bytes(path) as file:
        assert file.read().decode() == TEXT


def compressed(content: bytes, compression: str) -> bytes:
    if compression == "zstd":
        zstandard = pytest.importorskip("zstandard")
        result: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(content)
        return result
    return {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[compression](content)


@pytest.mark.parametrize("compression", ["gzip", "bzip2", "xz", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_compressed_files_are_refused(
    tmp_path: Path, compression: str, damage: str
) -> None:
    noise = random.Random(0).randbytes(10_000).hex().encode()
    content = bytearray(compressed(noise, compression) * 2)
    path = tmp_path / "text"
    path.write_bytes(content)
    with open_bytes(path) as file:
        assert file.read() == noise * 2
    if damage == "cut":
        del content[-9:]
    else:
        content[len(content) // 4] ^= 0x10
    path.write_bytes(content)
    with open_bytes(path) as file, pytest.raises((OSError, EOFError, zlib.error, lzma.LZMAError)):
        file.read(100_000)


def test_zstd_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "text.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd and more")
    with pytest.raises(UserError) as caught:
        open_bytes(path)
    assert str(caught.value) == (
        "reading .zst files needs the package 'zstandard', which is not installed\n"
        "    pip install 'gristmill[data]'"
    )


@pytest.mark.parametrize("content", [b"", b"\x1f", b"BZ", b"x"])
def test_files_too_short_to_be_compressed_are_plain(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short"
    path.write_bytes(content)
    with open_bytes(path) as file:
        assert file.read() == content


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path, reason in [
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ]:
        with pytest.raises(UserError) as caught:
            open_bytes(path)
        assert str(caught.value) == f"{path}: cannot read: {reason}"
        assert caught.value.exit is Exit.DATA


@pytest.mark.parametrize("compression", ["gzip", "bzip2", "xz", "zstd"])
def test_closing_a_compressed_file_closes_the_file_below(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(compressed(TEXT.encode(), compression))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        file = open_bytes(path)
        file.close()
        del file
    assert [str(warning.message) for warning in found] == []


# ------------------------------------------------------------------ locks


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `tmp_path`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_holds_the_folder(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(UserError) as caught:
        FolderLock(tmp_path).acquire()
    assert caught.value.exit is Exit.REFUSED
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: this folder is in use by process {holder.pid} on ")
    assert message.endswith("wait for it to end, or give this run another name or folder")
    assert holder.poll() is None


def test_the_folder_is_free_after_its_holder_was_killed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGKILL)
    assert holder.wait() == -signal.SIGKILL
    lock = FolderLock(tmp_path)
    lock.acquire()
    other = FolderLock(tmp_path)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        other.acquire()
    lock.release()
    other.acquire()
    other.release()


def test_releasing_twice_or_unheld_does_no_harm(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()


def test_a_disk_without_room(tmp_path: Path) -> None:
    place = tmp_path / "not" / "yet"
    require_room(place, needed=1, purpose="it", remedy="go")
    with pytest.raises(UserError, match=r"a corpus needs .*, and the disk has") as caught:
        require_room(place, needed=10**18, purpose="a corpus", remedy="take another")
    assert caught.value.exit is Exit.STORAGE
    assert "make room, or take another" in str(caught.value)


def test_an_output_lock_leaves_no_file_and_survives_its_removal(tmp_path: Path) -> None:
    first, second = (OutputLock(tmp_path / "new" / "set", purpose="writing") for _ in range(2))
    with first:
        with pytest.raises(UserError, match=rf"\(process {os.getpid()} on ") as caught:
            second.acquire()
        assert caught.value.exit is Exit.REFUSED
        with OutputLock(tmp_path / "new" / "set", purpose="other"):
            pass
    assert list((tmp_path / "new").iterdir()) == []


def test_a_lock_file_that_its_holder_removed_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (OutputLock(tmp_path / "set", purpose="writing") for _ in range(3))
    first.acquire()
    real = os.open

    def released_after_opening(*arguments: object) -> int:
        handle = real(*arguments)  # type: ignore[arg-type]
        first.release()
        return handle

    monkeypatch.setattr(os, "open", released_after_opening)
    second.acquire()
    monkeypatch.undo()
    with pytest.raises(UserError, match="another process is writing"):
        third.acquire()
    second.release()
