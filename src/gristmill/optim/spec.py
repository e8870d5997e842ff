"""What the rest of the program may ask of an optimizer, and of anything else whose state belongs in
a checkpoint.

A step is decided on the device: the strategy passes the number that gradients are divided by and
whether to skip, both as tensors, and an optimizer that does not take them cannot be called. State
is named by its kind (`exp_avg`) and by what it belongs to: a parameter, a module, anything with a
name. For every kind the optimizer says how it lies on the processes of a run; shapes say nothing
about that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn


class Placement(Enum):
    """How a kind of state lies on the processes of a run."""

    SHARDED = "sharded"
    """Of the parameter's shape, and divided as the parameter is."""
    REPLICATED = "replicated"
    """Of any shape, and the same on every process that holds a part of what it belongs to."""
    PER_WORKER = "per worker"
    """Of any shape, and different on every process."""


class StateEntry(NamedTuple):
    """One tensor of state."""

    kind: str
    key: str
    """What it belongs to: a parameter's name in the whole model, or any other name."""
    value: torch.Tensor


class CheckpointState(Protocol):
    """State that is saved with a checkpoint and restored from it."""

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How each kind of state lies on the processes."""
        ...

    def entries(self) -> Iterator[StateEntry]:
        """All that has to be saved."""
        ...

    def expects(self, kind: str, key: str) -> bool:
        """Whether this process has a place for an entry."""
        ...

    def load_entry(self, entry: StateEntry) -> None: ...


class Optimizer(CheckpointState, Protocol):
    """Moves parameters along their gradients."""

    param_groups: list[dict[str, Any]]
    """Parameters with settings in common. The schedule sets `lr` in each, multiplied by its
    `lr_factor` where it has one, and `momentum` in those that have one."""

    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Divide gradients by `divisor` and move every parameter that has one; if `skip` is 1,
        leave parameters and state as they are."""
        ...


class ParameterOptimizer:
    """An optimizer that keeps state for each parameter."""

    placements: ClassVar[Mapping[str, Placement]]

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]
    ) -> None:
        self.parameters, self.param_groups = parameters, groups
        self.state: dict[nn.Parameter, dict[str, torch.Tensor]] = {
            parameter: {} for parameter in parameters.values()
        }

    def entries(self) -> Iterator[StateEntry]:
        for name, parameter in self.parameters.items():
            for kind, value in self.state[parameter].items():
                yield StateEntry(kind, name, value)

    def expects(self, kind: str, key: str) -> bool:
        return kind in self.placements and key in self.parameters

    def load_entry(self, entry: StateEntry) -> None:
        self.state[self.parameters[entry.key]][entry.kind] = entry.value
