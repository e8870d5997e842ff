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

Where processes hold parts of matrices, an `Exchange` brings each matrix together on one of them,
which finds its direction, and hands the parts out again; all else is done on the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.adamw import adamw

from gristmill.config.optim import MuonConfig
from gristmill.config.roles import Role
from gristmill.optim.orthogonal import (
    Numbers,
    Rule,
    advance_momenta,
    build_iteration,
    find_directions,
    move_weights,
    shape_scale,
    update_matrices,
)

ADAM_LR = 4e-3
"""Peak rate of a role that was not given its own."""

PIECE = 2**27
"""Elements that are orthogonalised at once, unless one matrix has more."""

_NONE = torch.empty(0)

Group = dict[str, Any]


class Exchange(Protocol):
    """The way between processes that hold parts of the same matrices."""

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


class Muon(torch.optim.Optimizer):
    """Steps parameters by their role; `grad_scale` and `found_inf` act as in fused AdamW."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        config: MuonConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, Role],
        parts: Mapping[str, tuple[int, ...]],
        compiled: bool | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`parts` names the rows of parameters that are several matrices; `compiled` is None for
        CUDA only; with an `exchange` the parameters are parts of matrices."""
        matrices = {name: p for name, p in parameters.items() if roles[name] is Role.MATRIX}
        shapes = {
            name: tuple(p.shape) if exchange is None else exchange.shape(name)
            for name, p in matrices.items()
        }
        groups = [
            *_matrix_groups(config, matrices, shapes=shapes, parts=parts if config.split else {}),
            *_adam_groups(config, parameters, roles=roles),
        ]
        super().__init__(groups, {"lr": config.lr})
        self.compiled, self.exchange = compiled, exchange
        self._numbers: dict[int, Numbers] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for number, group in enumerate(self.param_groups):
            matrices = group["role"] is Role.MATRIX
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if matrices and self.exchange is not None:
                self._step_parts(number, group, self.exchange)
            elif matrices and moving:
                self._step_matrices(number, group, moving)
            elif moving:
                self._step_adam(moving, group)
        return result

    def _numbers_of(self, number: int, group: Group, device: torch.device) -> Numbers:
        """A group's changing numbers on the device, put there without waiting for it."""
        if number not in self._numbers:
            zero, one = torch.zeros((), device=device), torch.ones((), device=device)
            self._numbers[number] = Numbers(zero, zero.clone(), zero.clone(), one, zero.clone())
        kept = self._numbers[number]
        follow = group["lr"] / group["peak_lr"] if group["rule"].cautious else 1.0
        kept.lr.fill_(group["lr"])
        kept.decay.fill_(group["lr"] * follow * group["weight_decay"])
        kept.momentum.fill_(group["momentum"])
        given = {
            "divisor": getattr(self, "grad_scale", None),
            "skip": getattr(self, "found_inf", None),
        }
        return kept._replace(**{k: v.reshape(()) for k, v in given.items() if v is not None})

    def _step_parts(self, number: int, group: Group, exchange: Exchange) -> None:
        """The same where processes hold parts of the matrices. Every process takes part in every
        exchange, even with an empty part or without any gradient."""
        rule, members = group["rule"], list(zip(group["names"], group["params"], strict=True))
        device = group["params"][0].device
        numbers = self._numbers_of(number, group, device)
        find = self._made(find_directions, rule, device)
        for piece in _pieces(members, size=sum(rule.parts) * group["columns"]):
            names, parameters = [name for name, _ in piece], [p for _, p in piece]
            states = [self._matrix_state(p, rule, group["columns"]) for p in parameters]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            momenta = [state["momentum"] for state in states]
            moments = [] if rule.beta2 is None else [state["second_moment"] for state in states]
            advanced = advance_momenta(gradients, momenta, numbers, rule)
            mine = exchange.collect(names, advanced)
            found: dict[int, torch.Tensor] = {}
            if mine:
                own = [moments[place] for place in mine] if moments else []
                whole = find(list(mine.values()), own, numbers, rule)
                found = dict(zip(mine, whole.unbind(), strict=True))
            directions = exchange.hand_out(names, found, moments)
            move_weights([p.detach() for p in parameters], directions, numbers, rule)

    def _made(
        self, function: Callable[..., Any], rule: Rule, device: torch.device
    ) -> Callable[..., Any]:
        """A function, compiled if that is wanted."""
        compiled = device.type == "cuda" if self.compiled is None else self.compiled
        return _compiled(function, rule) if compiled else function

    def _step_matrices(self, number: int, group: Group, moving: Sequence[nn.Parameter]) -> None:
        rule, device = group["rule"], moving[0].device
        numbers = self._numbers_of(number, group, device)
        update = self._made(update_matrices, rule, device)
        for piece in _pieces(moving, size=moving[0].numel()):
            states = [self._matrix_state(p, rule, p.shape[1]) for p in piece]
            update(
                [parameter.detach() for parameter in piece],
                [parameter.grad for parameter in piece],
                [state["momentum"] for state in states],
                [] if rule.beta2 is None else [state["second_moment"] for state in states],
                numbers,
                rule,
            )

    def _matrix_state(
        self, parameter: nn.Parameter, rule: Rule, columns: int
    ) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        length = sum(rule.moments(columns))
        # Moments of another length come from a run that split its matrices in another way.
        if rule.beta2 is not None and state.get("second_moment", _NONE).numel() != length:
            state["second_moment"] = torch.zeros(length, device=parameter.device)
        return state

    def _step_adam(self, moving: list[nn.Parameter], group: Group) -> None:
        for parameter in moving:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in moving]
        beta1, beta2 = group["betas"]
        adamw(
            list(moving),
            [parameter.grad for parameter in moving if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


@cache
def _compiled(function: Any, rule: Rule) -> Callable[..., Any]:
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


def _own_rate(config: MuonConfig, role: Role) -> float | None:
    rate: float | None = getattr(config, f"{role}_lr")
    return rate


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


def _rule(config: MuonConfig, *, rows: tuple[int, ...], columns: int, device: torch.device) -> Rule:
    # Half the bits lose nothing here: the iteration itself is no closer to orthogonal.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Rule(
        parts=rows,
        scales=tuple(shape_scale(config.scale, part, columns) for part in rows),
        iteration=build_iteration(config.coefficients, steps=config.steps, dtype=dtype),
        nesterov=config.nesterov,
        cautious=config.cautious,
        beta2=_beta2(config) if config.normalise == "neurons" else None,
    )


def _beta2(config: MuonConfig) -> float:
    return 0.95 if config.beta2 is None else config.beta2


def _adam_groups(
    config: MuonConfig, parameters: Mapping[str, nn.Parameter], *, roles: Mapping[str, Role]
) -> list[Group]:
    groups = []
    for role in (Role.EMBEDDING, Role.TABLE, Role.HEAD, Role.VECTOR):
        members = [parameter for name, parameter in parameters.items() if roles[name] is role]
        lr = _own_rate(config, role) or ADAM_LR
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
