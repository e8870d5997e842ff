"""An optimizer with the state of the preconditioner before it, saved and restored as one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from gristmill.optim.spec import CheckpointState, Optimizer, Placement, StateEntry


class PreconditionedOptimizer:
    """Steps as the optimizer does. Kinds of state have different names in both."""

    def __init__(self, optimizer: Optimizer, preconditioner: CheckpointState) -> None:
        self.optimizer, self.preconditioner = optimizer, preconditioner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        self.optimizer.step(divisor=divisor, skip=skip)

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        return self.optimizer.stepped_kinds()

    @property
    def placements(self) -> Mapping[str, Placement]:
        return {**self.optimizer.placements, **self.preconditioner.placements}

    def entries(self) -> Iterator[StateEntry]:
        yield from self.optimizer.entries()
        yield from self.preconditioner.entries()

    def expects(self, kind: str, key: str) -> bool:
        return self.optimizer.expects(kind, key) or self.preconditioner.expects(kind, key)

    def load_entry(self, entry: StateEntry) -> None:
        ours = self.optimizer.expects(entry.kind, entry.key)
        (self.optimizer if ours else self.preconditioner).load_entry(entry)
