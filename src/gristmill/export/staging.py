"""What exports have in common: staged files and folders, and tensors read some rows at a time.

Files and folders get their name when they are complete, and are removed otherwise:

    DIR   is written as  .DIR.writing/           FILE  is written as  .FILE.writing/FILE

A lock in the folder keeps a second export to the same place away. What a killed export leaves has
the temporary name; the next export to the same place removes it.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import require_utf8, storage_errors, sync_file, sync_folder, write_json
from gristmill.base.locks import FolderLock
from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.loading import FiniteCheck
from gristmill.checkpoint.model import StoredModel
from gristmill.checkpoint.tensorfile import HF_INDEX
from gristmill.models.weights import ForeignTensor


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


# ------------------------------------------------------------------ tensors

DTYPE = torch.float32
SHARD = 5 * 10**9
"""Bytes of tensors in one file, if no single tensor is larger."""
BYTES_AT_ONCE = 2**26
"""Bytes of a tensor that are in memory at once. For a transposed tensor they are columns of the
source: with fewer, each page of its file would be read more often."""

Advance = Callable[[str, int], None]
"""Called with what was done, and with how many bytes of weights."""


def tensor_bytes(tensor: ForeignTensor) -> int:
    """The size of a tensor in a file."""
    return math.prod(tensor.shape) * DTYPE.itemsize


def divide_files(sizes: Mapping[str, int], *, limit: int) -> dict[str, list[str]]:
    """The tensors of each file of a folder, by their bytes: one after the other, until the file is
    full."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def write_index(folder: Path, files: Mapping[str, Sequence[str]], *, size: int) -> None:
    """Say which file has which tensor, if there are several."""
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / HF_INDEX, index)


def row_regions(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """A tensor in regions of as many rows as may be in memory at once."""
    count = max(1, BYTES_AT_ONCE // (math.prod(shape[1:]) * DTYPE.itemsize))
    for first in range(0, shape[0], count):
        yield TensorSlice.whole(shape).narrow(0, first, min(first + count, shape[0]))


def read_rows(
    stored: StoredModel, tensor: ForeignTensor, advance: Advance
) -> Iterator[torch.Tensor]:
    """A tensor from the source; refuses numbers that are not finite."""
    for rows in row_regions(tensor.shape):
        value, finite = tensor.read(stored.weights, rows), FiniteCheck()
        finite.add(tensor.ours or tensor.name, value)
        try:
            finite.require(str(stored.origin))
        except DataError as error:
            raise stored.unusable(error) from error
        yield value
        advance("writing", value.nbytes)


def require_same(name: str, value: torch.Tensor, wanted: torch.Tensor, stored: StoredModel) -> None:
    """Refuse what was read back if one bit is not that of the source."""
    # As integers: 0 and -0 are equal, but not the same bits.
    if not torch.equal(value.view(torch.int32), wanted.view(torch.int32)):
        raise UserError(
            f"{name} does not read back as it is in the source; nothing was exported",
            where=str(stored.origin),
            remedy="the disk or the memory of this machine is failing: check both",
            exit=Exit.STORAGE,
        )
