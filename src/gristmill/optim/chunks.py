"""How many matrices are updated at once.

An update needs several times their memory, so a group of equal matrices is divided into chunks of
limited size; small chunks of several groups go together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gristmill.optim.orthogonal import MatrixRule, StepScalars

PIECE = 2**27
"""Elements that are computed with at once, unless a single matrix has more."""


class Chunk(NamedTuple):
    """Equal matrices of a group that are updated at once."""

    group: dict[str, Any]
    scalars: StepScalars
    parameters: Sequence[nn.Parameter]

    @property
    def rule(self) -> MatrixRule:
        """That of the group."""
        rule: MatrixRule = self.group["rule"]
        return rule

    def weights(self) -> list[torch.Tensor]:
        """The matrices, without a gradient."""
        return [parameter.detach() for parameter in self.parameters]

    def gradients(self) -> list[torch.Tensor]:
        """Those of the matrices."""
        return [p.grad for p in self.parameters if p.grad is not None]


def packed(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Chunks in their order, as many together as PIECE allows."""
    together: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        size = sum(parameter.numel() for parameter in chunk.parameters)
        if size > room or not together:
            together.append([])
            room = PIECE
        together[-1].append(chunk)
        room -= size
    return together


def pieces(matrices: Sequence[Any], *, size: int) -> Iterable[Sequence[Any]]:
    """Equal matrices of a size, in as few even chunks as PIECE allows."""
    at_once = max(1, PIECE // size)
    length = math.ceil(len(matrices) / math.ceil(len(matrices) / at_once))
    return (matrices[begin : begin + length] for begin in range(0, len(matrices), length))
