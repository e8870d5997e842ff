"""Muon for matrices and Adam for everything else, in one optimizer.

    role                             rule                      state in fp32, per parameter
    matrix                           optim/orthogonal.py       momentum (R, C); second_moment (L)
    embedding, table, head, vector   fused AdamW               exp_avg, exp_avg_sq, step

A parameter group is updated in one call: all matrices of equal shape and parts, or all parameters
of one other role. Each role has its own rate, stored as a factor of the matrices' rate, so that one
schedule serves all.

With learning rate lr and peak rate LR, weight decay subtracts from a matrix W

    plain      lr weight_decay W
    cautious   lr (lr / LR) weight_decay W, where the direction has the sign of W

Updates need temporary memory, so a group is updated in chunks of limited size.

Where processes hold shards of matrices, a `MuonExchange` gathers each matrix on one process, which
orthogonalises it, and scatters the result; everything else happens on the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from gristmill.base.errors import UserError
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
"""Default peak rate of a role."""

PIECE = 2**27
"""Elements that are orthogonalised at once, unless a single matrix has more."""

_NONE = torch.empty(0)

Group = dict[str, Any]


class MuonExchange(Protocol):
    """Communication between processes that hold shards of the same matrices."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole matrix."""

    def gather(
        self, names: Sequence[str], shards: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The whole matrices assigned to this process, by index in `names`, from all processes'
        shards."""

    def scatter(
        self,
        names: Sequence[str],
        directions: Mapping[int, torch.Tensor],
        moments: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """This process's shards of the directions of all named matrices. Moments, which are
        replicated, are overwritten by those of the process that computed the direction."""


class Muon(ParameterOptimizer):
    """Updates each parameter by its role."""

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
        """`compiled`: None compiles on CUDA only. With `exchange`, parameters are shards."""
        matrices = {name: p for name, p in parameters.items() if roles[name] is Role.MATRIX}
        shapes = {
            name: tuple(p.shape) if exchange is None else exchange.shape(name)
            for name, p in matrices.items()
        }
        for name, shape in shapes.items():
            if len(shape) != 2:
                what = f"{name} has {len(shape)} dimensions, and Muon orthogonalises matrices"
                raise UserError(what, where="optim.type", remedy='use "adamw" for this model')
        stacked = stacked_rows if config.split else {}
        groups = [
            *_matrix_groups(config, matrices, shapes=shapes, parts=stacked),
            *_adam_groups(config, parameters, roles=roles),
        ]
        super().__init__(parameters, groups)
        self.compiled, self.exchange, self._matrices = compiled, exchange, frozenset(matrices)
        self._scalars: dict[int, StepScalars] = {}

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        # The second moment is missing after a run with another `optim.normalise`.
        return {
            name: ("momentum",) if name in self._matrices else ADAM_PLACEMENTS
            for name in self.parameters
        }

    @torch.no_grad()
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Update every parameter that has a gradient."""
        for number, group in enumerate(self.param_groups):
            if group["role"] is not Role.MATRIX:
                adam_step(self.state, group["params"], group, divisor=divisor, skip=skip)
                continue
            scalars = self._step_scalars(number, group, divisor, skip)
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.exchange is not None:
                self._step_shards(group, scalars, self.exchange)
            elif updated:
                self._step_matrices(group, scalars, updated)

    def _step_scalars(
        self, number: int, group: Group, divisor: torch.Tensor, skip: torch.Tensor
    ) -> StepScalars:
        """A group's step-dependent scalars on the device, set without a sync."""
        if number not in self._scalars:
            lr, decay, momentum = torch.zeros(3, device=divisor.device).unbind()
            self._scalars[number] = StepScalars(lr, decay, momentum, divisor, skip)
        scalars = self._scalars[number]
        relative = group["lr"] / group["peak_lr"] if group["rule"].cautious else 1.0
        scalars.lr.fill_(group["lr"])
        scalars.decay.fill_(group["lr"] * relative * group["weight_decay"])
        scalars.momentum.fill_(group["momentum"])
        return scalars._replace(divisor=divisor.reshape(()), skip=skip.reshape(()))

    def _step_shards(self, group: Group, scalars: StepScalars, exchange: MuonExchange) -> None:
        """Update sharded matrices. Every process takes part in every exchange, even with an empty
        shard or no gradient."""
        rule, members = group["rule"], list(zip(group["names"], group["params"], strict=True))
        find = self._maybe_compiled(find_directions, rule, group["params"][0].device)
        for chunk in _pieces(members, size=sum(rule.parts) * group["columns"]):
            names, parameters = [name for name, _ in chunk], [p for _, p in chunk]
            states = [self._matrix_state(p, rule, group["columns"]) for p in parameters]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            momenta = [state["momentum"] for state in states]
            moments = [] if rule.beta2 is None else [state["second_moment"] for state in states]
            advanced = advance_momenta(gradients, momenta, scalars, rule)
            assigned = exchange.gather(names, advanced)
            computed: dict[int, torch.Tensor] = {}
            if assigned:
                its_moments = [moments[index] for index in assigned] if moments else []
                stacked = find(list(assigned.values()), its_moments, scalars, rule)
                computed = dict(zip(assigned, stacked.unbind(), strict=True))
            directions = exchange.scatter(names, computed, moments)
            move_weights([p.detach() for p in parameters], directions, scalars, rule)

    def _maybe_compiled(
        self, function: Callable[..., Any], rule: MuonRule, device: torch.device
    ) -> Callable[..., Any]:
        compiled = device.type == "cuda" if self.compiled is None else self.compiled
        return _compiled(function, rule) if compiled else function

    def _step_matrices(
        self, group: Group, scalars: StepScalars, updated: Sequence[nn.Parameter]
    ) -> None:
        rule = group["rule"]
        update = self._maybe_compiled(update_matrices, rule, updated[0].device)
        for chunk in _pieces(updated, size=updated[0].numel()):
            states = [self._matrix_state(p, rule, p.shape[1]) for p in chunk]
            update(
                [parameter.detach() for parameter in chunk],
                [parameter.grad for parameter in chunk],
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
        # A checkpoint with another `optim.split` has moments of another length: start over.
        if rule.beta2 is not None and state.get("second_moment", _NONE).shape != (length,):
            state["second_moment"] = torch.zeros(length, device=parameter.device)
        return state


@cache
def _compiled(function: Any, rule: MuonRule) -> Callable[..., Any]:
    # torch limits recompilations per code object, so each rule gets its own.
    name = f"{function.__name__}_{sum(rule.parts)}_rows"
    copy = FunctionType(function.__code__.replace(), function.__globals__, name)
    return torch.compile(copy, dynamic=False)


def _pieces(matrices: Sequence[Any], *, size: int) -> Iterable[Sequence[Any]]:
    """Equal matrices of a size, in as few even chunks as PIECE allows."""
    at_once = max(1, PIECE // size)
    length = math.ceil(len(matrices) / math.ceil(len(matrices) / at_once))
    return (matrices[begin : begin + length] for begin in range(0, len(matrices), length))


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
    # bf16 costs no accuracy: the iteration's own error is larger.
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
        if not members:
            continue
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
        groups.append(group)
    return groups
