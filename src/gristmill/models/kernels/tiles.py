"""Tiles of matrix products in persistent kernels.

One or two programs per SM compute one tile of the output after another, along the rows, so that
programs side by side share what they load.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tiles(NamedTuple):
    """Rows, columns and depth of a tile, and how it is launched."""

    M: int
    N: int
    K: int
    warps: int
    programs: int
    """Per SM."""
    stages: int
    """Of the pipeline of loads."""

    def launch(self, out_MN: torch.Tensor, depth: int) -> dict[str, int]:
        """The sizes that a kernel which computes this output is compiled for, and its options; the
        grid is `PROGRAMS`."""
        rows, columns = out_MN.shape
        assert rows % self.M == columns % self.N == depth % self.K == 0, "whole tiles"
        tiles = (rows // self.M) * (columns // self.N)
        sizes = {"M": rows, "N": columns, "K": depth}
        return {
            **sizes,
            **{f"TILE_{name}": getattr(self, name) for name in sizes},
            "PROGRAMS": min(tiles, self.programs * _sm_count(out_MN.device)),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # for the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def corner(
    turn,
    M: tl.constexpr,
    N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """First row and column of this program's tile in a round. In the last round, programs without
    a tile repeat the last one."""
    across: tl.constexpr = N // TILE_N
    last: tl.constexpr = (M // TILE_M) * across - 1
    tile = tl.minimum(tl.program_id(0) + turn * PROGRAMS, last)
    return tile // across * TILE_M, tile % across * TILE_N


@triton.jit
def halves(sums, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The left and the right half of a tile, which need less shared memory on their way out."""
    half: tl.constexpr = TILE_N // 2
    return tl.split(tl.permute(tl.reshape(sums, (TILE_M, 2, half)), (0, 2, 1)))
