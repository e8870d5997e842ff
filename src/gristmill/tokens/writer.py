"""Writing a token set in any format: check the ids, count them, and put the files in place.

A format is a subclass of `TokenWriter` that fills hidden files beside the set. Nothing is visible
under the set's name before `finish`; then, with everything on the disk,

    the old manifest is removed -> files of an old set that are not replaced are removed
    -> the new files are renamed into place -> the new manifest is written

so a manifest never describes files of another set, and files of two sets never look like one (see
`gristmill.tokens.store` for what is read without a manifest). A lock, held from the first byte
until nothing more is written, keeps a second process away.

A hidden mark, `.NAME.unfinished`, is there from before the first of these steps until all is done,
so that a set whose process was killed meanwhile is not taken for one that must not be replaced.

A set can outlive its process. Its hidden files then have names that another process finds again,
and `save` returns the length and checksum of each. The process that resumes cuts them back to that
length and compares the checksums. If the process was killed while renaming, files that were already
in place are first renamed back. A set can also be rewound to what it was at a `mark`.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import storage_errors, sync_file, sync_folder, utf8
from gristmill.base.locks import OutputLock
from gristmill.tokens.format import (
    FileFacts,
    IdRange,
    Manifest,
    NewSet,
    Starts,
    TokenFiles,
    TokenReader,
    TokenSetInfo,
    file_of,
    is_manifest,
    map_array,
    read_manifest,
    stored,
    write_manifest,
)
from gristmill.tokens.hashed_file import BackgroundHash, Hash, HashedFile
from gristmill.tokens.origins import ORIGINS_FILE, WIDTH, Packed, write_origins

_FIXED = (".json", ".idx", ".bin", ".starts", ORIGINS_FILE)
_PLAIN_ORIGINS = f"{ORIGINS_FILE}-plain"
_FIRST = np.zeros(1, dtype=np.int64)


class TokenWriter(abc.ABC):
    """A token set that is being written; formats say which files it has and how they are filled."""

    def __init__(self, new: NewSet, *, dtype: str) -> None:
        state = new.state or {}
        self._new = new
        self._dtype = dtype
        self._stored = stored(dtype)
        self.tokens = int(state.get("tokens", 0))
        self.documents = int(state.get("documents", 0))
        self._saved: Mapping[str, Any] = state.get("body", {})
        self._files: list[HashedFile] = []
        """In the order in which they are renamed into place."""
        self._scratch: list[HashedFile] = []
        """Files that are only needed while the set is written."""
        self._origins: HashedFile | None = None
        """The plain origins of documents, if they are recorded."""
        self._content = self._new_hash()
        """The checksum of the ids."""
        self._lock = OutputLock(new.prefix, purpose="writing")
        self._lock.acquire()
        try:
            if not new.state:
                refuse_existing(new)
            if new.state is None:
                _remove_hidden(new, ending=r"\d+\.tmp")
            with storage_errors(new.prefix):
                self._open_files()
                if new.origins:
                    self._origins = self._hidden(_PLAIN_ORIGINS, state.get("origins"))
                    assert self._origins.bytes == WIDTH * self.documents
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _open_files(self) -> None:
        """Begin the files, or resume those that `self._saved` describes."""

    @abc.abstractmethod
    def _write(self, ids: npt.NDArray[Any], starts: Starts, sequences: Starts) -> None:
        """Append ids in the stored type in which documents and sequences begin at some positions;
        every document begins a sequence."""

    def _start_bytes(self, starts: Starts) -> bytes:
        """Document starts as they are stored in PREFIX.starts."""
        return (starts + self.tokens).astype("<u8").tobytes()

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]:
        """Describe the files for `_open_files` and `_rewind`."""

    @abc.abstractmethod
    def _rewind(self, body: Mapping[str, Any]) -> None:
        """Cut the files back to what `_state` described."""

    @abc.abstractmethod
    def _readable(self) -> TokenFiles:
        """The hidden files as those of a set."""

    @abc.abstractmethod
    def _close(self) -> dict[str, FileFacts]:
        """Complete the files and flush them, still under hidden names."""

    def _new_hash(self) -> Hash:
        return BackgroundHash() if self._new.background else hashlib.sha256()

    def _hidden(self, suffix: str, saved: Any = None, header: bytes = b"") -> HashedFile:
        final = file_of(self._new.prefix, suffix)
        ending = f"{os.getpid()}.tmp"
        if self._new.state is not None:
            ending = f"part{self._new.generation or ''}"
        return HashedFile(final, ending=ending, saved=saved, header=header, hash=self._new_hash())

    def add(self, ids: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append one document; an id outside the vocabulary is refused."""
        self.append(ids, starts=_FIRST)

    def append(
        self,
        ids: npt.NDArray[Any] | Sequence[int],
        *,
        starts: Starts,
        sequences: Starts | None = None,
        extremes: IdRange | None = None,
        origins: Packed | None = None,
    ) -> None:
        """Append tokens in which documents begin at the positions `starts`.

        Tokens before the first of them belong to the last document of the call before. Some formats
        split documents into sequences, which begin at `sequences`; the others do not store them.
        `extremes` are the smallest and the largest id, if they are known; `origins` those of the
        documents, in sets that record them.
        """
        new = self._new
        array = np.asarray(ids)
        assert array.ndim == 1 and array.size > 0, "a document is a non-empty row of ids"
        assert array.dtype.kind in "iu", f"ids are whole numbers, not {array.dtype}"
        smallest, largest = extremes or (int(array.min()), int(array.max()))
        if smallest < 0 or largest >= new.vocab_size:
            outside = smallest if smallest < 0 else largest
            raise DataError(
                f"the id {outside} is outside the vocabulary of {new.vocab_size}",
                where=f"document {self.documents} of {new.prefix}",
                remedy="name the tokenizer that made these ids (--tokenizer)",
            )
        sequences = starts if sequences is None else sequences
        if starts is not _FIRST:
            assert self.documents or (len(starts) and starts[0] == 0), "a set begins a document"
            for places in (starts, sequences):
                assert not len(places) or 0 <= places[0] <= places[-1] < len(array)
                assert (np.diff(places) > 0).all(), "documents and sequences are not empty"
            assert np.isin(starts, sequences).all(), "a document begins with a sequence"
        with storage_errors(new.prefix):
            self._write(array.astype(self._stored, copy=False), starts, sequences)
            if self._origins is not None:
                assert origins is not None and len(origins) == len(starts)
                self._origins.write(origins.astype("<i8").tobytes())
        self.documents += len(starts)
        self.tokens += len(array)

    def save(self) -> dict[str, Any]:
        """Flush everything to the disk; the result, as JSON, lets another process resume.

        Only for sets that were begun with a `state`.
        """
        assert self._new.state is not None, "this set was not begun as one that can be saved"
        with storage_errors(self._new.prefix):
            for file in self._hidden_files:
                file.flush()
        saved = {"tokens": self.tokens, "documents": self.documents, "body": self._state()}
        return saved if self._origins is None else {**saved, "origins": self._origins.state()}

    @property
    def has_origins(self) -> bool:
        """Whether it is recorded where documents come from."""
        return self._origins is not None

    @property
    def _hidden_files(self) -> list[HashedFile]:
        return [*self._files, *self._scratch, *([self._origins] if self._origins else [])]

    def mark(self) -> dict[str, Any]:
        """A place to which the set can be rewound, as JSON; cheap only to the last one made."""
        for file in self._hidden_files:
            file.mark()
        marked = {"tokens": self.tokens, "documents": self.documents, "body": self._state()}
        if self._origins is not None:
            marked["origins"] = {"bytes": self._origins.bytes}
        return marked

    def rewind(self, mark: Mapping[str, Any]) -> None:
        """Forget everything that was written after a mark."""
        if mark["tokens"] == self.tokens:
            return
        self.tokens, self.documents = mark["tokens"], mark["documents"]
        with storage_errors(self._new.prefix):
            self._rewind(mark["body"])
            if self._origins is not None:
                self._origins.rewind(WIDTH * self.documents)

    def reader(self) -> TokenReader:
        """What was saved last, for reading; the files stay hidden."""
        reader = TokenReader(self._info(), self._readable())
        if self._origins is not None:
            reader.plain_origins = map_array(self._origins.path, "<i8", count=self.documents)
        return reader

    def close(self) -> None:
        """Close the files, and leave what was saved for another process."""
        for file in self._hidden_files:
            file.release()
        self._lock.release()

    def finish(
        self,
        *,
        text_bytes: int | None = None,
        may_be_empty: bool = False,
        companions: Callable[[TokenSetInfo], None] = lambda info: None,
        sources: Sequence[str] = (),
    ) -> TokenSetInfo:
        """Put the set in place, its manifest last; then `companions` writes what belongs beside it.
        `sources`: the names of those that origins number.

        Only a part of a larger set may have no documents; it is its manifest alone.
        """
        assert self.documents > 0 or may_be_empty, "a token set has at least one document"
        new = self._new
        with storage_errors(new.prefix):
            files = self._close() if self.documents else {}
            if self._origins is not None and self.documents:
                index = self._hidden(ORIGINS_FILE)
                self._files.append(index)
                files[ORIGINS_FILE] = write_origins(index, self._origins.content(), sources)
            if new.state is None:
                # Before anything is in place: nobody would look for them beside a complete set.
                for file in (*self._scratch, *([self._origins] if self._origins else [])):
                    file.discard()
            self._mark_unfinished()
            # An old index must not be read with the new ids, even if a new one follows. An old
            # `.starts` marks shards without a manifest as unfinished, so it is removed last.
            old = _existing(new) if new.state is None or new.overwrite else []
            file_of(new.prefix, ".json").unlink(missing_ok=True)
            for suffix in sorted(old, key=lambda suffix: suffix == ".starts"):
                if suffix == ".idx" or suffix not in files:
                    file_of(new.prefix, suffix).unlink(missing_ok=True)
            for file in self._files if self.documents else ():
                file.publish()
            sync_folder(new.prefix.parent)
        info = self._info(text_bytes)
        write_manifest(new.prefix, Manifest(info, new.tokenizer, files, new.checked))
        companions(info)
        if new.state is None:
            _unfinished(new.prefix).unlink(missing_ok=True)
            self.abandon()
        return info

    def _mark_unfinished(self) -> None:
        """Note that what is in place from now on is no set yet."""
        if self._new.state is None:
            mark = _unfinished(self._new.prefix)
            mark.write_bytes(utf8(self._new.request))
            sync_file(mark)
            sync_folder(mark.parent)

    def _info(self, text_bytes: int | None = None) -> TokenSetInfo:
        new, fingerprint = self._new, self._new.tokenizer["fingerprint"]
        return TokenSetInfo(
            format=new.format,
            dtype=self._dtype,
            tokens=self.tokens,
            documents=self.documents,
            vocab_size=new.vocab_size,
            end_of_text=new.end_of_text,
            tokenizer=None if fingerprint is None else str(fingerprint),
            fingerprint=self._content.hexdigest(),
            text_bytes=text_bytes,
        )

    def abandon(self) -> None:
        """Remove everything that is not in place.

        Sets that were begun with a `state` need this after `finish` too, once nobody will resume
        them.
        """
        for file in self._hidden_files:
            file.discard()
        if not _existing(self._new):
            _unfinished(self._new.prefix).unlink(missing_ok=True)
        if self._new.state is not None:
            _remove_hidden(self._new, ending=r"part\d*")
        self._lock.release()


def raw_bytes(ids: npt.NDArray[Any]) -> memoryview:
    """The bytes of ids, without a copy."""
    return np.ascontiguousarray(ids).view(np.uint8).data


def shard_suffixes(prefix: Path, ending: str) -> list[str]:
    """What follows PREFIX in the names PREFIX_<digits><ending> that exist, in order of number."""
    pattern = re.compile(re.escape(prefix.name) + rf"(_(\d+){re.escape(ending)})")
    folder = prefix.parent
    names = os.listdir(folder) if folder.is_dir() else []
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return [match[1] for match in sorted(matches, key=lambda match: (int(match[2]), match[1]))]


SHARD_ENDINGS: Mapping[str, str] = {"llmc": ".bin", "npy": ".npy"}
"""How the files of formats with several of them end."""


def _existing(new: NewSet) -> list[str]:
    """What follows PREFIX in the names of files that a new set would replace."""
    prefix = new.prefix
    suffixes = dict.fromkeys(_FIXED)
    if new.format in SHARD_ENDINGS:
        suffixes |= dict.fromkeys(shard_suffixes(prefix, SHARD_ENDINGS[new.format]))
    if is_manifest(file_of(prefix, ".json")):
        # A damaged manifest names nothing; what it stood for is found by its names above.
        with contextlib.suppress(UserError):
            suffixes |= dict.fromkeys(read_manifest(prefix).files)
    return [suffix for suffix in suffixes if file_of(prefix, suffix).is_file()]


def _unfinished(prefix: Path) -> Path:
    """The mark of a set that is being put in place."""
    return prefix.with_name(f".{prefix.name}.unfinished")


def _is_unfinished(new: NewSet) -> bool:
    """Whether what is here was left by a process that was killed while it put a set in place: one
    without a manifest, or one of the same request, of which something beside it may be missing."""
    mark = _unfinished(new.prefix)
    if not mark.is_file():
        return False
    return not file_of(new.prefix, ".json").exists() or mark.read_bytes() == utf8(new.request)


def _remove_hidden(new: NewSet, *, ending: str) -> None:
    """Remove what earlier attempts left: other generations, shards that are not needed now, and
    files of a process that was killed."""
    shard = r"(_\d+)?" if new.format in SHARD_ENDINGS else ""
    name = (
        re.escape(f".{new.prefix.name}")
        + shard
        + r"\.(bin|npy|starts|origins(-plain)?|(ledger\.)?json|idx(\.\w+)?)\."
        + ending
    )
    for file in os.listdir(new.prefix.parent):
        if re.fullmatch(name, file):
            (new.prefix.parent / file).unlink(missing_ok=True)


def refuse_existing(new: NewSet) -> None:
    """Refuse to replace files without being asked to."""
    manifest = file_of(new.prefix, ".json")
    if manifest.exists() and not is_manifest(manifest):
        raise UserError(
            "this file is not part of a token set, and writing the set would replace it",
            where=str(manifest),
            remedy="give the token set another name (--output)",
            exit=Exit.REFUSED,
        )
    existing = [file_of(new.prefix, suffix).name for suffix in _existing(new)]
    if existing and not new.overwrite and not _is_unfinished(new):
        some = ", ".join(existing[:4]) + (", …" if len(existing) > 4 else "")
        raise UserError(
            f"there is already a token set here ({some})",
            where=str(new.prefix),
            remedy="give the new set another name, or replace this one with --overwrite",
            exit=Exit.REFUSED,
        )
