"""What writing a token set is in every format: check the ids, count, and put the files in place.

A format brings a `Body`, which fills hidden files beside the set, named for this process. Nothing
is visible under the set's name before `finish`; then, with everything on the disk,

    the old manifest is removed -> files of an old set that have no successor are removed
    -> the new files are renamed into place -> the new manifest is written

so that at no moment a manifest describes files of another set, or files of two sets can be taken
for one (see `gristmill.tokens.foreign` for what is believed without a manifest).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import sha256_file, storage_errors, sync_folder
from gristmill.tokens.format import (
    FileFacts,
    Manifest,
    NewSet,
    TokenSetInfo,
    checked_ids,
    file_of,
    is_manifest,
    program_version,
    read_manifest,
    stored,
    write_manifest,
)

_BUFFER = 1 << 20
_FIXED = (".json", ".idx", ".bin", ".starts")
_FIRST = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Stretch:
    """The next ids of a set, with all that formats write down about them."""

    ids: npt.NDArray[Any]
    """In the stored type."""
    position: int
    """Tokens of the set that came before."""
    starts: npt.NDArray[np.int64]
    """Where documents begin in the stretch."""
    sequences: npt.NDArray[np.int64]
    """Where sequences begin in the stretch: at least where documents do."""


@dataclass(frozen=True)
class Written:
    """Files that are complete and on the disk, still under hidden names."""

    files: Mapping[str, FileFacts]
    content: str
    """SHA-256 of the ids, end to end."""


class Body(Protocol):
    """The files of one format, being filled."""

    def write(self, stretch: Stretch) -> None: ...

    def close(self) -> Written:
        """Complete the files and flush them to the disk."""
        ...

    def publish(self) -> None:
        """Rename the files into place."""
        ...

    def discard(self) -> None:
        """Remove the hidden files."""
        ...


class SetWriter:
    """Writes a token set, document by document or in long stretches."""

    def __init__(
        self, new: NewSet, *, format: str, dtype: str, open_body: Callable[[], Body]
    ) -> None:
        _refuse_existing(new, format=format)
        self._new = new
        self._format = format
        self._dtype = dtype
        self._stored = stored(dtype)
        self._tokens = 0
        self._documents = 0
        with storage_errors(new.prefix):
            new.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._body = open_body()

    def add(self, ids: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append one document; an id outside the vocabulary is refused."""
        self._append(ids, starts=_FIRST, sequences=_FIRST)

    def append(
        self,
        ids: npt.NDArray[Any],
        *,
        starts: npt.NDArray[np.int64],
        sequences: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Append a stretch of tokens, in which documents begin at the positions `starts`."""
        self._append(ids, starts=starts, sequences=starts if sequences is None else sequences)

    def _append(
        self,
        ids: npt.NDArray[Any] | Sequence[int],
        *,
        starts: npt.NDArray[np.int64],
        sequences: npt.NDArray[np.int64],
    ) -> None:
        new = self._new
        where = f"document {self._documents} of {new.prefix}"
        array = checked_ids(ids, vocab_size=new.vocab_size, where=where)
        if starts is not _FIRST:
            assert self._documents or (len(starts) and starts[0] == 0), "a set begins a document"
            for places in (starts, sequences):
                assert not len(places) or 0 <= places[0] <= places[-1] < len(array)
                assert (np.diff(places) > 0).all(), "documents and sequences are not empty"
            assert np.isin(starts, sequences).all(), "a document begins with a sequence"
        with storage_errors(new.prefix):
            self._body.write(
                Stretch(array.astype(self._stored, copy=False), self._tokens, starts, sequences)
            )
        self._documents += len(starts)
        self._tokens += len(array)

    def finish(self, *, text_bytes: int | None = None) -> TokenSetInfo:
        """Put the set in place, its manifest last."""
        assert self._documents > 0, "a token set has at least one document"
        new = self._new
        with storage_errors(new.prefix):
            written = self._body.close()
            old = (
                _without_successor(new.prefix, self._format, written.files) if new.overwrite else []
            )
            file_of(new.prefix, ".json").unlink(missing_ok=True)
            for path in old:
                path.unlink(missing_ok=True)
            self._body.publish()
            sync_folder(new.prefix.parent)
        fingerprint = new.tokenizer["fingerprint"]
        info = TokenSetInfo(
            format=self._format,
            dtype=self._dtype,
            tokens=self._tokens,
            documents=self._documents,
            vocab_size=new.vocab_size,
            end_of_text=new.end_of_text,
            tokenizer=None if fingerprint is None else str(fingerprint),
            fingerprint=written.content,
            text_bytes=text_bytes,
        )
        manifest = Manifest(
            info=info,
            tokenizer=new.tokenizer,
            files=written.files,
            created_by=program_version(),
        )
        write_manifest(new.prefix, manifest)
        return info

    def abandon(self) -> None:
        """Remove everything written so far; after `finish` there is nothing to remove."""
        self._body.discard()


def shard_suffixes(prefix: Path, ending: str) -> list[str]:
    """What follows PREFIX in the names PREFIX_<digits><ending> that exist, in order of number."""
    pattern = re.compile(re.escape(prefix.name) + rf"(_(\d+){re.escape(ending)})")
    folder = prefix.parent
    names = os.listdir(folder) if folder.is_dir() else []
    found = [match for name in names if (match := pattern.fullmatch(name))]
    return [match[1] for match in sorted(found, key=lambda match: (int(match[2]), match[1]))]


SHARD_ENDINGS: Mapping[str, str] = {"llmc": ".bin", "npy": ".npy"}
"""How the files of formats with several of them end."""


def _existing(prefix: Path, format: str) -> list[str]:
    """What follows PREFIX in the names of files that a new set would replace."""
    suffixes = dict.fromkeys(_FIXED)
    if format in SHARD_ENDINGS:
        suffixes |= dict.fromkeys(shard_suffixes(prefix, SHARD_ENDINGS[format]))
    if is_manifest(file_of(prefix, ".json")):
        # A damaged manifest names nothing; what it stood for is found by its names above.
        with contextlib.suppress(UserError):
            suffixes |= dict.fromkeys(read_manifest(prefix).files)
    return [suffix for suffix in suffixes if file_of(prefix, suffix).is_file()]


def _without_successor(prefix: Path, format: str, new: Mapping[str, FileFacts]) -> list[Path]:
    """Files of an old set that the new one does not replace; `.starts` last.

    An old index goes too although a new one follows: it would fit the new ids badly or, worse,
    well. An old `.starts` marks shards without a manifest as unfinished for as long as it can.
    """
    old = [name for name in _existing(prefix, format) if name == ".idx" or name not in new]
    return [file_of(prefix, name) for name in sorted(old, key=lambda name: name == ".starts")]


def _refuse_existing(new: NewSet, *, format: str) -> None:
    manifest = file_of(new.prefix, ".json")
    if manifest.exists() and not is_manifest(manifest):
        raise UserError(
            "this file is not part of a token set, and writing the set would replace it",
            where=str(manifest),
            remedy="give the token set another name",
            exit=Exit.REFUSED,
        )
    found = [file_of(new.prefix, suffix).name for suffix in _existing(new.prefix, format)]
    if found and not new.overwrite:
        some = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
        raise UserError(
            f"there is already a token set here ({some})",
            where=str(new.prefix),
            remedy="give the new set another name, or ask to overwrite this one",
            exit=Exit.REFUSED,
        )


class HashedFile:
    """A file written under a hidden name, its checksum kept on the way."""

    def __init__(self, final: Path) -> None:
        self._final = final
        self._temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        self._file = io.BufferedWriter(io.FileIO(self._temporary, "wb"), _BUFFER)
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def close(self) -> FileFacts:
        """Flush the content to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileFacts(bytes=self._bytes, sha256=self._hash.hexdigest())

    def close_with(self, beginning: bytes) -> FileFacts:
        """Replace the first bytes and flush; costs reading the file once more."""
        self._file.flush()
        self._file.seek(0)
        self._file.write(beginning)
        self.close()
        return FileFacts(bytes=self._bytes, sha256=sha256_file(self._temporary))

    def publish(self) -> None:
        os.replace(self._temporary, self._final)

    def discard(self) -> None:
        # Closing flushes what is buffered; on a full disk that fails, and it is not wanted anyway.
        raw = self._file.raw
        if not raw.closed:
            raw.close()
        self._temporary.unlink(missing_ok=True)


_START = np.dtype("<u8")


class StartsFile(HashedFile):
    """PREFIX.starts: the position where each document begins, uint64, little-endian."""

    def __init__(self, prefix: Path) -> None:
        super().__init__(file_of(prefix, ".starts"))

    def note(self, stretch: Stretch) -> None:
        self.write((stretch.starts + stretch.position).astype(_START).tobytes())
