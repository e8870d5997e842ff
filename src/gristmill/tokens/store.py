"""Open, create, inspect and verify token sets of any format.

A format is a function that opens a set, a writer, and one row of `FORMATS`. The manifest names the
format; a set without one is recognised by its files. Inspecting and verifying read a few MiB at a
time, so they need little memory however large the set is, apart from the document starts.

Sets of other programs, which have no manifest:

    found                                           read as
    PREFIX.bin and PREFIX.idx                       megatron, either kind of index
    PREFIX_<digits>.npy or PREFIX_<digits>.bin      npy, llmc
    a folder of .npy or .bin files, or one of them  npy, llmc
    NAME.ds; NAME.npy without header, with rows     datatrove, dolma; several of a folder are one
    PREFIX.bin alone, or one file                   flat, only if asked for: nothing proves the type

A `.bin` counts as llmc only if it begins with that format's magic number. The files do not state
the tokenizer and the size of the vocabulary. Megatron's, datatrove's and dolma's state where
documents begin; other sets are one document unless the id between documents is given. If a set
begins with this id, its documents begin with it (llm.c), otherwise they end with it (nanoGPT). The
fingerprint covers the sizes of all files and samples of their content, since opening must not read
a terabyte.

PREFIX.starts without a manifest is left by an interrupted writer of ours; such a set is not read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.files import SEAL, read_json, seal_of, sha256_file
from gristmill.hub.objects import shown
from gristmill.tokens import megatron, pipelines, shards
from gristmill.tokens.format import (
    COPY_AGAIN,
    DTYPES,
    LEDGER_FILE,
    Manifest,
    NewSet,
    Starts,
    TokenFiles,
    TokenReader,
    TokenSetInfo,
    file_of,
    file_size,
    id_range,
    is_manifest,
    pieces,
    read_manifest,
    size_problems,
    stored,
)
from gristmill.tokens.writer import SHARD_ENDINGS, TokenWriter, shard_suffixes

_ADDRESS = re.compile(r"(https?|s3|gs|hf):/+(.*)")
"""As a path writes it."""
_SAMPLE = 1 << 16
_SAMPLES = 8
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class TokensNotFoundError(DataError):
    """There is no token set of this name, or none that is finished."""


@dataclass(frozen=True)
class Format:
    """How sets of one format are read and written."""

    read: Callable[[Path, Manifest], TokenFiles]
    write: Callable[[NewSet], TokenWriter]
    sharded: bool = False
    """Whether a set is several files of a given number of tokens."""


FORMATS: Mapping[str, Format] = {
    shards.FLAT: Format(shards.read_flat, shards.FlatWriter),
    megatron.FORMAT: Format(megatron.read_files, megatron.MegatronWriter),
    **{
        name: Format(megatron.read_files, megatron.OldMegatronWriter)
        for name in megatron.OLD_FORMATS
    },
    **{
        name: Format(shards.read_shards, shards.ShardWriter, sharded=True)
        for name in shards.SHARD_FORMATS
    },
}


@dataclass(frozen=True)
class Reading:
    """How to read files without a manifest."""

    format: str | None = None
    """The format, where it cannot be recognised."""
    dtype: str | None = None
    """Type of the ids in plain files; uint16 if not given."""
    end_of_text: int | None = None
    """The id that stands between documents."""


@dataclass(frozen=True)
class TokenSetSummary:
    """What a person wants to know about a token set."""

    info: TokenSetInfo
    smallest_id: int
    largest_id: int
    mean_length: float
    length_quantiles: Mapping[float, int]
    """Tokens per document at the quantiles 0, 0.05, 0.25, 0.5, 0.75, 0.95 and 1."""
    length_histogram: Mapping[int, int]
    """Documents with at least 1, 2, 4, … tokens and fewer than twice as many."""
    checked: Mapping[str, Any] | None
    """The tasks of evaluations that its text was checked against; None if nobody wrote it down."""


def open_tokens(prefix: Path | str, reading: Reading | None = None) -> TokenReader:
    """Open a finished token set; `reading` is for files of other programs."""
    path, reading = Path(prefix), reading or Reading()
    if reading.format is not None and reading.format not in pipelines.PIPELINES:
        _format(reading.format, where=path)
    manifest = find_manifest(path)
    if manifest is None:
        reader = _open_foreign(path, reading)
        if reader is None:
            raise _not_found(path, format=reading.format)
        return reader
    if problems := size_problems(path, manifest):
        raise DataError(problems)
    info = manifest.info
    if info.documents == 0:
        raise DataError(
            "this part of a token set holds no documents",
            where=path,
            remedy="merge it with the other parts: gristmill tokens merge",
        )
    if reading not in (Reading(), Reading(format=info.format)):
        raise UserError(
            f"the manifest of this set already says how to read it: it is {info.format}",
            where=str(path),
            remedy="leave out --from, --dtype and --end-of-text",
        )
    files = _format(info.format, where=path).read(path, manifest)
    tokens, documents, dtype = files.tokens, len(files.starts), files.shards[0].dtype
    if (tokens, documents, dtype) != (info.tokens, info.documents, info.dtype):
        raise DataError(
            f"the files hold {tokens} tokens in {documents} documents as {dtype}, and the manifest "
            f"says {info.tokens} in {info.documents} as {info.dtype}",
            where=path,
            remedy="prepare the set again",
        )
    return TokenReader(info, files, checked=manifest.checked)


def is_empty_part(prefix: Path | str) -> bool:
    """Whether this is a finished part of a token set to which no document fell."""
    manifest = find_manifest(Path(prefix))
    return manifest is not None and manifest.info.documents == 0


def create_tokens(new: NewSet) -> TokenWriter:
    """Begin a token set, or resume one."""
    path = new.prefix
    if path.name in ("", ".."):
        raise UserError(
            "a token set needs a name",
            where=str(path),
            remedy="give a folder and a name, such as tokens/books",
        )
    chosen = _format(new.format, where=path)
    if new.shard_size is not None and not chosen.sharded:
        several = ", ".join(name for name, row in FORMATS.items() if row.sharded)
        raise UserError(
            f"a set of the format {new.format} is one file of ids; of several are {several}",
            where="--shard-size",
            remedy="leave it out, or choose one of these formats",
        )
    return chosen.write(new)


def inspect_tokens(prefix: Path | str, reading: Reading | None = None) -> TokenSetSummary:
    """Count and measure a token set; reads every token once."""
    reader = open_tokens(prefix, reading)
    extremes = id_range(reader)
    lengths = np.diff(reader.document_starts, append=len(reader))
    quantiles = np.quantile(lengths, _QUANTILES, method="lower")
    return TokenSetSummary(
        info=reader.info,
        smallest_id=extremes.smallest,
        largest_id=extremes.largest,
        mean_length=len(reader) / len(lengths),
        length_quantiles={q: int(v) for q, v in zip(_QUANTILES, quantiles, strict=True)},
        length_histogram=_histogram(lengths),
        checked=reader.checked,
    )


def verify_tokens(
    prefix: Path | str,
    reading: Reading | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """Everything that is wrong with a token set; an empty list means that it is intact.

    Of a set without a manifest only its own structure and the sign of its ids can be checked.
    `progress` is called with the bytes that were read, and with all of them: every byte is read for
    its checksum, and every id once more.
    """
    path, problems = Path(prefix), list[Problem]()
    done = total = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    try:
        manifest = find_manifest(path)
        if manifest is not None:
            ids = manifest.info.tokens * stored(manifest.info.dtype).itemsize
            total = sum(facts.bytes for facts in manifest.files.values()) + ids
        if manifest is not None and not (problems := size_problems(path, manifest)):
            changed = "the content changed since it was written: its checksum differs"
            problems = [
                Problem(changed, str(file_of(path, suffix)), COPY_AGAIN)
                for suffix, facts in manifest.files.items()
                if sha256_file(file_of(path, suffix), read=read) != facts.sha256
            ]
        problems += _ledger_problems(file_of(path, LEDGER_FILE))
        if is_empty_part(path):
            return problems
        reader = open_tokens(path, reading)
    except UserError as error:
        return [*problems, *(problem for problem in error.problems if problem not in problems)]
    total = total or len(reader) * stored(reader.info.dtype).itemsize
    damage = [Problem(what, str(path), COPY_AGAIN) for what in _content_problems(reader, read)]
    return [*problems, *damage]


def _ledger_problems(path: Path) -> list[Problem]:
    """What is wrong with the counts beside a set, if there are any."""
    if not path.is_file():
        return []
    value = read_json(path)
    # Earlier programs wrote no seal, and these keys only.
    unsealed = {"lines", "kept", "dropped", "first_dropped"}
    if isinstance(value, dict) and (value.keys() == unsealed or value.get(SEAL) == seal_of(value)):
        return []
    return [Problem("the ledger is not what was written: its checksum differs", str(path))]


def _format(name: str, *, where: Path) -> Format:
    if name not in FORMATS:
        raise DataError(
            f"the token format {name!r} is not known; known are {', '.join(sorted(FORMATS))}",
            where=where,
            remedy="this one is read only" if name in pipelines.PIPELINES else None,
        )
    return FORMATS[name]


def find_manifest(prefix: Path) -> Manifest | None:
    """The manifest of a finished set; None if another program made it."""
    if file_of(prefix, ".json").is_file():
        return read_manifest(prefix)
    if prefix.is_file() and is_manifest(file_of(prefix.with_suffix(""), ".json")):
        raise _not_found(prefix, format=None)
    return None


def _not_found(prefix: Path, *, format: str | None) -> TokensNotFoundError:
    if match := _ADDRESS.match(str(prefix)):
        return TokensNotFoundError(
            "token files are mapped into memory, so they have to be on a disk of this machine",
            where=shown(f"{match[1]}://{match[2]}"),
            remedy="bring the set here first: gristmill tokens copy ADDRESS tokens/NAME",
        )
    manifest = file_of(prefix, ".json")
    if any(file_of(prefix, suffix).exists() for suffix in (".bin", ".starts")):
        return TokensNotFoundError(
            f"the token set is unfinished: it has no manifest {manifest.name}",
            where=prefix,
            remedy="prepare it again; plain ids of nanoGPT can be read after: gristmill tokens "
            f"convert {prefix} --from flat --format flat -o NEW",
        )
    folder = prefix if prefix.is_dir() else prefix.parent
    present = sorted(path.stem for path in folder.glob("*.json") if is_manifest(path))
    if prefix.suffix and is_manifest(file_of(prefix.with_suffix(""), ".json")):
        remedy = f"leave out the ending: {prefix.with_suffix('')}"
    elif not folder.is_dir():
        remedy = f"the folder {folder} does not exist"
    elif present:
        remedy = f"the folder {folder} holds these token sets: {', '.join(present)}"
    else:
        remedy = f"the folder {folder} holds no token sets; make one with: gristmill prepare"
    kind = f"token set of the format {format}" if format else "token set"
    what = f"there is no {kind} here: looked for {manifest}"
    return TokensNotFoundError(what, where=prefix, remedy=remedy)


def _histogram(lengths: Starts) -> dict[int, int]:
    # frexp gives the exponent e with 2^(e-1) <= length < 2^e, exactly for lengths below 2^53.
    exponents = np.frexp(lengths.astype(np.float64))[1]
    counts = np.bincount(exponents)
    used = range(int(exponents.min()), len(counts))
    return {2 ** (exponent - 1): int(counts[exponent]) for exponent in used}


def _content_problems(reader: TokenReader, read: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with the ids and with the document starts, the first of each; `read` is called
    with the bytes of ids that were looked at."""
    vocab_size = reader.info.vocab_size
    for start, ids in pieces(reader):
        outside = np.flatnonzero(ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size))
        if len(outside):
            first = int(outside[0])
            of = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size}"
            yield f"the id {int(ids[first])} at position {start + first} is outside {of}"
            break
        read(ids.nbytes)
    starts = reader.document_starts
    gaps = np.diff(starts, append=len(reader))
    if int(starts[0]) != 0:
        yield f"the first document begins at position {int(starts[0])} instead of 0"
    elif (gaps <= 0).any():
        document = int(np.flatnonzero(gaps <= 0)[0])
        yield f"document {document} does not end after it begins, at {int(starts[document])}"


# ------------------------------------------------------------------ sets of other programs


def _open_foreign(path: Path, reading: Reading) -> TokenReader | None:
    """Open a set without a manifest, of the format asked for or of any that is recognised."""
    format, files = _find(path, reading.format)
    if format is None:
        return None
    if reading.dtype is not None and format not in (shards.FLAT, *pipelines.PIPELINES):
        raise UserError(
            f"files of the format {format} state how their ids are stored",
            where=str(path),
            remedy="leave out --dtype",
        )
    one_document, documents_known = np.zeros(1, dtype=np.int64), format in megatron.FORMATS
    if format in megatron.FORMATS:
        token_files = megatron.read_files(files[0].with_suffix(""))
    elif format in pipelines.PIPELINES:
        ids = tuple(file for file in files if file.suffix == pipelines.ENDINGS[format])
        token_files, documents_known = pipelines.read_files(
            pipelines.PipelineFiles(ids, files), format, dtype=reading.dtype
        )
    elif format == shards.FLAT:
        dtype = reading.dtype or "uint16"
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UserError(f"ids are stored as one of {known}, not {dtype}", where=str(path))
        token_files = TokenFiles([shards.plain_shard(files[0], dtype=dtype)], one_document)
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
    if reading.end_of_text is None or documents_known:
        return reader
    starts = document_starts(reader, between=reading.end_of_text)
    return TokenReader(replace(info, documents=len(starts)), replace(token_files, starts=starts))


def _find(path: Path, format: str | None) -> tuple[str | None, tuple[Path, ...]]:
    """The format of a set without a manifest, and its files."""
    if file_of(path, ".starts").exists():
        return None, ()
    if format == shards.FLAT:
        file = path if path.is_file() else file_of(path, ".bin")
        return (shards.FLAT, (file,)) if file.is_file() else (None, ())
    if format in (None, *megatron.FORMATS):
        named = path.suffix in (".bin", ".idx") and path.is_file()
        prefix = path.with_suffix("") if named else path
        if file_of(prefix, ".idx").is_file():
            return format or megatron.FORMAT, (file_of(prefix, ".bin"), file_of(prefix, ".idx"))
    for pipeline in pipelines.PIPELINES:
        if format in (None, pipeline):
            found = pipelines.find_files(path, pipeline, asked=format is not None)
            if found is not None:
                return pipeline, found.all
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
