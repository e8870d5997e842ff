"""Which pieces of a model's parameters every process of a mesh holds: arithmetic, no tensors.

A parameter is divided at most twice: by the model itself over tp, along the dimension and in the
parts that it states, and what results by rows over dp_shard and cp together, if weights are
divided among data-parallel processes at all. On all other axes processes hold copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from gristmill.base.boxes import Piece, row_pieces, split_pieces, whole_piece
from gristmill.config.parallel import Mesh
from gristmill.models.spec import Split

SHARED = ("dp_shard", "cp")
"""Axes over which rows are divided. Parts of a sequence are parts of a batch to the weights."""


@dataclass(frozen=True)
class Layout:
    """How the parameters of one stage lie on its processes."""

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters."""
    splits: Mapping[str, Split]

    def pieces(self, name: str, rank: int) -> tuple[Piece, ...]:
        """What of a parameter a process holds, and where in its own tensor."""
        shape, place = self.shapes[name], self.mesh.place(rank)
        pieces, local = whole_piece(shape), list(shape)
        if name in self.splits:
            dim, parts = self.splits[name]
            tensor = {"rank": place["tp"], "ranks": self.mesh.tp}
            pieces = split_pieces(shape, dim=dim, parts=parts, **tensor)
            local[dim] //= self.mesh.tp
        if self.mesh.divides_rows:
            among = self.mesh.group(rank, *SHARED)
            pieces = row_pieces(pieces, local, rank=among.index(rank), ranks=len(among))
        return pieces

    def holders(self, name: str, rank: int) -> list[int]:
        """All processes of the stage that hold the same pieces."""
        axes = ["dp_replicate"]
        if not self.mesh.divides_rows:
            axes += SHARED
        if name not in self.splits:
            axes.append("tp")
        return self.mesh.group(rank, *axes)

    def owned(self, name: str, rank: int) -> bool:
        """Whether a process is the one, of all that hold the same pieces, that answers for them;
        processes take turns from name to name."""
        holders = self.holders(name, rank)
        return holders[crc32(name.encode()) % len(holders)] == rank
