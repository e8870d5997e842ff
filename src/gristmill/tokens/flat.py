"""The flat format: all ids in one file, end to end.

    PREFIX.bin      ids, uint16 or uint32, little-endian, nothing else: nanoGPT reads it as it is
    PREFIX.starts   the position where each document begins, uint64, little-endian
    PREFIX.json     the manifest, see `gristmill.tokens.format`

The writer fills hidden files beside the set, named for its process, and renames them when all is on
the disk. Lengths are not stored: they follow from the starts and the number of tokens. There is one
file per kind rather than shards, because a memory map does not mind the size.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import storage_errors, sync_folder
from gristmill.tokens.format import (
    FileFacts,
    Ids,
    Manifest,
    Starts,
    TokenSetInfo,
    checked_ids,
    dtype_for,
    file_of,
    is_manifest,
    program_version,
    size_problems,
    write_manifest,
)

FORMAT = "flat"
_STORED = {"uint16": "<u2", "uint32": "<u4"}
_START = "<u8"
_BUFFER = 1 << 20


class FlatReader:
    """A flat token set, memory-mapped."""

    def __init__(self, prefix: Path, manifest: Manifest) -> None:
        problems = size_problems(prefix, manifest)
        if problems:
            raise UserError(problems, exit=Exit.DATA)
        self.info = manifest.info
        self._ids = _map(file_of(prefix, ".bin"), dtype=_STORED[self.info.dtype])
        self._starts = _map(file_of(prefix, ".starts"), dtype="<i8")
        if len(self._ids) != self.info.tokens or len(self._starts) != self.info.documents:
            raise UserError(
                f"the files hold {len(self._ids)} tokens in {len(self._starts)} documents, and the "
                f"manifest says {self.info.tokens} in {self.info.documents}",
                where=str(prefix),
                remedy="prepare the set again",
                exit=Exit.DATA,
            )

    def __len__(self) -> int:
        return self.info.tokens

    def read(self, start: int, count: int) -> Ids:
        """The ids at positions start to start + count: a view of the file, not a copy."""
        assert start >= 0 and count >= 0 and start + count <= self.info.tokens, (
            f"tokens {start} to {start + count} of {self.info.tokens}"
        )
        return cast(Ids, self._ids[start : start + count])

    @property
    def document_starts(self) -> Starts:
        """The positions at which documents begin."""
        return cast(Starts, self._starts)


def _map(path: Path, *, dtype: str) -> npt.NDArray[Any]:
    # Slices of a plain array are far cheaper to take than slices of numpy's memmap class.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


class FlatWriter:
    """Writes a flat token set, document by document."""

    def __init__(
        self,
        prefix: Path,
        *,
        vocab_size: int,
        end_of_text: int | None,
        tokenizer: Mapping[str, Any],
        overwrite: bool,
    ) -> None:
        _refuse_existing(prefix, overwrite=overwrite)
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._end_of_text = end_of_text
        self._tokenizer = tokenizer
        self._dtype = dtype_for(vocab_size)
        self._tokens = 0
        self._documents = 0
        with storage_errors(prefix):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = _HashedFile(file_of(prefix, ".bin"))
            self._starts = _HashedFile(file_of(prefix, ".starts"))

    def add(self, ids: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append one document; an id outside the vocabulary is refused."""
        where = f"document {self._documents} of {self._prefix}"
        array = checked_ids(ids, vocab_size=self._vocab_size, where=where)
        with storage_errors(self._prefix):
            self._starts.write(np.array(self._tokens, dtype=_START).tobytes())
            self._bin.write(array.astype(_STORED[self._dtype]).tobytes())
        self._documents += 1
        self._tokens += len(array)

    def finish(self, *, text_bytes: int | None = None) -> TokenSetInfo:
        """Put the set in place, its manifest last."""
        assert self._documents > 0, "a token set has at least one document"
        with storage_errors(self._prefix):
            files = {".bin": self._bin.close(), ".starts": self._starts.close()}
            # An old manifest must not describe new files, should the renames be interrupted.
            file_of(self._prefix, ".json").unlink(missing_ok=True)
            self._bin.publish()
            self._starts.publish()
            sync_folder(self._prefix.parent)
        info = self._info(fingerprint=files[".bin"].sha256, text_bytes=text_bytes)
        manifest = Manifest(
            info=info,
            tokenizer=self._tokenizer,
            files=files,
            token_file=".bin",
            created_by=program_version(),
        )
        write_manifest(self._prefix, manifest)
        return info

    def _info(self, *, fingerprint: str, text_bytes: int | None) -> TokenSetInfo:
        return TokenSetInfo(
            format=FORMAT,
            dtype=self._dtype,
            tokens=self._tokens,
            documents=self._documents,
            vocab_size=self._vocab_size,
            end_of_text=self._end_of_text,
            tokenizer=str(self._tokenizer["fingerprint"]),
            fingerprint=fingerprint,
            text_bytes=text_bytes,
        )

    def abandon(self) -> None:
        """Remove everything written so far; after `finish` there is nothing to remove."""
        self._bin.discard()
        self._starts.discard()


def _refuse_existing(prefix: Path, *, overwrite: bool) -> None:
    manifest = file_of(prefix, ".json")
    if manifest.exists() and not is_manifest(manifest):
        raise UserError(
            "this file is not part of a token set, and writing the set would replace it",
            where=str(manifest),
            remedy="give the token set another name",
            exit=Exit.REFUSED,
        )
    existing = [file_of(prefix, suffix) for suffix in (".json", ".bin", ".starts")]
    found = [path.name for path in existing if path.exists()]
    if found and not overwrite:
        raise UserError(
            f"there is already a token set here ({', '.join(found)})",
            where=str(prefix),
            remedy="give the new set another name, or ask to overwrite this one",
            exit=Exit.REFUSED,
        )


class _HashedFile:
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

    def publish(self) -> None:
        os.replace(self._temporary, self._final)

    def discard(self) -> None:
        # Closing flushes what is buffered; on a full disk that fails, and it is not wanted anyway.
        raw = self._file.raw
        if not raw.closed:
            raw.close()
        self._temporary.unlink(missing_ok=True)
