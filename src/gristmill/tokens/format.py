"""What all token sets on disk have in common: their facts, their manifest, and reading their ids.

A set named PREFIX is a few files that start with PREFIX, one of them the manifest:

    PREFIX.json   {"kind": "gristmill token set", "version": 1, "format": "flat", "dtype": "uint16",
                   "tokens": 5, "documents": 2, "vocab_size": 257, "end_of_text": 256,
                   "text_bytes": 3, "tokenizer": {"type": "bytes", "fingerprint": "…", …},
                   "content": "…", "files": {".bin": {"bytes": 10, "sha256": "…"}, …},
                   "created_by": "gristmill 0.1.0", "seal": "…"}

The manifest is written last, so a set without one is unfinished, or another program made it: see
`gristmill.tokens.store`. It names its files by what follows PREFIX, so that a set may be moved
and renamed. "content" is the SHA-256 of the ids in their stored type, however they are divided into
files. "seal" is the SHA-256 of the rest of the manifest, as JSON with sorted keys and no spaces;
manifests of earlier programs have none. Documents are not empty and lie end to end: document i
begins at `document_starts[i]` and ends where the next one begins. Opening a set compares the sizes
of its files only, since a terabyte of tokens must open at once; `verify_tokens` compares the
checksums.

Ids are read from one file or many, memory-mapped, as one array. A file holds ids after an optional
header. A read within one file is a view, a read across files is a copy. Files are mapped when they
are first read, and only a limited number of maps is kept, since each costs a file descriptor and a
set may have thousands of files. A view keeps its map alive.
"""

from __future__ import annotations

import functools
import importlib.metadata
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.files import SEAL, read_json, seal_of, write_sealed_json

KIND = "gristmill token set"
LEDGER_FILE = ".ledger.json"
"""What became of every line of the text, beside the sets that were prepared from it."""
SIGNATURES_FILE = ".signatures"
"""What the documents of a set were compared by, if duplicates were dropped."""
VERSION = 1
COPY_AGAIN = "copy the set again from where it came, or prepare it again"
_SAME_NAMES = (
    "format", "dtype", "tokens", "documents", "vocab_size", "end_of_text", "text_bytes",
)  # fmt: skip
"""What the manifest calls as `TokenSetInfo` does."""
_UNSEALED = {
    "kind", "version", *_SAME_NAMES, "tokenizer", "content", "token_file", "files", "created_by",
}  # fmt: skip
"""All keys of manifests without a seal."""
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
"""The types an id may be stored in; we write uint16, uint32 and int32 only."""

Starts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSetInfo:
    """The facts about a token set that its users need."""

    format: str
    """Name of the format, as in the table of `gristmill.tokens.store`."""
    dtype: str
    """How an id is stored: one of `DTYPES`, little-endian."""
    tokens: int
    documents: int
    vocab_size: int | None
    """Every id is below this number; None where nobody wrote it down."""
    end_of_text: int | None
    """The id that ends a document, if there is one and it is known."""
    tokenizer: str | None
    """Fingerprint of the tokenizer that made the ids; None where nobody wrote it down."""
    fingerprint: str
    """SHA-256 of the ids; of a set without a manifest, of its sizes and pieces of its content."""
    text_bytes: int | None = None
    """UTF-8 bytes of the text that was encoded, if known."""


@dataclass(frozen=True)
class FileFacts:
    """Size and checksum of one file of a set."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of PREFIX.json."""

    info: TokenSetInfo
    tokenizer: Mapping[str, Any]
    """The tokenizer's spec; its "fingerprint" says which tokenizer it was."""
    files: Mapping[str, FileFacts]
    """The files of the set, by what follows PREFIX in their names."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """The tasks of evaluations whose items the text was checked not to hold, and how, by name."""
    sealed: bool = True
    """Whether the manifest has a checksum of its own, so that damage to it is noticed."""


@dataclass(frozen=True)
class NewSet:
    """What is asked for when a token set is begun."""

    prefix: Path
    vocab_size: int
    end_of_text: int | None
    tokenizer: Mapping[str, Any]
    """The tokenizer's spec; its "fingerprint" is None if the tokenizer is not known."""
    format: str = "flat"
    shard_size: int | None = None
    """The most tokens in one file, for formats that write several; 100M if not given."""
    overwrite: bool = False
    state: Mapping[str, Any] | None = None
    """With a state the set can outlive its process: {} begins one, and what `TokenWriter.save`
    returned resumes it."""
    background: bool = False
    """Whether other threads compute checksums; the ids that are given must not change then."""
    generation: int = 0
    """Tells the hidden files of such a set from those that an earlier attempt left."""
    origins: bool = False
    """Whether it is recorded where each document comes from (`gristmill.tokens.origins`)."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """The tasks that its text was checked against (`Manifest.checked`)."""
    request: str = ""
    """What the set is made of, for sets without a state: if their process is killed while it puts
    them in place, the same request may replace them."""


def dtype_for(vocab_size: int) -> str:
    """The narrowest unsigned type of 2 or 4 bytes that holds every id of a vocabulary."""
    assert 0 < vocab_size <= 2**32, f"no stored type holds {vocab_size} ids"
    return "uint16" if vocab_size <= 2**16 else "uint32"


def stored(dtype: str) -> np.dtype[Any]:
    """The type as it is stored in files, little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def file_of(prefix: Path, suffix: str) -> Path:
    """PREFIX with a suffix appended: a dot inside the prefix's own name stays."""
    return Path(f"{prefix}{suffix}")


def program_version() -> str:
    """The name and version of this program, for manifests."""
    try:
        return f"gristmill {importlib.metadata.version('gristmill')}"
    except importlib.metadata.PackageNotFoundError:
        return "gristmill (not installed)"


def write_manifest(prefix: Path, manifest: Manifest) -> None:
    """Write PREFIX.json, which makes the set a finished one."""
    value = {
        "kind": KIND,
        "version": VERSION,
        **{name: getattr(manifest.info, name) for name in _SAME_NAMES},
        "tokenizer": dict(manifest.tokenizer),
        "content": manifest.info.fingerprint,
        "files": {suffix: vars(facts) for suffix, facts in manifest.files.items()},
        **({"checked": dict(manifest.checked)} if manifest.checked else {}),
        "created_by": program_version(),
    }
    write_sealed_json(file_of(prefix, ".json"), value)


def common_tasks(checked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tasks that several sets were checked against in the same way."""
    first, *others = checked
    return {
        task: facts
        for task, facts in first.items()
        if all(other.get(task) == facts for other in others)
    }


def is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of a token set, of whatever version."""
    try:
        value = read_json(path)
    except UserError:
        return False
    return isinstance(value, dict) and value.get("kind") == KIND


def read_manifest(prefix: Path) -> Manifest:
    """Read PREFIX.json, or say what is wrong with it."""
    path = file_of(prefix, ".json")
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise DataError("this is not the manifest of a token set", where=path)
    if value.get("version") != VERSION:
        raise DataError(
            f"this token set has version {value.get('version')}; this program reads {VERSION}",
            where=path,
            remedy=f"read it with the program that wrote it: {value.get('created_by')}",
        )
    unknown = sorted(value.keys() - _UNSEALED)
    if SEAL in value and value[SEAL] != seal_of(value):
        what = "the manifest is not what was written: its checksum differs"
        raise DataError(what, where=path, remedy=COPY_AGAIN)
    if SEAL not in value and unknown:
        what = f"the manifest is damaged: it has no checksum, but the unknown key {unknown[0]!r}"
        raise DataError(what, where=path, remedy=COPY_AGAIN)
    try:
        return _parse_manifest(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the manifest is damaged ({type(error).__name__}: {error})",
            where=path,
            remedy=COPY_AGAIN,
        ) from error


def _parse_manifest(value: dict[str, Any]) -> Manifest:
    files = {
        str(suffix): FileFacts(bytes=int(facts["bytes"]), sha256=str(facts["sha256"]))
        for suffix, facts in value["files"].items()
    }
    for suffix in files:
        # An overwritten set's files are removed by these names, so none may lead elsewhere.
        if not suffix.startswith((".", "_")) or "/" in suffix:
            raise ValueError(f"a file is named {suffix!r}")
    if value["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {value['dtype']!r}")
    made_by = value["tokenizer"]["fingerprint"]
    # Manifests of version 1 first named the file whose checksum is that of the content.
    content = value["content"] if "content" in value else files[value["token_file"]].sha256
    info = TokenSetInfo(
        format=str(value["format"]),
        dtype=str(value["dtype"]),
        tokens=int(value["tokens"]),
        documents=int(value["documents"]),
        vocab_size=int(value["vocab_size"]),
        end_of_text=None if value["end_of_text"] is None else int(value["end_of_text"]),
        tokenizer=None if made_by is None else str(made_by),
        fingerprint=str(content),
        text_bytes=None if value["text_bytes"] is None else int(value["text_bytes"]),
    )
    checked = {str(task): dict(facts) for task, facts in value.get("checked", {}).items()}
    return Manifest(info, value["tokenizer"], files, checked, sealed=SEAL in value)


def size_problems(prefix: Path, manifest: Manifest) -> list[Problem]:
    """Files that are missing, or shorter or longer than the manifest says."""
    problems = []
    for suffix, facts in manifest.files.items():
        path = file_of(prefix, suffix)
        size = path.stat().st_size if path.is_file() else None
        if size == facts.bytes:
            continue
        what = "this file of the token set is missing"
        if size is not None:
            how = "cut short" if size < facts.bytes else "too long"
            what = f"the file is {how}: {size} bytes, and the manifest says {facts.bytes}"
        problems.append(Problem(what, where=str(path), remedy=COPY_AGAIN))
    return problems


PIECE = 1 << 21
"""Tokens that are read at a time when a whole set is read."""

_MAPS = 128


@dataclass(frozen=True)
class TokenShard:
    """The ids in one file."""

    path: Path
    offset: int
    """Bytes before the first id."""
    tokens: int
    dtype: str


@dataclass(frozen=True)
class TokenFiles:
    """What a format finds in the files of a set."""

    shards: Sequence[TokenShard]
    starts: Starts
    """The positions at which documents begin."""
    sequence_lengths: npt.NDArray[Any] | None = None
    """Tokens of each sequence, empty ones included, in formats that split documents into some."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class IdRange(NamedTuple):
    """The smallest and the largest id of a set."""

    smallest: int
    largest: int


class TokenReader:
    """A finished token set, memory-mapped."""

    def __init__(
        self,
        info: TokenSetInfo,
        files: TokenFiles,
        *,
        checked: Mapping[str, Any] | None = None,
    ) -> None:
        assert files.tokens == info.tokens
        self.info = info
        self.checked = checked
        """The tasks that the text was checked against; None for a set without a manifest."""
        self.plain_origins: npt.NDArray[np.int64] | None = None
        """Of a set that is being written: where its documents come from."""
        self.document_starts = files.starts
        self.sequence_lengths = files.sequence_lengths
        self._dtype = stored(info.dtype)
        self._shards = [shard for shard in files.shards if shard.tokens]
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._ids = functools.lru_cache(maxsize=_MAPS)(self._map)

    def _map(self, number: int) -> npt.NDArray[Any]:
        shard = self._shards[number]
        return map_array(shard.path, self._dtype, offset=shard.offset, count=shard.tokens)

    def __len__(self) -> int:
        return self.info.tokens

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """The ids at positions start to start + count, in their stored type."""
        assert start >= 0 and count >= 0 and start + count <= self.info.tokens, (
            f"tokens {start} to {start + count} of {self.info.tokens}"
        )
        if count == 0:
            return np.empty(0, dtype=self._dtype)
        number = bisect_right(self._ends, start)
        inside = start - (self._ends[number - 1] if number else 0)
        if start + count <= self._ends[number]:
            return self._ids(number)[inside : inside + count]
        parts, wanted = list[npt.NDArray[Any]](), count
        while wanted:
            part = self._ids(number)[inside : inside + wanted]
            parts.append(part)
            wanted, number, inside = wanted - len(part), number + 1, 0
        return np.concatenate(parts)

    @property
    def sequence_starts(self) -> Starts | None:
        """The positions at which sequences begin, empty ones left out."""
        if self.sequence_lengths is None:
            return None
        lengths = self.sequence_lengths.astype(np.int64)
        return cast(Starts, (np.cumsum(lengths) - lengths)[lengths > 0])

    def locate(self, position: int) -> tuple[Path, int]:
        """The file that holds a position of the set, and the number of that token in the file."""
        number = bisect_right(self._ends, position)
        return self._shards[number].path, position - (self._ends[number - 1] if number else 0)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the ids."""
        return tuple(shard.path for shard in self._shards)


def map_array(path: Path, dtype: npt.DTypeLike, *, offset: int = 0, count: int) -> npt.NDArray[Any]:
    """Part of a file as an array, read when it is touched."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    # Slices of a plain array are far cheaper to take than slices of numpy's memmap class.
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def read_starts(prefix: Path) -> Starts:
    """The positions in PREFIX.starts."""
    path = file_of(prefix, ".starts")
    return cast(Starts, map_array(path, "<i8", count=file_size(path) // 8))


def file_size(path: Path) -> int:
    """The size of a file that a set cannot do without."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=path) from error


def piece_bounds(reader: TokenReader) -> Iterator[tuple[int, int]]:
    """The position and length of each piece in which a whole set is read."""
    for start in range(0, len(reader), PIECE):
        yield start, min(PIECE, len(reader) - start)


def pieces(reader: TokenReader) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The whole set in its order, a few MiB at a time, each piece with its position."""
    for start, count in piece_bounds(reader):
        yield start, reader.read(start, count)


def id_range(reader: TokenReader) -> IdRange:
    """The smallest and the largest id; reads every token once."""
    smallest, largest = zip(*((ids.min(), ids.max()) for _, ids in pieces(reader)), strict=True)
    return IdRange(int(min(smallest)), int(max(largest)))
