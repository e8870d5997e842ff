"""From settings and processes to the strategy that runs a step."""

from __future__ import annotations

import torch

from gristmill.base.errors import UserError
from gristmill.base.process import Place
from gristmill.config.schema import RunConfig
from gristmill.models.gpt import GPT
from gristmill.parallel.spmd import SingleDevice
from gristmill.parallel.strategy import Strategy
from gristmill.parallel.world import World


def build_strategy(
    config: RunConfig,
    *,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    world: World,
    place: Place,
) -> Strategy:
    """The strategy for this many processes."""
    if place.world > 1:
        raise UserError(
            f"started as one of {place.world} processes, but a run uses one",
            where="environment WORLD_SIZE",
            remedy="start `gristmill train` without torchrun",
        )
    return SingleDevice(config, model=model, optimizer=optimizer, world=world)
