"""Opens files of run folders, which others may have written.

A pipe would be waited for, and a link may lead to a file that its maker cannot read but this server
can. Runs write neither, so both are as if they were not there. Folders may be links.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_MOST = 1 << 22


def open_regular(path: Path) -> int:
    """A handle to a file for reading; an `OSError` if it is none, or a link."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "this is no file", str(path))
    return handle


def read_regular(path: Path, *, most: int = _MOST, end: bool = False) -> bytes:
    """What a file holds: the first so many bytes, or the last."""
    handle = open_regular(path)
    try:
        size = os.fstat(handle).st_size
        return os.pread(handle, most, max(0, size - most) if end else 0)
    finally:
        os.close(handle)


def is_regular(path: Path) -> bool:
    """Whether there is a file, and no link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
