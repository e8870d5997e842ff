"""Muon: matrices move by orthogonal directions, everything else by Adam, in one optimizer.

    role                             rule                      state in fp32, per parameter
    matrix                           optim/orthogonal.py       momentum (R, C); second_moment (L)
    embedding, table, head, vector   fused AdamW               exp_avg, exp_avg_sq, step

A parameter group is what one call can do: all matrices of equal shape and parts, or all parameters
of one other role. Each role's rate is its own setting, held as a factor of the matrices' rate, so
that one schedule fits all.

With rate lr, whose peak is LR, a step takes off this much of a matrix:

    plain      lr weight_decay W
    cautious   lr (lr / LR) weight_decay W, where the direction has the sign of W

Directions need memory for the moment of a step, so a group is stepped in pieces of a limited size.

Where processes hold shards of matrices, a `MuonExchange` gathers each matrix on one of them, which
finds its direction, and scatters the result; all else is done on the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from gristmill.config.optim import MuonConfig
from gristmill.config.roles import Role
from gristmill.optim.adamw import ADAM_PLACEMENTS, adam_step
from gristmill.optim.orthogonal import (
    MuonRule,
    StepScalars,
    advance_momenta,
    build_iteration,
    find_directions,
    move_weights,
    shape_scale,
    update_matrices,
)
from gristmill.optim.spec import ParameterOptimizer, Placement

ADAM_LR = 4e-3
"""Peak rate of a role that was not given its own."""

PIECE = 2**27
"""Elements that are orthogonalised at once, unless one matrix has more."""

_NONE = torch.empty(0)

Group = dict[str, Any]


class MuonExchange(Protocol):
    """Communication between processes that hold shards of the same matrices."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole matrix."""

    def collect(
        self, names: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """From every process's parts of the named matrices, those whole ones that this process is
        to work on, by their place in the list."""

    def hand_out(
        self,
        names: Sequence[str],
        directions: Mapping[int, torch.Tensor],
        moments: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """This process's parts of the directions of all named matrices; moments, which are whole
        everywhere, become those of the process that worked on the matrix."""


class Muon(ParameterOptimizer):
    """Steps parameters by their role."""

    placements: ClassVar[Mapping[str, Placement]] = {
        **ADAM_PLACEMENTS,
        "momentum": Placement.SHARDED,
        "second_moment": Placement.REPLICATED,
    }

    def __init__(
        self,
        config: MuonConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, Role],
        stacked_rows: Mapping[str, tuple[int, ...]],
        compiled: bool | None = None,
        exchange: MuonExchange | None = None,
    ) -> None:
        """`compiled` is None for CUDA only; with an `exchange` the parameters are shards of
        matrices."""
        matrices = {name: p for name, p in parameters.items() if roles[name] is Role.MATRIX}
        shapes = {
            name: tuple(p.shape) if exchange is None else exchange.shape(name)
            for name, p in matrices.items()
        }
        stacked = stacked_rows if config.split else {}
        groups = [
            *_matrix_groups(config, matrices, shapes=shapes, parts=stacked),
            *_adam_groups(config, parameters, roles=roles),
        ]
        super().__init__(parameters, groups)
        self.compiled, self.exchange = compiled, exchange
        self._scalars: dict[int, StepScalars] = {}

    @torch.no_grad()
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Move every parameter that has a gradient."""
        for number, group in enumerate(self.param_groups):
            if group["role"] is not Role.MATRIX:
                adam_step(self.state, group["params"], group, divisor=divisor, skip=skip)
                continue
            scalars = self._step_scalars(number, group, divisor, skip)
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.exchange is not None:
                self._step_shards(group, scalars, self.exchange)
            elif moving:
                self._step_matrices(group, scalars, moving)

    def _step_scalars(
        self, number: int, group: Group, divisor: torch.Tensor, skip: torch.Tensor
    ) -> StepScalars:
        """A group's changing numbers on the device, put there without waiting for it."""
        if number not in self._scalars:
            lr, decay, momentum = torch.zeros(3, device=divisor.device).unbind()
            self._scalars[number] = StepScalars(lr, decay, momentum, divisor, skip)
        kept = self._scalars[number]
        follow = group["lr"] / group["peak_lr"] if group["rule"].cautious else 1.0
        kept.lr.fill_(group["lr"])
        kept.decay.fill_(group["lr"] * follow * group["weight_decay"])
        kept.momentum.fill_(group["momentum"])
        return kept._replace(divisor=divisor.reshape(()), skip=skip.reshape(()))

    def _step_shards(self, group: Group, scalars: StepScalars, exchange: MuonExchange) -> None:
        """The same where processes hold shards of the matrices. Every process takes part in every
        exchange, even with an empty shard or without any gradient."""
        rule, members = group["rule"], list(zip(group["names"], group["params"], strict=True))
        device = group["params"][0].device
        find = self._made(find_directions, rule, device)
        for piece in _pieces(members, size=sum(rule.parts) * group["columns"]):
            names, parameters = [name for name, _ in piece], [p for _, p in piece]
            states = [self._matrix_state(p, rule, group["columns"]) for p in parameters]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            momenta = [state["momentum"] for state in states]
            moments = [] if rule.beta2 is None else [state["second_moment"] for state in states]
            advanced = advance_momenta(gradients, momenta, scalars, rule)
            mine = exchange.collect(names, advanced)
            found: dict[int, torch.Tensor] = {}
            if mine:
                own = [moments[place] for place in mine] if moments else []
                whole = find(list(mine.values()), own, scalars, rule)
                found = dict(zip(mine, whole.unbind(), strict=True))
            directions = exchange.hand_out(names, found, moments)
            move_weights([p.detach() for p in parameters], directions, scalars, rule)

    def _made(
        self, function: Callable[..., Any], rule: MuonRule, device: torch.device
    ) -> Callable[..., Any]:
        """A function, compiled if that is wanted."""
        compiled = device.type == "cuda" if self.compiled is None else self.compiled
        return _compiled(function, rule) if compiled else function

    def _step_matrices(
        self, group: Group, scalars: StepScalars, moving: Sequence[nn.Parameter]
    ) -> None:
        rule, device = group["rule"], moving[0].device
        update = self._made(update_matrices, rule, device)
        for piece in _pieces(moving, size=moving[0].numel()):
            states = [self._matrix_state(p, rule, p.shape[1]) for p in piece]
            update(
                [parameter.detach() for parameter in piece],
                [parameter.grad for parameter in piece],
                [state["momentum"] for state in states],
                [] if rule.beta2 is None else [state["second_moment"] for state in states],
                scalars,
                rule,
            )

    def _matrix_state(
        self, parameter: nn.Parameter, rule: MuonRule, columns: int
    ) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        length = sum(rule.moments(columns))
        # Moments of another length come from a run that split its matrices in another way.
        if rule.beta2 is not None and state.get("second_moment", _NONE).numel() != length:
            state["second_moment"] = torch.zeros(length, device=parameter.device)
        return state


@cache
def _compiled(function: Any, rule: MuonRule) -> Callable[..., Any]:
    # Compilations are counted per code object, and few are allowed: each rule has its own.
    name = f"{function.__name__}_{sum(rule.parts)}_rows"
    own = FunctionType(function.__code__.replace(), function.__globals__, name)
    return torch.compile(own, dynamic=False)


def _pieces(moving: Sequence[Any], *, size: int) -> Iterable[Sequence[Any]]:
    """Equal matrices of a size in as few even pieces as the limit allows."""
    at_once = max(1, PIECE // size)
    length = math.ceil(len(moving) / math.ceil(len(moving) / at_once))
    return (moving[begin : begin + length] for begin in range(0, len(moving), length))


# ------------------------------------------------------------------ groups


def _matrix_groups(
    config: MuonConfig,
    matrices: Mapping[str, nn.Parameter],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[int, ...]],
) -> list[Group]:
    equal: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in matrices.items():
        height, columns = shapes[name]
        rows = parts.get(name, (height,))
        assert sum(rows) == height, name
        key = (columns, rows, parameter.dtype, parameter.device)
        equal.setdefault(key, []).append(name)
    return [
        {
            "params": [matrices[name] for name in members],
            "names": members,
            "columns": columns,
            "role": Role.MATRIX,
            "lr": config.lr,
            "peak_lr": config.lr,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
            "rule": _rule(config, rows=rows, columns=columns, device=device),
        }
        for (columns, rows, _, device), members in equal.items()
    ]


def _rule(
    config: MuonConfig, *, rows: tuple[int, ...], columns: int, device: torch.device
) -> MuonRule:
    # Half the bits lose nothing here: the iteration itself is no closer to orthogonal.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    normalises = config.normalise == "neurons"
    return MuonRule(
        parts=rows,
        scales=tuple(shape_scale(config.scale, part, columns) for part in rows),
        iteration=build_iteration(config.coefficients, steps=config.steps, dtype=dtype),
        nesterov=config.nesterov,
        cautious=config.cautious,
        beta2=(0.95 if config.beta2 is None else config.beta2) if normalises else None,
    )


def _adam_groups(
    config: MuonConfig, parameters: Mapping[str, nn.Parameter], *, roles: Mapping[str, Role]
) -> list[Group]:
    groups = []
    for role in (Role.EMBEDDING, Role.TABLE, Role.HEAD, Role.VECTOR):
        members = [parameter for name, parameter in parameters.items() if roles[name] is role]
        lr: float = getattr(config, f"{role}_lr") or ADAM_LR
        group = {
            "params": members,
            "role": role,
            "lr": lr,
            "lr_factor": lr / config.lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "weight_decay": 0.0 if role is Role.VECTOR else config.adam_weight_decay,
        }
        if members:
            groups.append(group)
    return groups
