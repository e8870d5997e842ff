"""Token sets that other programs made: no manifest says what they are.

    found                                           is taken for
    PREFIX.bin and PREFIX.idx                       megatron, either kind of index
    PREFIX_<digits>.npy or PREFIX_<digits>.bin      npy, llmc
    a folder of .npy or .bin files, or one of them  npy, llmc
    PREFIX.bin alone, or one file                   flat, only if asked for: nothing proves the type

A `.bin` counts as llmc only if it begins with that format's magic number. What the files do not say
stays unknown: the tokenizer and the size of the vocabulary. Nor is it known where documents begin,
except in Megatron's index; a set is one document then, unless the id that stands between documents
is named. In a set that begins with this id documents begin with it (llm.c), in others they end with
it (nanoGPT). The fingerprint covers the sizes of all files and pieces of their content, as reading
a terabyte to open it is no option.

PREFIX.starts without a manifest is the trace of an interrupted writer of ours, so nothing is
believed about such a set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gristmill.base.errors import Exit, UserError
from gristmill.tokens import flat, megatron, shards
from gristmill.tokens.format import DTYPES, Starts, TokenReader, TokenSetInfo, file_of, is_manifest
from gristmill.tokens.reader import MappedReader, Shard, file_size, pieces
from gristmill.tokens.writer import SHARD_ENDINGS, shard_suffixes

_SAMPLE = 1 << 16
_SAMPLES = 8


@dataclass(frozen=True)
class Reading:
    """How a person says that files without a manifest are to be read."""

    format: str | None = None
    """The format, where it cannot be found out."""
    dtype: str | None = None
    """Type of the ids in plain files; uint16 if not given."""
    end_of_text: int | None = None
    """The id that stands between documents."""


@dataclass(frozen=True)
class Found:
    """Files that look like a token set."""

    format: str
    files: tuple[Path, ...]


def find_foreign(path: Path, *, format: str | None) -> Found | None:
    """The files of a set without a manifest, of the format asked for or of any that shows."""
    if file_of(path, ".starts").exists():
        return None
    if format == flat.FORMAT:
        return _find_plain(path)
    if format in (None, megatron.FORMAT) and (pair := _find_pair(path)):
        return Found(megatron.FORMAT, pair)
    if format in (None, shards.NPY) and (files := _find_shards(path, shards.NPY)):
        return Found(shards.NPY, files)
    if format in (None, shards.LLMC) and (files := _find_shards(path, shards.LLMC)):
        proven = format is not None or all(_is_llmc(file) for file in files)
        return Found(shards.LLMC, files) if proven else None
    return None


def _find_pair(path: Path) -> tuple[Path, ...]:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") and path.is_file() else path
    index = file_of(prefix, ".idx")
    return (file_of(prefix, ".bin"), index) if index.is_file() else ()


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


def _find_plain(path: Path) -> Found | None:
    file = path if path.is_file() else file_of(path, ".bin")
    return Found(flat.FORMAT, (file,)) if file.is_file() else None


def open_foreign(found: Found, *, where: Path, reading: Reading) -> TokenReader:
    """Open files that `find_foreign` found."""
    if reading.dtype is not None and found.format != flat.FORMAT:
        raise UserError(
            f"files of the format {found.format} say themselves how their ids are stored",
            where=str(where),
            remedy="leave out the type",
        )
    if found.format == megatron.FORMAT:
        pair = megatron.open_pair(found.files[0].with_suffix(""))
        info = _info(found, shards=[pair.shard], starts=pair.starts)
        return pair.reader(replace(info, end_of_text=reading.end_of_text))
    if found.format == flat.FORMAT:
        dtype = reading.dtype or "uint16"
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UserError(f"ids are stored as one of {known}, not {dtype}", where=str(where))
        parts = [flat.plain_shard(found.files[0], dtype=dtype)]
    else:
        parts = shards.parse_shards(found.format, found.files)
    if not any(part.tokens for part in parts):
        raise UserError("this set holds no tokens", where=str(where), exit=Exit.DATA)
    starts: Starts = np.zeros(1, dtype=np.int64)
    reader = MappedReader(_info(found, shards=parts, starts=starts), shards=parts, starts=starts)
    if reading.end_of_text is None:
        return reader
    starts = document_starts(reader, between=reading.end_of_text)
    info = replace(reader.info, documents=len(starts), end_of_text=reading.end_of_text)
    return MappedReader(info, shards=parts, starts=starts)


def _info(found: Found, *, shards: Sequence[Shard], starts: Starts) -> TokenSetInfo:
    return TokenSetInfo(
        format=found.format,
        dtype=shards[0].dtype,
        tokens=sum(shard.tokens for shard in shards),
        documents=len(starts),
        vocab_size=None,
        end_of_text=None,
        tokenizer=None,
        fingerprint=_fingerprint(found.files),
    )


def document_starts(reader: TokenReader, *, between: int) -> Starts:
    """Where documents begin if an id stands between them; reads every token once."""
    places = [start + np.flatnonzero(ids == between) for start, ids in pieces(reader)]
    found = np.concatenate(places)
    if len(found) and found[0] == 0:
        return found
    starts = np.concatenate([[0], found + 1])
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
