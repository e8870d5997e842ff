"""Writing Megatron's format; see `gristmill.tokens.megatron` for the bytes.

The three arrays of the index grow together, and the place of each in the file depends on the final
lengths of the others. They are written to hidden files first, so that memory does not grow with the
number of documents, and copied one after the other at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, UserError
from gristmill.tokens.format import FileFacts, NewSet
from gristmill.tokens.megatron import CODES, HEADER, LONGEST, MAGIC, VERSION
from gristmill.tokens.writer import TokenChunk, TokenWriter

# In the order in which the index holds them.
_ARRAYS: Mapping[str, np.dtype[Any]] = {
    "lengths": np.dtype("<i4"),
    "begins": np.dtype("<i8"),
    "documents": np.dtype("<i8"),
}


class MegatronWriter(TokenWriter):
    """Writes a set in Megatron's format."""

    def __init__(self, new: NewSet) -> None:
        if new.vocab_size > 2**31:
            raise UserError(
                f"the format megatron holds ids below 2,147,483,648, and the vocabulary has "
                f"{new.vocab_size:,}",
                where=str(new.prefix),
                remedy="choose the format flat",
            )
        # As Megatron's preprocessing chooses.
        dtype = "uint16" if new.vocab_size < 65500 else "int32"
        super().__init__(new, dtype=dtype)

    def _open_files(self) -> None:
        saved = self._saved
        self._bin = self._hidden(".bin", saved=saved.get(".bin"))
        self._arrays = {
            name: self._hidden(f".idx.{name}", saved=saved.get(name)) for name in _ARRAYS
        }
        # Written at the end, from the arrays; one that a process left in its final place is stale.
        self._idx = self._hidden(".idx")
        # Without a manifest the set is read if the index is there, so the index comes last.
        self._files = [self._bin, self._idx]
        self._scratch = list(self._arrays.values())
        self._content = self._bin.hash
        self._current = int(saved.get("current", 0))
        """Tokens so far in the last sequence."""

    def _write(self, chunk: TokenChunk) -> None:
        begins, before = chunk.sequences, self._count("begins")
        self._extend("documents", before + np.searchsorted(begins, chunk.starts))
        self._extend("begins", (chunk.position + begins) * self._stored.itemsize)
        # The first length completes the last sequence; at the very beginning there is none.
        bounds = np.concatenate([[-self._current], begins, [len(chunk.ids)]])
        lengths = np.diff(bounds)[0 if before else 1 :]
        if (longest := int(lengths.max())) > LONGEST:
            raise DataError(
                f"a document has {longest:,} tokens or more, and the index of the format megatron "
                f"counts to {LONGEST:,}",
                where=self._new.prefix,
                remedy="give the id that ends a document (--end-of-text), or choose another format",
            )
        self._extend("lengths", lengths[:-1])
        self._current = int(lengths[-1])
        self._bin.write(chunk.ids.tobytes())

    def _count(self, name: str) -> int:
        return self._arrays[name].bytes // _ARRAYS[name].itemsize

    def _extend(self, name: str, values: npt.NDArray[np.int64]) -> None:
        self._arrays[name].write(values.astype(_ARRAYS[name]).tobytes())

    def _save(self) -> dict[str, Any]:
        arrays = {name: file.save() for name, file in self._arrays.items()}
        return {".bin": self._bin.save(), **arrays, "current": self._current}

    def _close(self) -> dict[str, FileFacts]:
        sequences = self._count("begins")
        self._extend("lengths", np.array([self._current]))
        self._extend("documents", np.array([sequences]))
        code = next(code for code, name in CODES.items() if name == self._dtype)
        header = HEADER.pack(MAGIC, VERSION, code, sequences, self._count("documents"))
        self._idx.write(header)
        for file in self._arrays.values():
            for piece in file.content():
                self._idx.write(piece)
        return {".bin": self._bin.close(), ".idx": self._idx.close()}
