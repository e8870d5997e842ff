"""Locks between processes, which the kernel releases when their process ends, however it ends.

FolderLock   one process at a time uses a folder
OutputLock   one process at a time writes the files of one name
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import make_folder, storage_errors


class FolderLock:
    """Lets one process at a time use a folder.

    The kernel releases the lock when its process ends, however it ends. The package filelock may
    fall back to a file that a killed process leaves behind, and may erase the holder's name.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._handle: int | None = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        return self._handle is not None

    @property
    def is_here(self) -> bool:
        """Whether the folder is still the one that was locked: somebody may have moved or deleted
        it, and another process may have made one of the same name."""
        return self._handle is not None and _is_at(self._handle, self.path)

    @property
    def moved_to(self) -> Path | None:
        """Where the folder is now, if that can be found out."""
        try:
            now = Path(f"/proc/self/fd/{self._handle}").readlink()
        except OSError:
            return None
        return now.parent if now.exists() else None

    def acquire(self) -> None:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                what = f"files cannot be locked here: {error.strerror}"
                remedy = "use a folder on a file system with locks"
                raise UserError(what, where=self.path, remedy=remedy, exit=Exit.STORAGE) from error
            raise UserError(
                f"this folder is in use by {holder}",
                where=self.path.parent,
                remedy="wait for it to end, or give this run another name or folder",
                exit=Exit.REFUSED,
            ) from error
        _sign(handle)
        self._handle = handle

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class OutputLock:
    """Lets one process at a time write the files of one name.

    The lock is a hidden file beside them, and the kernel releases it when its process ends, however
    it ends. Whoever releases the lock also removes the file.
    """

    def __init__(self, name: Path, *, purpose: str) -> None:
        """`purpose` sets apart locks for the same name, and what they protect."""
        self.path = name.with_name(f".{name.name}.{purpose}.lock")
        self._name = name
        self._handle: int | None = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Make the folder if need be, and take the lock or say who has it."""
        make_folder(self.path.parent)
        with storage_errors(self._name):
            while self._handle is None:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    holder = os.read(handle, 200).decode(errors="replace").strip()
                    os.close(handle)
                    by = f" ({holder})" if holder else ""
                    raise UserError(
                        f"another process is writing this token set{by}",
                        where=self._name,
                        remedy="wait for it to end, or give the new set another name",
                        exit=Exit.REFUSED,
                    ) from error
                except OSError:
                    # Some network file systems have no locks.
                    self._handle = handle
                    return
                # The last holder may have removed the file after it was opened here.
                if _is_at(handle, self.path):
                    self._handle = handle
                else:
                    os.close(handle)
        _sign(self._handle)

    def release(self) -> None:
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


def _sign(handle: int) -> None:
    """Write into a lock who holds it."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _is_at(handle: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
