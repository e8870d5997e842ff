"""Token sets of other programs, which have no manifest.

    found                                           read as
    PREFIX.bin and PREFIX.idx                       megatron, either kind of index
    PREFIX_<digits>.npy or PREFIX_<digits>.bin      npy, llmc
    a folder of .npy or .bin files, or one of them  npy, llmc
    PREFIX.bin alone, or one file                   flat, only if asked for: nothing proves the type

A `.bin` counts as llmc only if it begins with that format's magic number. The files do not state
the tokenizer and the size of the vocabulary. Only Megatron's index states where documents begin;
other sets are one document unless the id between documents is given. If a set begins with this id,
its documents begin with it (llm.c), otherwise they end with it (nanoGPT). The fingerprint covers
the sizes of all files and samples of their content, since opening must not read a terabyte.

PREFIX.starts without a manifest is left by an interrupted writer of ours; such a set is not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gristmill.base.errors import DataError, UserError
from gristmill.tokens import flat, megatron, shards
from gristmill.tokens.format import (
    DTYPES,
    Starts,
    TokenFiles,
    TokenReader,
    TokenSetInfo,
    file_of,
    file_size,
    is_manifest,
    pieces,
)
from gristmill.tokens.writer import SHARD_ENDINGS, shard_suffixes

_SAMPLE = 1 << 16
_SAMPLES = 8


@dataclass(frozen=True)
class Reading:
    """How to read files without a manifest."""

    format: str | None = None
    """The format, where it cannot be recognised."""
    dtype: str | None = None
    """Type of the ids in plain files; uint16 if not given."""
    end_of_text: int | None = None
    """The id that stands between documents."""


def open_foreign(path: Path, reading: Reading) -> TokenReader | None:
    """Open a set without a manifest, of the format asked for or of any that is recognised."""
    format, files = _find(path, reading.format)
    if format is None:
        return None
    if reading.dtype is not None and format != flat.FORMAT:
        raise UserError(
            f"files of the format {format} state how their ids are stored",
            where=str(path),
            remedy="leave out --dtype",
        )
    one_document = np.zeros(1, dtype=np.int64)
    if format in megatron.FORMATS:
        token_files = megatron.read_files(files[0].with_suffix(""))
    elif format == flat.FORMAT:
        dtype = reading.dtype or "uint16"
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UserError(f"ids are stored as one of {known}, not {dtype}", where=str(path))
        token_files = TokenFiles([flat.plain_shard(files[0], dtype=dtype)], one_document)
    else:
        token_files = TokenFiles(shards.parse_shards(format, files), one_document)
    if not token_files.tokens:
        raise DataError("this set holds no tokens", where=path)
    info = TokenSetInfo(
        format=format,
        dtype=token_files.shards[0].dtype,
        tokens=token_files.tokens,
        documents=len(token_files.starts),
        vocab_size=None,
        end_of_text=reading.end_of_text,
        tokenizer=None,
        fingerprint=_fingerprint(files),
    )
    reader = TokenReader(info, token_files)
    if reading.end_of_text is None or format in megatron.FORMATS:
        return reader
    starts = document_starts(reader, between=reading.end_of_text)
    return TokenReader(replace(info, documents=len(starts)), replace(token_files, starts=starts))


def _find(path: Path, format: str | None) -> tuple[str | None, tuple[Path, ...]]:
    """The format of a set without a manifest, and its files."""
    if file_of(path, ".starts").exists():
        return None, ()
    if format == flat.FORMAT:
        file = path if path.is_file() else file_of(path, ".bin")
        return (flat.FORMAT, (file,)) if file.is_file() else (None, ())
    if format in (None, *megatron.FORMATS):
        named = path.suffix in (".bin", ".idx") and path.is_file()
        prefix = path.with_suffix("") if named else path
        if file_of(prefix, ".idx").is_file():
            return format or megatron.FORMAT, (file_of(prefix, ".bin"), file_of(prefix, ".idx"))
    if format in (None, shards.NPY) and (files := _find_shards(path, shards.NPY)):
        return shards.NPY, files
    files = _find_shards(path, shards.LLMC) if format in (None, shards.LLMC) else ()
    proven = format is not None or all(_is_llmc(file) for file in files)
    return (shards.LLMC, files) if files and proven else (None, ())


def _find_shards(path: Path, format: str) -> tuple[Path, ...]:
    ending = SHARD_ENDINGS[format]
    if path.is_file():
        return (path,) if path.suffix == ending else ()
    if path.is_dir() and not any(is_manifest(file) for file in path.glob("*.json")):
        inside = sorted(file for file in path.iterdir() if file.suffix == ending)
        if inside:
            return tuple(inside)
    return tuple(file_of(path, suffix) for suffix in shard_suffixes(path, ending))


def _is_llmc(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) in shards.LLMC_MAGICS


def document_starts(reader: TokenReader, *, between: int) -> Starts:
    """Where documents begin if an id stands between them; reads every token once."""
    places = [start + np.flatnonzero(ids == between) for start, ids in pieces(reader)]
    borders = np.concatenate(places)
    if len(borders) and borders[0] == 0:
        return borders
    starts = np.concatenate([[0], borders + 1])
    return starts[starts < len(reader)]


def _fingerprint(files: Sequence[Path]) -> str:
    """SHA-256 of the files' sizes and of eight pieces of each."""
    result = hashlib.sha256()
    for path in files:
        size = file_size(path)
        result.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
                result.update(file.read(_SAMPLE))
    return result.hexdigest()
