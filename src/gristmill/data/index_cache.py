"""Sample indices that take long to build, kept on disk and shared by all processes of a run.

    FOLDER/0f3a…/key.json       what the arrays were made from; 0f3a… is its SHA-256
                 NAME.npy       one array each
                 arrays.json    {"NAME": "SHA-256 of NAME.npy", …}

The key holds the fingerprints of the token sets, the settings that act, and a version of the
algorithm, so another content never meets an old index. A folder is filled under another name and
renamed when it is complete. Whoever comes first builds while the others wait for the lock, then map
what they find; where files cannot be locked, each builds for itself and the first one to finish is
kept, which is right too, as all build the same. An entry whose checksums differ is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.base.errors import UserError
from gristmill.base.files import (
    read_json,
    sha256_file,
    sha256_text,
    storage_errors,
    sync_file,
    sync_folder,
    write_json,
)

VERSION = 1
"""Raised whenever an algorithm gives other arrays for the same key."""

_ARRAYS, _KEY = "arrays.json", "key.json"
Arrays = dict[str, np.ndarray]


def cached(folder: Path, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays for a key, mapped from disk; built and written if they are not there intact."""
    full = {"version": VERSION, **key}
    place = folder / sha256_text(json.dumps(full, sort_keys=True))[:32]
    found = _load(place)
    if found is not None:
        return found
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder):
        found = _load(place)
        if found is not None:
            return found
        _store(place, full, build())
    found = _load(place)
    assert found is not None, f"{place} was just written"
    return found


def _load(place: Path) -> Arrays | None:
    """The arrays of an entry, or None if it is missing or damaged."""
    try:
        sums = read_json(place / _ARRAYS)
        files = {name: place / f"{name}.npy" for name in sums}
        if any(sha256_file(file) != sums[name] for name, file in files.items()):
            return None
        return {
            name: np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for name, file in files.items()
        }
    except (UserError, OSError, ValueError, AttributeError, TypeError):
        return None


def _store(place: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    with storage_errors(place):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            for name, array in arrays.items():
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
                sync_file(temporary / f"{name}.npy")
            write_json(temporary / _KEY, key)
            sums = {name: sha256_file(temporary / f"{name}.npy") for name in arrays}
            write_json(temporary / _ARRAYS, sums)
            _publish(temporary, place)
            sync_folder(place.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, place: Path) -> None:
    """Rename into place; a damaged entry there gives way, an intact one stays."""
    with contextlib.suppress(OSError):
        os.rename(temporary, place)
        return
    if _load(place) is None:
        old = temporary.with_suffix(".old")
        os.rename(place, old)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(temporary, place)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in this folder; the kernel ends the wait if one dies."""
    with (folder / ".building").open("a") as file:
        # A file system without locks only costs that several processes build the same.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
