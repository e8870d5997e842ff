"""Token files of data pipelines, read without a copy: datatrove's and dolma's.

    datatrove    NAME.ds             ids, 2 or 4 bytes each
                 NAME.ds.index       uint64 for each document: the position after its last id
                 NAME.ds.metadata    text: tokenizer|bytes of an id, number of ids, words
    dolma        NAME.npy            ids, 1, 2 or 4 bytes each; no header, in spite of the ending
                 NAME.csv.gz         a row for each document: start, end, id, source, place

Several files of a folder are one set, in the order of their names. Ids of datatrove have the width
that the metadata state; those of dolma the width at which the file ends where its last document
does. Whatever disagrees with the size of the ids is an error. Without the file that states where
documents begin, the width has to be named (--from, --dtype), and documents are cut at an id
(--end-of-text) or not at all. Documents without ids are left out. Rows of dolma are read when a set
is opened, about a million a second; masks for the loss (NAME.ds.loss) are not read, and sets with
some are refused.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError
from gristmill.base.files import open_bytes
from gristmill.tokens.format import (
    Starts,
    TokenFiles,
    TokenShard,
    file_of,
    file_size,
    map_array,
    stored,
)

DATATROVE = "datatrove"
DOLMA = "dolma"
ENDINGS: Mapping[str, str] = {DATATROVE: ".ds", DOLMA: ".npy"}
PIPELINES = tuple(ENDINGS)
_INDEX, _METADATA, _LOSS = ".index", ".metadata", ".loss"
_ROWS = ".csv.gz"
_NPY = b"\x93NUMPY"
_WIDTHS = {1: "uint8", 2: "uint16", 4: "uint32"}
_AGAIN = "copy all files of the set again from where they came"
_Ends = npt.NDArray[np.int64]


class PipelineFiles(NamedTuple):
    """The files of a set: those of ids, and all of them."""

    ids: tuple[Path, ...]
    all: tuple[Path, ...]


class PipelineTokens(NamedTuple):
    """What was found in them."""

    files: TokenFiles
    documents_known: bool


def find_files(path: Path, format: str, *, asked: bool) -> PipelineFiles | None:
    """The files of a set of a format by its name, folder or file; unless it was `asked` for, files
    of dolma must be known by the rows beside them."""
    ending, ids = ENDINGS[format], tuple[Path, ...]()
    if path.is_file():
        ids = (path,) if path.suffix == ending else ()
    elif path.is_dir():
        ids = tuple(sorted(file for file in path.glob(f"*{ending}") if file.is_file()))
    elif file_of(path, ending).is_file():
        ids = (file_of(path, ending),)
    else:
        pattern = re.compile(rf"{re.escape(path.name)}[-_]\d+{re.escape(ending)}")
        folder = path.parent.iterdir() if path.parent.is_dir() else ()
        ids = tuple(sorted(file for file in folder if pattern.fullmatch(file.name)))
    beside = [file for name in ids for file in _beside(name, format)]
    if format == DOLMA and not asked and not (beside and all(map(_is_plain, ids))):
        return None
    return PipelineFiles(ids, (*ids, *beside)) if ids else None


def _beside(file: Path, format: str) -> list[Path]:
    """The files beside one of ids, as far as they are there."""
    if format == DATATROVE:
        names = [file_of(file, suffix) for suffix in (_INDEX, _METADATA)]
    else:
        names = [file_of(file.with_suffix(""), _ROWS)]
    return [name for name in names if name.is_file()]


def _is_plain(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_NPY)) != _NPY


def read_files(files: PipelineFiles, format: str, *, dtype: str | None) -> PipelineTokens:
    """Read what is beside the ids, and check it against them; `dtype` where nothing states it."""
    read: Callable[[Path, str | None], tuple[TokenShard, _Ends | None]]
    read = _read_datatrove if format == DATATROVE else _read_dolma
    shards, starts, offset, known = list[TokenShard](), list[Starts](), 0, list[bool]()
    for path in files.ids:
        shard, ends = read(path, dtype)
        shards.append(shard)
        known.append(ends is not None)
        if ends is not None and len(ends):
            begins = np.concatenate([[0], ends[:-1]])
            starts.append(begins[ends > begins] + offset)
        offset += shard.tokens
    if any(known) and not all(known):
        lacking = files.ids[known.index(False)]
        what = "the file that states where its documents end is missing, and others have theirs"
        raise DataError(what, where=lacking, remedy=_AGAIN)
    _check_types([shard for shard in shards if shard.tokens])
    # A file to which nothing was written says nothing about the type of its ids.
    shards = [shard for shard in shards if shard.tokens] or shards[:1]
    if not all(known):
        return PipelineTokens(TokenFiles(shards, np.zeros(1, np.int64)), documents_known=False)
    together = np.concatenate([np.empty(0, np.int64), *starts]).astype(np.int64)
    return PipelineTokens(TokenFiles(shards, together), documents_known=True)


def _check_types(shards: Sequence[TokenShard]) -> None:
    for shard in shards:
        if shard.dtype != shards[0].dtype:
            what = f"its ids are {shard.dtype}, and those of {shards[0].path} are {shards[0].dtype}"
            raise DataError(what, where=shard.path, remedy="keep the two sets apart")


# ------------------------------------------------------------------ datatrove


def _read_datatrove(path: Path, dtype: str | None) -> tuple[TokenShard, _Ends | None]:
    if file_of(path, _LOSS).exists():
        raise DataError(
            "some tokens of this set are masked from the loss, and masks are not read",
            where=file_of(path, _LOSS),
            remedy="move the .loss files elsewhere to train on all tokens",
        )
    index, size = file_of(path, _INDEX), file_size(path)
    ends = _read_index(index) if index.is_file() else None
    last = int(ends[-1]) if ends is not None and len(ends) else 0
    stated = _stated_width(file_of(path, _METADATA))
    if stated is not None:
        dtype = _WIDTHS[stated]
    elif ends is not None:
        dtype = _fitting(path, size, last, beside=index)
    elif dtype is None:
        raise _unknown_width(path)
    tokens = size // stored(dtype).itemsize
    if ends is not None and size != last * stored(dtype).itemsize:
        raise _other_size(path, size, last * stored(dtype).itemsize)
    if size % stored(dtype).itemsize:
        raise DataError(f"{size} bytes are no whole number of {dtype} ids", where=path)
    return TokenShard(path, offset=0, tokens=tokens, dtype=dtype), ends


def _read_index(path: Path) -> _Ends:
    size = file_size(path)
    if size % 8:
        raise DataError(f"{size} bytes are no whole number of ends", where=path, remedy=_AGAIN)
    ends: Any = map_array(path, "<u8", count=size // 8).astype(np.int64)
    _check_ends(path, ends)
    return ends  # type: ignore[no-any-return]


def _check_ends(path: Path, ends: _Ends) -> None:
    steps = np.diff(ends, prepend=0)
    if (steps < 0).any():
        document = int(np.flatnonzero(steps < 0)[0])
        raise DataError(f"document {document} ends before it begins", where=path, remedy=_AGAIN)


def _stated_width(path: Path) -> int | None:
    """Bytes of an id, of the metadata beside a file if there are any."""
    if not path.is_file():
        return None
    line = path.read_bytes()[: 1 << 12].partition(b"\n")[0]
    width = line.rpartition(b"|")[2].strip()
    if width not in (b"2", b"4"):
        what = f"its first line does not end with the bytes of an id, |2 or |4: {line[:80]!r}"
        raise DataError(what, where=path, remedy=_AGAIN)
    return int(width)


# ------------------------------------------------------------------ dolma


def _read_dolma(path: Path, dtype: str | None) -> tuple[TokenShard, _Ends | None]:
    rows, size = file_of(path.with_suffix(""), _ROWS), file_size(path)
    if not _is_plain(path):
        what = "this is an array of NumPy, and dolma's have no header"
        raise DataError(what, where=path, remedy="read it with --from npy")
    if not rows.is_file():
        if dtype is None:
            raise _unknown_width(path)
        if size % stored(dtype).itemsize:
            raise DataError(f"{size} bytes are no whole number of {dtype} ids", where=path)
        tokens = size // stored(dtype).itemsize
        return TokenShard(path, offset=0, tokens=tokens, dtype=dtype), None
    ends = _read_rows(rows)
    if not len(ends):
        # A process to which nothing fell leaves its file at the full size.
        return TokenShard(path, offset=0, tokens=0, dtype=dtype or "uint16"), ends
    chosen = _fitting(path, size, int(ends[-1]), beside=rows)
    return TokenShard(path, offset=0, tokens=int(ends[-1]), dtype=chosen), ends


def _read_rows(path: Path) -> _Ends:
    """Where each document ends; documents follow one another."""
    ends, last = [], 0
    try:
        with open_bytes(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
            for number, row in enumerate(csv.reader(text)):
                begin, end = int(row[0]), int(row[1])
                if begin != last or end < begin:
                    what = f"document {number} goes from {begin} to {end}, after one up to {last}"
                    raise DataError(what, where=path, remedy=_AGAIN)
                ends.append(end)
                last = end
    except (ValueError, IndexError, csv.Error, OSError, EOFError) as error:
        what = f"row {len(ends) + 1} does not begin with the start and the end of a document"
        raise DataError(f"{what}: {error}", where=path, remedy=_AGAIN) from error
    return np.array(ends, np.int64)


# ------------------------------------------------------------------ both


def _fitting(path: Path, size: int, tokens: int, *, beside: Path) -> str:
    """The type of ids with which a file ends where its last document does."""
    for width, dtype in _WIDTHS.items():
        if tokens and size == tokens * width:
            return dtype
    if not tokens and not size:
        return _WIDTHS[2]
    raise DataError(
        f"it has {size} bytes, and {beside.name} says {tokens} ids: that is no type of ids",
        where=path,
        remedy=_AGAIN,
    )


def _other_size(path: Path, size: int, expected: int) -> DataError:
    how = "cut short" if size < expected else "too long"
    what = f"the file is {how}: {size} bytes, and its index promises {expected}"
    return DataError(what, where=path, remedy=_AGAIN)


def _unknown_width(path: Path) -> DataError:
    return DataError(
        "nothing beside this file states how its ids are stored",
        where=path,
        remedy="name their type: --dtype uint16 or uint32",
    )
