"""AccumAdamW: Adam whose moments advance once in k steps, by the mean gradient of these steps.

Workers that exchange weights instead of gradients have small batches and noisy gradients of their
own. Their moments see a gradient of k batches here, while weights still move at every step. With
weights x, gradient g, accumulator a, moments m and v, and step t, counted from 1:

    x <- x (1 - lr weight_decay)            accum-adam instead: g <- g + weight_decay x
    a <- a + g / k
    x <- x - lr / (1 - b1^j) m' / (sqrt(v') / sqrt(1 - b2^j) + eps)
         with m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2,  j = ceil(t / k)
    if k divides t:  m <- b1 m + (1 - b1) a,  v <- b2 v + (1 - b2) a^2,  a <- 0

k = 1 is AdamW. The line in the middle is a step of AdamW that forgets its moments again, so its
fused kernel does it on copies of them; and whether a window of k steps is full reaches the kernels
as a skip flag. So nothing waits for the device.

The parameters of a group count their steps together. One without a gradient does not move then, but
its window ends with the others'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from gristmill.config.model import Role
from gristmill.config.optim import AccumAdamConfig, AccumAdamWConfig
from gristmill.optim.adamw import ADAM_PLACEMENTS, adam_groups
from gristmill.optim.spec import ParameterOptimizer, Placement

PIECE = 2**24
"""Elements that are updated at once, unless a single parameter has more: copies of their moments
take 8 bytes each."""

PLACEMENTS = {**ADAM_PLACEMENTS, "grad_accum": Placement.SHARDED}

Tensors = Sequence[torch.Tensor]


class _Window(NamedTuple):
    """Where a step lies among the k steps of its window, as tensors on the device."""

    number: torch.Tensor
    """j: of this window, from 1."""
    skip: torch.Tensor
    open: torch.Tensor
    """1 unless this step fills the window."""


class AccumAdam(ParameterOptimizer):
    """Adam on accumulated gradients; vectors are not decayed."""

    placements: ClassVar[Mapping[str, Placement]] = PLACEMENTS

    def __init__(
        self,
        config: AccumAdamWConfig | AccumAdamConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, Role],
    ) -> None:
        super().__init__(parameters, adam_groups(config, parameters, roles=roles))
        self.accum, self.decoupled = config.accum, isinstance(config, AccumAdamWConfig)

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        return dict.fromkeys(self.parameters, PLACEMENTS)

    @torch.no_grad()
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        skip = skip.reshape(())
        for group in self.param_groups:
            members = self._members(group["params"])
            if not members:
                continue
            steps = [self.state[parameter]["step"] for parameter in members]
            window = self._window(steps[0], skip)
            for piece in _pieces(members):
                self._move(group, piece, divisor, window)
                self._advance(group, piece, window)
            # As a list: a single tensor would be read by the host.
            torch._foreach_add_(steps, [1 - skip] * len(steps))

    def _members(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters of a group that have a gradient or had one before."""
        known = [parameter for parameter in parameters if self.state[parameter]]
        for parameter in parameters:
            if parameter.grad is not None and not self.state[parameter]:
                start = torch.zeros((), device=parameter.device)
                self.state[parameter] = {
                    "step": self.state[known[0]]["step"].clone() if known else start,
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                    "grad_accum": torch.zeros_like(parameter),
                }
        return [parameter for parameter in parameters if self.state[parameter]]

    def _window(self, step: torch.Tensor, skip: torch.Tensor) -> _Window:
        """The window of the step that comes after `step` others."""
        number = torch.div(step, self.accum, rounding_mode="floor") + 1
        full = ((step + 1) % self.accum == 0) & (skip == 0)
        return _Window(number, skip, 1 - full.to(torch.float32))

    def _move(
        self,
        group: Mapping[str, Any],
        piece: Sequence[nn.Parameter],
        divisor: torch.Tensor,
        window: _Window,
    ) -> None:
        """Move the weights that have a gradient, and add it to its accumulator."""
        moving = [parameter for parameter in piece if parameter.grad is not None]
        if not moving:
            return
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        torch._foreach_div_(gradients, divisor.reshape(()))
        if not self.decoupled and group["weight_decay"]:
            torch._foreach_add_(gradients, [*moving], alpha=group["weight_decay"])
        _adam(
            group,
            moving,
            gradients,
            # Multiplying makes all copies in one kernel.
            torch._foreach_mul(self._kind("exp_avg", moving), 1.0),
            torch._foreach_mul(self._kind("exp_avg_sq", moving), 1.0),
            number=window.number,
            lr=group["lr"],
            weight_decay=group["weight_decay"] if self.decoupled else 0.0,
            skip=window.skip,
        )
        _add(self._kind("grad_accum", moving), gradients, alpha=1 / self.accum, skip=window.skip)

    def _advance(
        self, group: Mapping[str, Any], piece: Sequence[nn.Parameter], window: _Window
    ) -> None:
        """Advance the moments by the accumulators and empty these, if the window is full."""
        accumulated, averages = self._kind("grad_accum", piece), self._kind("exp_avg", piece)
        _adam(
            group,
            # The kernel wants weights too: any memory will do.
            [torch.empty_like(average) for average in averages],
            accumulated,
            averages,
            self._kind("exp_avg_sq", piece),
            number=window.number,
            lr=0.0,
            weight_decay=0.0,
            skip=window.open,
        )
        _add(accumulated, accumulated, alpha=-1.0, skip=window.open)

    def _kind(self, kind: str, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        return [self.state[parameter][kind] for parameter in parameters]


def _pieces(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    piece: list[nn.Parameter] = []
    for parameter in parameters:
        if piece and sum(one.numel() for one in piece) + parameter.numel() > PIECE:
            yield piece
            piece = []
        piece.append(parameter)
    yield piece


def _adam(
    group: Mapping[str, Any],
    weights: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    *,
    number: torch.Tensor,
    lr: float,
    weight_decay: float,
    skip: torch.Tensor,
) -> None:
    """The fused kernel of AdamW; a step with this number, for all tensors."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(averages),
        list(squares),
        [],
        [number] * len(weights),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def _add(tensors: Tensors, others: Tensors, *, alpha: float, skip: torch.Tensor) -> None:
    """tensors += alpha others unless `skip` is 1: the fused kernel of plain SGD."""
    torch._fused_sgd_(
        list(tensors),
        list(others),
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=-alpha,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=skip,
    )
