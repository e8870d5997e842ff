"""Sample indices that take long to build, kept on disk and shared by all processes of a run.

    FOLDER/0f3a…/key.json       what the arrays were made from; 0f3a… is its SHA-256
                 NAME.npy       one array each
                 arrays.json    {"NAME": "SHA-256 of NAME.npy", …}

The key holds the fingerprints of the token sets, the settings that matter, and a version of the
algorithm, so that changed content never meets an old index. An entry is written under a temporary
name and renamed when complete. The first process builds it while the others wait for the lock and
then map it. On file systems without locks every process builds the same entry, and the first to
finish wins. An entry with wrong checksums is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
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
"""Increased whenever an algorithm produces different arrays for the same key."""

Arrays = dict[str, np.ndarray]


def cached(folder: Path | None, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays for a key, mapped from disk; built and written first if they are missing or
    damaged. Without a folder they are only built."""
    if folder is None:
        return build()
    full = {"version": VERSION, **key}
    entry = folder / sha256_text(json.dumps(full, sort_keys=True))[:32]
    arrays = _load(entry)
    if arrays is not None:
        return arrays
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".building").open("a") as file:
        # The kernel releases the lock if the building process dies.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if _load(entry) is None:
            _store(entry, full, build())
    arrays = _load(entry)
    assert arrays is not None, f"{entry} was just written"
    return arrays


def _load(entry: Path) -> Arrays | None:
    """The arrays of an entry, or None if it is missing or damaged."""
    try:
        sums = read_json(entry / "arrays.json")
        files = {name: entry / f"{name}.npy" for name in sums}
        if any(sha256_file(file) != sums[name] for name, file in files.items()):
            return None
        return {
            name: np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for name, file in files.items()
        }
    except (UserError, OSError, ValueError, AttributeError, TypeError):
        return None


def _store(entry: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}.tmp")
    with storage_errors(entry):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            sums = {}
            for name, array in arrays.items():
                file = temporary / f"{name}.npy"
                np.save(file, array, allow_pickle=False)
                sync_file(file)
                sums[name] = sha256_file(file)
            write_json(temporary / "key.json", key)
            write_json(temporary / "arrays.json", sums)
            try:
                os.rename(temporary, entry)
            except OSError:
                # Replace a damaged entry; an intact one is from a process that could not lock.
                if _load(entry) is None:
                    shutil.rmtree(entry, ignore_errors=True)
                    os.rename(temporary, entry)
            sync_folder(entry.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
