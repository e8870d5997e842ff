"""Writing Megatron's format; see `gristmill.tokens.megatron` for the bytes.

The three arrays of the index grow side by side while their places in the file depend on each
other's final lengths. They are kept in hidden files until the end, so that memory does not grow
with the number of documents, and are then copied behind one another.
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError
from gristmill.tokens.format import NewSet, file_of, stored
from gristmill.tokens.megatron import (
    CODES,
    FORMAT,
    HEADER,
    LONGEST,
    MAGIC,
    VERSION,
    dtype_by_vocabulary,
)
from gristmill.tokens.writer import HashedFile, SetWriter, Stretch, Written

_BUFFER = 1 << 20


def create_set(new: NewSet) -> SetWriter:
    """Begin a set of Megatron's format."""
    dtype = dtype_by_vocabulary(new)
    return SetWriter(
        new, format=FORMAT, dtype=dtype, open_body=lambda: _MegatronBody(new.prefix, dtype)
    )


class _MegatronBody:
    def __init__(self, prefix: Path, dtype: str) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._bin = HashedFile(file_of(prefix, ".bin"))
        self._idx = HashedFile(file_of(prefix, ".idx"))
        self._lengths = _Spool(file_of(prefix, ".idx.lengths"), dtype="<i4")
        self._begins = _Spool(file_of(prefix, ".idx.begins"), dtype="<i8")
        self._documents = _Spool(file_of(prefix, ".idx.documents"), dtype="<i8")
        self._current = 0
        """Tokens so far of the sequence begun last."""

    def write(self, stretch: Stretch) -> None:
        begins, end = stretch.sequences, len(stretch.ids)
        before = self._begins.count
        self._documents.write(before + np.searchsorted(begins, stretch.starts))
        self._begins.write((stretch.position + begins) * stored(self._dtype).itemsize)
        bounds = np.empty(len(begins) + 2, dtype=np.int64)
        bounds[0], bounds[1:-1], bounds[-1] = -self._current, begins, end
        # The first length ends the sequence begun before; at the very beginning there is none.
        lengths = (bounds[1:] - bounds[:-1])[0 if before else 1 :]
        self._check(lengths)
        self._lengths.write(lengths[:-1])
        self._current = int(lengths[-1])
        self._bin.write(stretch.ids.tobytes())

    def _check(self, lengths: npt.NDArray[np.int64]) -> None:
        longest = int(lengths.max())
        if longest > LONGEST:
            raise UserError(
                f"a document has {longest:,} tokens or more, and the index of the format megatron "
                f"counts to {LONGEST:,}",
                where=str(self._prefix),
                remedy="say which id ends a document (--end-of-text), or choose another format",
                exit=Exit.DATA,
            )

    def close(self) -> Written:
        self._lengths.write(np.array([self._current]))
        self._documents.write(np.array([self._begins.count]))
        code = next(code for code, name in CODES.items() if name == self._dtype)
        self._idx.write(
            HEADER.pack(MAGIC, VERSION, code, self._begins.count, self._documents.count)
        )
        for spool in (self._lengths, self._begins, self._documents):
            spool.move_to(self._idx)
        files = {".bin": self._bin.close(), ".idx": self._idx.close()}
        return Written(files, content=files[".bin"].sha256)

    def publish(self) -> None:
        # Without a manifest the pair is believed if the index is there; so it comes last.
        self._bin.publish()
        self._idx.publish()

    def discard(self) -> None:
        for file in (self._bin, self._idx, self._lengths, self._begins, self._documents):
            file.discard()


class _Spool:
    """An array that grows in a hidden file."""

    def __init__(self, path: Path, *, dtype: str) -> None:
        self.count = 0
        self._path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._dtype = dtype
        self._file = io.BufferedRandom(io.FileIO(self._path, "w+b"), _BUFFER)

    def write(self, values: npt.NDArray[np.int64]) -> None:
        self._file.write(values.astype(self._dtype).tobytes())
        self.count += len(values)

    def move_to(self, target: HashedFile) -> None:
        self._file.seek(0)
        shutil.copyfileobj(self._file, target, _BUFFER)
        self.discard()

    def discard(self) -> None:
        self._file.raw.close()
        self._path.unlink(missing_ok=True)
