"""Files that survive a crash: atomic writes, checksums, and reading compressed files.

A file is replaced by writing a temporary one beside it, flushing it to the disk, renaming it over
the old one and flushing the folder. After a crash the file has either its old or its new content.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.base.errors import DataError, Exit, UserError, optional
from gristmill.base.units import format_bytes

_DECOMPRESSED_BUFFER = 1 << 18
DECOMPRESSED_PIECE = 1 << 13
"""The most bytes before damage that are lost with it."""
_HASHED_PIECE = 1 << 20
_MOST_ENTRIES, _DEEPEST = 20_000, 3
"""How many entries of a folder are looked through, and how deep."""
_ZSTD_PIECE = 1 << 13
"""Small, since 4 bytes of zstd can stand for 128 KiB."""


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename inside it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def utf8(text: str) -> bytes:
    """Text as bytes. Of a file name that is not UTF-8, the other bytes are written as JSON does,
    \\udce9, so that records can hold any name, and those in JSON give it back."""
    return text.encode(errors="backslashreplace")


def require_utf8(path: Path) -> Path:
    """Refuse a path that is not UTF-8: settings cannot hold it, and libraries cannot open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            "this path is not UTF-8 text, which settings and checkpoints need",
            where=path,
            remedy="rename the file or folder; `convmv` does so for many",
        ) from None
    return path


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file's content in one step."""
    data = utf8(content) if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys in the order given."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


SEAL = "seal"
"""The key of a JSON object under which its own checksum is kept."""


def seal_of(value: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON object without its seal: as text with sorted keys and no spaces."""
    kept = {key: item for key, item in value.items() if key != SEAL}
    text = json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return sha256_text(text)


def write_sealed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with its seal, so that damage to it is noticed."""
    write_json(path, {**value, SEAL: seal_of(value)})


def refuse_devices(folder: Path) -> None:
    """Refuse a folder with pipes or devices where files should be, or with links to some: reading
    one would wait for ever, or never end."""
    waiting, seen, left = [(folder, 0)], set[tuple[int, int]](), _MOST_ENTRIES
    while waiting and left:
        here, depth = waiting.pop()
        try:
            status, entries = here.stat(), list(here.iterdir())
        except OSError:
            continue  # whoever needs it will say so
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for path in entries[:left]:
            left -= 1
            with suppress(OSError):
                mode = path.stat().st_mode
                if stat.S_ISDIR(mode) and depth < _DEEPEST:
                    waiting.append((path, depth + 1))
                elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    what = "this is a pipe or a device, not a file"
                    raise DataError(what, where=path, remedy="remove it")


def read_json(path: Path) -> Any:
    """Read JSON, or say which file is damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError("no such file", where=path) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    except ValueError as error:
        raise DataError(f"not valid JSON: {error}", where=path) from error
    except RecursionError as error:
        raise DataError("not valid JSON: nested too deeply", where=path) from error


def set_aside(path: Path, why: str = "damaged") -> Path:
    """Rename a damaged file or folder to a name that nothing else has; returns the new path."""
    aside, number = path.with_name(f"{why}-{path.name}"), 0
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = path.with_name(f"{why}-{path.name}.{number}")
    os.rename(path, aside)
    sync_folder(path.parent)
    return aside


def sha256_file(path: Path, *, read: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file's content, in hexadecimal; `read` is told of bytes that were read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASHED_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            read(count)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """The SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(utf8(text)).hexdigest()


def free_space(path: Path) -> int:
    """Bytes free on the disk of a file or folder, which need not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def require_room(path: Path, *, needed: int, purpose: str, remedy: str) -> None:
    """Refuse what a disk cannot hold; `remedy` is the alternative to making room."""
    free = free_space(path)
    if free < needed:
        raise UserError(
            f"{purpose} needs {format_bytes(needed)}, and the disk has {format_bytes(free)} free",
            where=str(path),
            remedy=f"make room, or {remedy}",
            exit=Exit.STORAGE,
        )


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless a file is in the way."""
    nearest = _existing(folder)
    if not nearest.is_dir():
        raise UserError("this is a file, not a folder", where=str(nearest), exit=Exit.STORAGE)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into an error that names the path and the free space."""
    try:
        yield
    except OSError as error:
        remedy = None
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what, remedy = _no_room(error, path)
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
            what = f"cannot write: {error.strerror}"
        else:
            raise
        raise UserError(what, where=path, remedy=remedy, exit=Exit.STORAGE) from error


def _no_room(error: OSError, path: Path) -> tuple[str, str]:
    """What is used up, and the remedy: a quota, the number of files, or the bytes."""
    free, again = format_bytes(free_space(path)), "then start the same command again"
    if error.errno == errno.EDQUOT:
        return (
            f"your disk quota is used up (the disk itself has {free} free)",
            f"delete files of yours or ask for a larger quota (quota -s shows it), {again}",
        )
    disk = os.statvfs(_existing(path))
    if disk.f_files and not disk.f_favail:
        return (
            f"the disk can hold no more files: all of its {disk.f_files:,} inodes are in use "
            f"({free} free)",
            f"delete or pack small files (df -i shows the number), {again}",
        )
    return f"the disk is full ({free} free)", f"make room, {again}"


class _SmallReads(io.RawIOBase):
    """Reads a decompressor of the standard library in small steps: at damage, a large one would
    lose everything that it had decompressed before."""

    def __init__(self, decompressor: Any) -> None:
        self._decompressor = decompressor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._decompressor.read1(min(len(buffer), DECOMPRESSED_PIECE))
        buffer[: len(piece)] = piece
        return len(piece)


class _Decompressed(io.BufferedReader):
    """Closes the compressed file too, which the decompressors of the standard library do not."""

    def __init__(self, decompressor: Any, file: BinaryIO) -> None:
        super().__init__(decompressor, _DECOMPRESSED_BUFFER)
        self.fileobj = file

    def close(self) -> None:
        super().close()
        self.fileobj.close()


class _ZstdFrames(io.RawIOBase):
    """Decompresses zstd frames one after the other, with the errors of the standard library's
    readers: the package's own reader ends silently where a file is cut short."""

    def __init__(self, file: BinaryIO) -> None:
        self._package = optional("zstandard", extra="data", purpose="reading .zst files")
        self._file = file
        self._frame: Any = None
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            if not self._decompress():
                return 0
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self) -> bool:
        """Decompress the next piece, if there is one."""
        piece = self._compressed or self._file.read(_ZSTD_PIECE)
        if not piece:
            if self._frame:
                raise EOFError("the compressed file ended before its last frame did")
            return False
        frame = self._frame or self._package.ZstdDecompressor().decompressobj()
        try:
            self._content = memoryview(frame.decompress(piece))
        except self._package.ZstdError as error:
            raise OSError(f"invalid zstd data: {error}") from error
        self._frame = None if frame.eof else frame
        self._compressed = frame.unused_data if frame.eof else b""
        return True


_MAGIC: tuple[tuple[bytes, Callable[[BinaryIO], Any]], ...] = (
    (b"\x1f\x8b", lambda file: _SmallReads(gzip.GzipFile(fileobj=file))),
    (b"BZh", lambda file: _SmallReads(bz2.BZ2File(file))),
    (b"\xfd7zXZ\x00", lambda file: _SmallReads(lzma.LZMAFile(file))),
    (b"\x28\xb5\x2f\xfd", _ZstdFrames),
)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressing gzip, bzip2, xz and zstd by their first bytes."""
    try:
        return decompressed(path.open("rb"))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=path) from error


def decompressed(file: io.BufferedReader) -> BinaryIO:
    """The content of an open file, decompressed like that of `open_bytes`."""
    start = file.peek(6)[:6]
    for magic, opener in _MAGIC:
        if start.startswith(magic):
            try:
                return _Decompressed(opener(file), file)
            except BaseException:
                file.close()
                raise
    return file


def is_compressed(path: Path) -> bool:
    """Whether `open_bytes` would decompress a file."""
    with path.open("rb") as file:
        start = file.read(6)
    return any(start.startswith(magic) for magic, _ in _MAGIC)
