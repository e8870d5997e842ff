"""Files and folders that get their name when they are complete, and are removed otherwise.

    DIR   is written as  .DIR.writing/           FILE  is written as  .FILE.writing/FILE

A lock in the folder keeps a second export to the same place away. What a killed export leaves has
the temporary name; the next export to the same place removes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import require_utf8, storage_errors, sync_file, sync_folder
from gristmill.base.locks import FolderLock


def refuse_used_folder(folder: Path) -> None:
    """Refuse a folder that is not empty, or whose files could not be opened again."""
    require_utf8(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "this folder is not empty" if folder.is_dir() else "this is a file",
            where=str(folder),
            remedy="give a new one",
            exit=Exit.REFUSED,
        )


def refuse_other_folder(folder: Path) -> None:
    """Refuse a folder that is neither empty nor a model and nothing else."""
    if not folder.is_dir() or not any(folder.iterdir()):
        refuse_used_folder(folder)
        return
    if not (folder / "config.json").is_file() or any(entry.is_dir() for entry in folder.iterdir()):
        raise UserError(
            "this folder holds something other than a model",
            where=str(folder),
            remedy="give a new one",
            exit=Exit.REFUSED,
        )


def refuse_used_file(file: Path) -> None:
    """Refuse the name of a file that is there already."""
    if file.exists():
        what = "this is a folder" if file.is_dir() else "this file exists"
        raise UserError(what, where=str(file), remedy="give a new name", exit=Exit.REFUSED)


@contextmanager
def staged_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into. It gets its name if all went well, and is removed if not. With
    `replace`, a model that has the name is removed after that."""
    folder = folder.resolve()
    refuse = refuse_other_folder if replace else refuse_used_folder
    with _staging(folder) as (staging, lock):
        refuse(folder)
        yield staging
        for file in staging.iterdir():
            sync_file(file)
        sync_folder(staging)
        refuse(folder)
        old = folder.with_name(f".{folder.name}.replaced")
        if replace and folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        os.rename(staging, folder)  # replaces an empty folder
        sync_folder(folder.parent)
        (folder / lock.name).unlink()
        if replace:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def staged_file(file: Path) -> Iterator[Path]:
    """A file to write. It gets its name if all went well, and is removed if not."""
    file = file.resolve()
    with _staging(file) as (staging, _):
        refuse_used_file(file)
        yield staging / file.name
        sync_file(staging / file.name)
        refuse_used_file(file)
        os.rename(staging / file.name, file)
        sync_folder(file.parent)
        shutil.rmtree(staging)


@contextmanager
def _staging(place: Path) -> Iterator[tuple[Path, Path]]:
    """An empty folder for what will be at a place, and the lock in it."""
    staging = place.with_name(f".{place.name}.writing")
    with storage_errors(place):
        staging.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(staging)
    lock.acquire()
    try:
        with storage_errors(place):
            # Left by a killed export: one that still runs would hold the lock.
            for file in staging.iterdir():
                if file != lock.path:
                    file.unlink()
            yield staging, lock.path
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.release()
