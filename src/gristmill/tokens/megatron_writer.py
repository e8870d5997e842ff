"""Writing Megatron's format; see `gristmill.tokens.megatron` for the bytes.

The three arrays of the index grow side by side while their places in the file depend on each
other's final lengths. They are kept in hidden files until the end, so that memory does not grow
with the number of documents, and are then copied behind one another.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from gristmill.tokens.writer import HashedFile, HiddenFile, SetWriter, Stretch, Written

_BUFFER = 1 << 20


def create_set(new: NewSet) -> SetWriter:
    """Begin a set of Megatron's format."""
    dtype = dtype_by_vocabulary(new)
    return SetWriter(new, format=FORMAT, dtype=dtype, open_body=lambda: _MegatronBody(new, dtype))


class _MegatronBody:
    def __init__(self, new: NewSet, dtype: str) -> None:
        prefix, lasting = new.prefix, new.state is not None
        saved = new.state["body"] if new.state else {}
        self._prefix = prefix
        self._dtype = dtype
        self._bin = HashedFile(file_of(prefix, ".bin"), lasting=lasting, saved=saved.get(".bin"))
        self._spools = {
            name: _Spool(file_of(prefix, ending), kind, lasting=lasting, saved=saved.get(name))
            for name, ending, kind in _SPOOLS
        }
        # Written at the end, from the spools; one that a process left in its final place is stale.
        self._idx = HashedFile(file_of(prefix, ".idx"), lasting=lasting)
        self._current = int(saved.get("current", 0))
        """Tokens so far of the sequence begun last."""

    def write(self, stretch: Stretch) -> None:
        begins, end = stretch.sequences, len(stretch.ids)
        before = self._spools["begins"].count
        self._spools["documents"].write_values(before + np.searchsorted(begins, stretch.starts))
        self._spools["begins"].write_values(
            (stretch.position + begins) * stored(self._dtype).itemsize
        )
        bounds = np.empty(len(begins) + 2, dtype=np.int64)
        bounds[0], bounds[1:-1], bounds[-1] = -self._current, begins, end
        # The first length ends the sequence begun before; at the very beginning there is none.
        lengths = (bounds[1:] - bounds[:-1])[0 if before else 1 :]
        self._check(lengths)
        self._spools["lengths"].write_values(lengths[:-1])
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

    def save(self) -> dict[str, Any]:
        spools = {name: spool.save() for name, spool in self._spools.items()}
        return {".bin": self._bin.save(), **spools, "current": self._current}

    def release(self) -> None:
        for file in (self._bin, self._idx, *self._spools.values()):
            file.release()

    def close(self) -> Written:
        lengths, begins, documents = self._spools.values()
        lengths.write_values(np.array([self._current]))
        documents.write_values(np.array([begins.count]))
        code = next(code for code, name in CODES.items() if name == self._dtype)
        self._idx.write(HEADER.pack(MAGIC, VERSION, code, begins.count, documents.count))
        for spool in self._spools.values():
            spool.copy_to(self._idx)
        files = {".bin": self._bin.close(), ".idx": self._idx.close()}
        return Written(files, content=files[".bin"].sha256)

    def publish(self) -> None:
        # Without a manifest the pair is believed if the index is there; so it comes last.
        self._bin.publish()
        self._idx.publish()

    def discard(self) -> None:
        for file in (self._bin, self._idx, *self._spools.values()):
            file.discard()


class _Spool(HiddenFile):
    """An array that grows in a hidden file."""

    def __init__(
        self, path: Path, dtype: str, *, lasting: bool, saved: Mapping[str, Any] | None
    ) -> None:
        super().__init__(path, lasting=lasting, saved=saved)
        self._dtype = np.dtype(dtype)

    @property
    def count(self) -> int:
        return self._bytes // self._dtype.itemsize

    def write_values(self, values: npt.NDArray[np.int64]) -> None:
        self.write(values.astype(self._dtype).tobytes())

    def copy_to(self, target: HashedFile) -> None:
        self._file.seek(0)
        shutil.copyfileobj(self._file, target, _BUFFER)


# In the order in which the index holds them.
_SPOOLS = (
    ("lengths", ".idx.lengths", "<i4"),
    ("begins", ".idx.begins", "<i8"),
    ("documents", ".idx.documents", "<i8"),
)
