"""What writing a token set is in every format: check the ids, count, and put the files in place.

A format brings a `Body`, which fills hidden files beside the set. Nothing is visible under the
set's name before `finish`; then, with everything on the disk,

    the old manifest is removed -> files of an old set that have no successor are removed
    -> the new files are renamed into place -> the new manifest is written

so that at no moment a manifest describes files of another set, or files of two sets can be taken
for one (see `gristmill.tokens.foreign` for what is believed without a manifest).

A set can be made to outlive its process: then its hidden files have names that do not depend on the
process, and `save` returns how long each was at that moment, and its checksum. Whoever goes on cuts
them back to that length and compares the checksum on the way. A process that ends while files are
being renamed leaves some of them in place; going on first takes these back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


_NOTHING = Written({}, content=hashlib.sha256().hexdigest())


class Body(Protocol):
    """The files of one format, being filled."""

    def write(self, stretch: Stretch) -> None: ...

    def save(self) -> dict[str, Any]:
        """Flush to the disk; the result lets another process go on from here."""
        ...

    def release(self) -> None:
        """Close the files and leave them."""
        ...

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
        if not new.state:
            _refuse_existing(new, format=format)
        self._new = new
        self._format = format
        self._dtype = dtype
        self._stored = stored(dtype)
        self._tokens = int(new.state["tokens"]) if new.state else 0
        self._documents = int(new.state["documents"]) if new.state else 0
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

    def save(self) -> dict[str, Any]:
        """Flush everything to the disk; what is returned, as JSON, lets another process go on."""
        assert self._new.state is not None, "this set was not begun as one that can be saved"
        with storage_errors(self._new.prefix):
            body = self._body.save()
        return {"tokens": self._tokens, "documents": self._documents, "body": body}

    def close(self) -> None:
        """Leave what was saved for another process, and let go of the files."""
        self._body.release()

    def finish(self, *, text_bytes: int | None = None, may_be_empty: bool = False) -> TokenSetInfo:
        """Put the set in place, its manifest last."""
        assert self._documents > 0 or may_be_empty, "a token set has at least one document"
        new = self._new
        with storage_errors(new.prefix):
            written = self._body.close() if self._documents else _NOTHING
            old = (
                _without_successor(new.prefix, self._format, written.files) if new.overwrite else []
            )
            file_of(new.prefix, ".json").unlink(missing_ok=True)
            for path in old:
                path.unlink(missing_ok=True)
            if self._documents:
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
        if new.state is None:
            self._body.discard()
        return info

    def abandon(self) -> None:
        """Remove everything that is not in place.

        After `finish` that is what a set that can be saved kept in case it was not the end.
        """
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


class HiddenFile:
    """A file in the making beside its final place, under a hidden name."""

    def __init__(self, final: Path, *, lasting: bool, saved: Mapping[str, Any] | None) -> None:
        """Begin the file, or go on with what `save` described.

        A `lasting` file has a name that another process finds again.
        """
        ending = "part" if lasting else f"{os.getpid()}.tmp"
        self._final = final
        self._temporary = final.with_name(f".{final.name}.{ending}")
        if saved is not None:
            _take_back(self._temporary, final=final, size=int(saved["bytes"]))
        self._bytes = int(saved["bytes"]) if saved is not None else 0
        raw = io.FileIO(os.open(self._temporary, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        if lasting:
            _lock(raw, where=final)
        raw.truncate(self._bytes)
        self._file = io.BufferedRandom(raw, _BUFFER)
        self._file.seek(self._bytes)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._bytes += len(data)

    def save(self) -> dict[str, Any]:
        """Flush the content to the disk and say how long it is."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes}

    def release(self) -> None:
        """Close the file; what is buffered is not wanted."""
        raw = self._file.raw
        if not raw.closed:
            raw.close()

    def discard(self) -> None:
        # Closing flushes what is buffered; on a full disk that fails, and it is not wanted anyway.
        self.release()
        self._temporary.unlink(missing_ok=True)


class HashedFile(HiddenFile):
    """A hidden file that will be part of the set, its checksum kept on the way."""

    def __init__(
        self,
        final: Path,
        *,
        lasting: bool = False,
        saved: Mapping[str, Any] | None = None,
        beginning: bytes = b"",
    ) -> None:
        super().__init__(final, lasting=lasting, saved=saved)
        self._hash = hashlib.sha256()
        if saved is None:
            self.write(beginning)
            return
        # `close_with` may have replaced it.
        self._file.seek(0)
        self._file.write(beginning)
        for piece in self.content():
            self._hash.update(piece)
        if self._hash.hexdigest() != saved["sha256"]:
            raise _changed(self._temporary)

    def content(self, begin: int = 0) -> Iterator[bytes]:
        """What was written so far, in pieces."""
        self._file.seek(begin)
        while piece := self._file.read(_BUFFER):
            yield piece

    def write(self, data: bytes) -> None:
        super().write(data)
        self._hash.update(data)

    def save(self) -> dict[str, Any]:
        return super().save() | {"sha256": self._hash.hexdigest()}

    def close(self) -> FileFacts:
        """Flush the content to the disk."""
        self.save()
        self._file.close()
        return FileFacts(bytes=self._bytes, sha256=self._hash.hexdigest())

    def close_with(self, beginning: bytes) -> FileFacts:
        """Replace the first bytes and flush; costs reading the file once more."""
        self._file.seek(0)
        self._file.write(beginning)
        self.close()
        return FileFacts(bytes=self._bytes, sha256=sha256_file(self._temporary))

    def publish(self) -> None:
        os.replace(self._temporary, self._final)


def _lock(file: io.FileIO, *, where: Path) -> None:
    """Keep other processes away until the file is closed."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(
            "another process is writing this token set",
            where=str(where),
            remedy="wait for it to end, or give the new set another name",
            exit=Exit.REFUSED,
        ) from error
    except OSError:
        # Some network file systems have no locks; then nobody can be kept away.
        return


def _take_back(temporary: Path, *, final: Path, size: int) -> None:
    """Find the hidden file again, or take it back from its final place."""
    if not temporary.is_file() and final.is_file():
        os.replace(final, temporary)
    if not temporary.is_file() or temporary.stat().st_size < size:
        raise _changed(temporary)


def _changed(path: Path) -> UserError:
    return UserError(
        "this file of the unfinished set is not what was saved",
        where=str(path),
        remedy="ask to overwrite, which begins the set anew",
        exit=Exit.STORAGE,
    )


_START = np.dtype("<u8")


class StartsFile(HashedFile):
    """PREFIX.starts: the position where each document begins, uint64, little-endian."""

    def __init__(self, prefix: Path, *, lasting: bool, saved: Mapping[str, Any] | None) -> None:
        super().__init__(file_of(prefix, ".starts"), lasting=lasting, saved=saved)

    def note(self, stretch: Stretch) -> None:
        self.write((stretch.starts + stretch.position).astype(_START).tobytes())
