"""From settings to an optimizer over a model's parameters: one constructor for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from gristmill.config.optim import AdamWConfig, MuonConfig, OptimizerConfig
from gristmill.config.roles import Role
from gristmill.optim.adamw import AdamW
from gristmill.optim.muon import Muon, MuonExchange
from gristmill.optim.spec import Optimizer


class DescribedModel(Protocol):
    """What an optimizer may ask a model about its parameters, by name."""

    def roles(self) -> dict[str, Role]:
        """What each parameter is for."""

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows of each matrix in parameters that are several matrices stacked on top of one
        another."""


@dataclass(frozen=True)
class OptimizerInputs:
    """Everything that an optimizer can be built from."""

    config: Any
    parameters: Mapping[str, nn.Parameter]
    """What is moved, by name: of sharded parameters, the shards that this process keeps."""
    model: DescribedModel
    compiled: bool | None
    """Whether a step of its own is compiled; on CUDA only if None."""
    exchange: MuonExchange | None
    """The way to the processes that hold other parts of the same matrices."""


OPTIMIZERS: dict[type[OptimizerConfig], Callable[[OptimizerInputs], Optimizer]] = {
    AdamWConfig: lambda given: AdamW(given.config, given.parameters, roles=given.model.roles()),
    MuonConfig: lambda given: Muon(
        given.config,
        given.parameters,
        roles=given.model.roles(),
        stacked_rows=given.model.stacked_rows(),
        compiled=given.compiled,
        exchange=given.exchange,
    ),
}


def build_optimizer(
    config: OptimizerConfig,
    model: DescribedModel,
    *,
    parameters: Mapping[str, nn.Parameter],
    compiled: bool | None = None,
    exchange: MuonExchange | None = None,
) -> Optimizer:
    """The optimizer that a run asks for, over those parameters that are trained."""
    moving = {name: one for name, one in parameters.items() if one.requires_grad}
    given = OptimizerInputs(config, moving, model, compiled, exchange)
    return OPTIMIZERS[type(config)](given)
