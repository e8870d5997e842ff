"""The interface of optimizers, and of anything else with state in a checkpoint.

Clipping and skipping are decided on the device: the strategy passes the divisor of the gradients
and a skip flag, both as tensors, and every optimizer must accept them. State is named by its kind
(`exp_avg`) and its key: a parameter, a module, anything with a name. For every kind the optimizer
declares how it is placed on the processes; nothing is guessed from shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn


class Placement(Enum):
    """How a kind of state is placed on the processes of a run."""

    SHARDED = "sharded"
    """Same shape and sharding as the parameter."""
    SCALAR = "scalar"
    """One number; equal on every process that holds a shard of its key."""
    REPLICATED = "replicated"
    """Any shape; equal on every process that holds a shard of its key."""
    PER_RANK = "per rank"
    """Any shape; different on every process."""
    ASSIGNED = "assigned"
    """Any shape; held by the processes that it is assigned to. One of them has it among its
    entries, all of them expect it."""


class StateEntry(NamedTuple):
    """One tensor of state."""

    kind: str
    key: str
    """A parameter's name in the whole model, or any other name."""
    value: torch.Tensor


class CheckpointState(Protocol):
    """State that is saved with a checkpoint and restored from it."""

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How each kind of state is placed."""
        ...

    def entries(self) -> Iterator[StateEntry]:
        """Everything to save."""
        ...

    def expects(self, kind: str, key: str) -> bool:
        """Whether this process loads an entry."""
        ...

    def load_entry(self, entry: StateEntry) -> None: ...


class Optimizer(CheckpointState, Protocol):
    """Updates parameters from their gradients."""

    param_groups: list[dict[str, Any]]
    """Parameters with common settings. The schedule sets `lr` in each group, times its `lr_factor`
    if it has one, down to its own `min_lr` if it has one, `momentum` in those that have it, and
    `factor_decay` and `refresh` in those of SOAP."""

    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Divide gradients by `divisor` and update every parameter that has one; if `skip` is 1,
        leave parameters and state unchanged."""
        ...

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        """The kinds of state that every parameter here has once it was updated, by its name."""
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

    @abstractmethod
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None: ...

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        return {}

    def expects(self, kind: str, key: str) -> bool:
        return kind in self.placements and key in self.parameters

    def load_entry(self, entry: StateEntry) -> None:
        self.state[self.parameters[entry.key]][entry.kind] = entry.value
