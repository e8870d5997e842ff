"""This process's shards of all parameters as a few long tensors, for communication.

Parameters that are not sharded inside a worker come first, in buckets of their own: all processes
of a worker hold them at the same places, so that a sum over workers rounds alike on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from gristmill.strategies.sharding import ShardedParameter, ShardedParameters

BUCKET = 2**24
"""Elements per bucket, above which no further parameter is added."""

Buckets = list[torch.Tensor]
"""One long tensor for each bucket."""


class FlatLayout:
    """Where each parameter lies in the buckets."""

    def __init__(self, parameters: ShardedParameters, *, bucket: int = BUCKET) -> None:
        self.parameters = parameters
        ordered = sorted(parameters.values(), key=_is_sharded)
        self.buckets: list[list[ShardedParameter]] = []
        for _, same in groupby(ordered, key=_is_sharded):
            self.buckets.append([])
            for one in same:
                if sum(other.local.numel() for other in self.buckets[-1]) >= bucket:
                    self.buckets.append([])
                self.buckets[-1].append(one)

    @torch.no_grad()
    def read(self) -> Buckets:
        """A copy of the weights."""
        return [
            torch.cat([one.local.detach().reshape(-1) for one in bucket]) for bucket in self.buckets
        ]

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Replace the weights."""
        for name, view in self.views(values).items():
            self.parameters[name].local.copy_(view)

    @torch.no_grad()
    def add(self, values: Sequence[torch.Tensor]) -> None:
        """Add to the weights."""
        for name, view in self.views(values).items():
            self.parameters[name].local.add_(view)

    def zeros(self) -> Buckets:
        return [torch.zeros_like(one) for one in self.read()]

    def views(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter's part of the buckets, in its shape, by name."""
        found = {}
        for bucket, flat in zip(self.buckets, values, strict=True):
            parts = flat.split([one.local.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                found[one.name] = part.view(one.local.shape)
        return found

    def owned_squares(self, values: Sequence[torch.Tensor]) -> float:
        """The sum of squares over the elements that this process owns."""
        views = self.views(values)
        owned = [views[one.name] for one in self.parameters.values() if one.owned]
        if not owned:
            return 0.0
        return float(sum(one.double().square().sum() for one in owned))


def _is_sharded(parameter: ShardedParameter) -> bool:
    return tuple(parameter.local.shape) != parameter.shape
