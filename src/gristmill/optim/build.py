"""Builds an optimizer from its settings: one constructor for each settings class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from gristmill.config.model import Role
from gristmill.config.optim import (
    AccumAdamConfig,
    AccumAdamWConfig,
    AdamConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    SoapConfig,
)
from gristmill.optim.accum import AccumAdam
from gristmill.optim.adamw import AdamW
from gristmill.optim.matrix import MatrixExchange, MatrixOptimizer
from gristmill.optim.sgd import SGD
from gristmill.optim.spec import Optimizer


class DescribedModel(Protocol):
    """What an optimizer needs to know about a model's parameters, by name."""

    def roles(self) -> dict[str, Role]:
        """The role of each parameter."""

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Parameters that stack several matrices, with the rows of each."""


@dataclass(frozen=True)
class OptimizerInputs:
    """Everything an optimizer can be built from."""

    config: Any
    parameters: Mapping[str, nn.Parameter]
    """What it updates, by name; of sharded parameters, this process's shards."""
    model: DescribedModel
    compiled: bool | None
    """Whether to compile its step; None compiles on CUDA only."""
    exchange: MatrixExchange | None
    """Communication with the processes that hold other shards of the same matrices."""
    kernel: bool
    """Whether AdamW may use a kernel of our own."""


def _build_adamw(given: OptimizerInputs) -> Optimizer:
    if isinstance(given.config.preconditioner, SoapConfig):
        return _build_matrix_optimizer(given)
    roles = given.model.roles()
    return AdamW(given.config, given.parameters, roles=roles, kernel=given.kernel)


def _build_matrix_optimizer(given: OptimizerInputs) -> Optimizer:
    return MatrixOptimizer(
        given.config,
        given.parameters,
        roles=given.model.roles(),
        stacked_rows=given.model.stacked_rows(),
        compiled=given.compiled,
        exchange=given.exchange,
        kernel=given.kernel,
    )


def _build_accum(given: OptimizerInputs) -> Optimizer:
    return AccumAdam(given.config, given.parameters, roles=given.model.roles())


OPTIMIZERS: dict[type[OptimizerConfig], Callable[[OptimizerInputs], Optimizer]] = {
    AdamWConfig: _build_adamw,
    AdamConfig: _build_adamw,
    SGDConfig: lambda given: SGD(given.config, given.parameters, roles=given.model.roles()),
    MuonConfig: _build_matrix_optimizer,
    AccumAdamWConfig: _build_accum,
    AccumAdamConfig: _build_accum,
}


def build_optimizer(
    config: OptimizerConfig,
    model: DescribedModel,
    *,
    parameters: Mapping[str, nn.Parameter],
    compiled: bool | None = None,
    exchange: MatrixExchange | None = None,
    kernel: bool = False,
) -> Optimizer:
    """The optimizer of a run, over the parameters that require gradients."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    given = OptimizerInputs(config, trained, model, compiled, exchange, kernel)
    return OPTIMIZERS[type(config)](given)
