"""Where this user's caches are, and which of them make the next start quicker.

    ~/.cache/gristmill/inductor    what torch.compile made; torch's own default is temporary
    ~/.cache/gristmill/pycache     Python's bytecode, if packages come without it and none can be
                                   written beside them

An image built with PYTHONDONTWRITEBYTECODE, or one that is read-only, has no bytecode: Python then
compiles all of torch's source at every start, which takes ten seconds and more.

Both hold code that will run, so they are used only if nobody but this user can write there. Python
itself renames a file of bytecode that a full disk has cut short, and never looks for a flipped bit;
here every file ends in a checksum, and one that is not as it was written is compiled anew. Without
a home that can be written, everything works without caches.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from importlib import machinery
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any
from zlib import crc32

_LARGEST = "torch"
"""The package whose bytecode matters."""
_CHECKSUM = 4
"""Bytes at the end of a file, which Python ignores when it loads one."""
_ROOM = 2**26
"""Bytes that must be free where something is to be cached."""


def cache_folder() -> Path:
    """The cache of this program, where files can also be put by hand: `gristmill` in
    $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gristmill"


def use_compile_caches() -> None:
    """Keep what Python and torch compile for the next start, also that of child processes; call it
    before anything large is imported."""
    inductor = _own_folder("inductor")
    if inductor is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    prefix = sys.pycache_prefix
    # A process that another of this program has started inherits its prefix.
    inherited = prefix is not None and Path(prefix).parts[-2:] == ("gristmill", "pycache")
    if inherited or (prefix is None and _lacks_bytecode()):
        _use_bytecode(_own_folder("pycache"))


def _use_bytecode(folder: Path | None) -> None:
    """Import from a cache of bytecode from now on, and add what it lacks; None: from no cache."""
    if folder is None:
        sys.pycache_prefix = None
        os.environ.pop("PYTHONPYCACHEPREFIX", None)
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    sys.dont_write_bytecode = False
    # Children of other programs, such as torch's compile workers, only read it.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    loaders = [
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (CheckedLoader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    ]
    sys.path_hooks.insert(0, machinery.FileFinder.path_hook(*loaders))
    sys.path_importer_cache.clear()


class CheckedLoader(machinery.SourceFileLoader):
    """Loads Python's source files, with a checksum at the end of their cached bytecode."""

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if not path.endswith(".pyc"):
            return data
        content, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if crc32(content).to_bytes(_CHECKSUM, "little") != checksum:
            # Python then compiles the source, and calls `set_data`.
            raise OSError(f"{path} is damaged")
        return content

    def set_data(self, path: str, data: Any, *, _mode: int = 0o600) -> None:
        checksum = crc32(data).to_bytes(_CHECKSUM, "little")
        folder, temporary = Path(path).parent, None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder)
            # Unlike Python's own, this writes everything or raises.
            with open(handle, "wb") as file:
                file.write(bytes(data) + checksum)
            os.replace(temporary, path)
        except OSError:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


def _own_folder(name: str) -> Path | None:
    """A folder of the cache that this user alone can write, with room in it; None if there is
    none."""
    try:
        folder = cache_folder() / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        folder.chmod(0o700)
        space = os.statvfs(folder)
    except (OSError, RuntimeError):  # this user may have no home
        return None
    has_room = space.f_bavail * space.f_frsize >= _ROOM
    return folder if has_room and os.access(folder, os.W_OK) else None


def _lacks_bytecode() -> bool:
    """Whether the largest package has no bytecode and will never have any."""
    # Not by importlib's finders: those are for who means to import it.
    places = (Path(entry or ".", _LARGEST, "__init__.py") for entry in sys.path)
    source = next(filter(Path.is_file, places), None)
    if source is None or Path(cache_from_source(source)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(source.parent, os.W_OK)
