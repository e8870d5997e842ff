"""AdamW, and Adam with L2: one fused kernel per parameter group. AdamW's is our own on a GPU, all
others are torch's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from gristmill.config.model import Role
from gristmill.config.optim import (
    AccumAdamConfig,
    AccumAdamWConfig,
    AdamConfig,
    AdamWConfig,
    SGDConfig,
)
from gristmill.optim.spec import ParameterOptimizer, Placement

ADAM_PLACEMENTS = {
    "step": Placement.SCALAR,
    "exp_avg": Placement.SHARDED,
    "exp_avg_sq": Placement.SHARDED,
}


class AdamW(ParameterOptimizer):
    """Adam with decoupled weight decay, or with L2; vectors are not decayed."""

    placements: ClassVar[Mapping[str, Placement]] = ADAM_PLACEMENTS

    def __init__(
        self,
        config: AdamWConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, Role],
        kernel: bool = False,
    ) -> None:
        super().__init__(parameters, adam_groups(config, parameters, roles=roles))
        self.decoupled = not isinstance(config, AdamConfig)
        self.kernel = kernel and self.decoupled

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        return dict.fromkeys(self.parameters, ADAM_PLACEMENTS)

    @torch.no_grad()
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        for group in self.param_groups:
            adam_step(
                self.state,
                group,
                divisor=divisor,
                skip=skip,
                kernel=self.kernel,
                decoupled=self.decoupled,
            )


def adam_groups(
    config: AdamWConfig | AccumAdamWConfig | AccumAdamConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    roles: Mapping[str, Role],
) -> list[dict[str, Any]]:
    """The groups of `decay_groups`, with what Adam needs to know."""
    own = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return [{**group, **own} for group in decay_groups(config, parameters, roles=roles)]


def decay_groups(
    config: AdamWConfig | AccumAdamWConfig | AccumAdamConfig | SGDConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    roles: Mapping[str, Role],
) -> list[dict[str, Any]]:
    """Parameters that decay, and vectors, which do not; of each those with the same rate."""
    groups = []
    for decay, decays in ((config.weight_decay, True), (0.0, False)):
        members = {n: p for n, p in parameters.items() if (roles[n] is not Role.VECTOR) is decays}
        rates = {
            name: (
                getattr(config, f"{roles[name]}_lr", None) or config.lr,
                getattr(config, f"{roles[name]}_min_lr", None),
            )
            for name in members
        }
        for rate, floor in dict.fromkeys([(config.lr, None), *rates.values()]):
            group = {
                "params": [
                    member for name, member in members.items() if rates[name] == (rate, floor)
                ],
                "lr": rate,
                "lr_factor": rate / config.lr,
                "min_lr": floor,
                "weight_decay": decay,
            }
            groups.append(group)
    return groups


def adam_step(
    state: Mapping[nn.Parameter, dict[str, torch.Tensor]],
    group: Mapping[str, Any],
    *,
    divisor: torch.Tensor,
    skip: torch.Tensor,
    kernel: bool = False,
    decoupled: bool = True,
) -> None:
    """Update those parameters of a group that have a gradient. `kernel`: ours, where it can.
    `decoupled`: whether weights decay by themselves, or through their gradients (L2)."""
    updated = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not updated:
        return
    for parameter in updated:
        if not state[parameter]:
            state[parameter]["step"] = torch.zeros((), device=parameter.device)
            state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in updated if parameter.grad is not None]
    averages, squares, steps = (
        [state[parameter][kind] for parameter in updated]
        for kind in ("exp_avg", "exp_avg_sq", "step")
    )
    if kernel:
        from gristmill.optim.adamw_kernel import adamw_, can_update

        if can_update((*updated, *gradients, *averages, *squares)):
            adamw_(
                *(updated, gradients, averages, squares, steps),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                divisor=divisor,
                skip=skip,
            )
            return
    beta1, beta2 = group["betas"]
    (adamw if decoupled else adam)(
        list(updated),
        gradients,
        averages,
        squares,
        [],
        steps,
        fused=True,
        grad_scale=divisor,
        found_inf=skip,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )
