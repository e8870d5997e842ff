"""A rule for the matrices inside blocks and Adam for everything else, in one optimizer: Muon, SOAP
with AdamW, and SOAP with Muon.

    role                             rule                      state in fp32, per parameter
    matrix                           momentum, and these two   momentum (R, C)
                                       soap.py                 see there
                                       muon.py                 second_moment (L)
    embedding, table, head, vector   fused AdamW               exp_avg, exp_avg_sq, step

A parameter group is updated in one call: all matrices of equal shape and parts, or all parameters
of one other kind. With Muon each role has its own rate, stored as a factor of the matrices' rate,
so that one schedule serves all.

With learning rate lr and peak rate LR, weight decay subtracts from a matrix W

    plain      lr weight_decay W
    cautious   lr (lr / LR) weight_decay W, where the direction has the sign of W

Updates need temporary memory, so a group is updated in chunks of limited size.

Where processes hold shards or copies of matrices, a `MatrixExchange` gathers each matrix on one
process, which computes its direction, and scatters the result; everything else happens on the
shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim.sgd import sgd

from gristmill.base.errors import UserError
from gristmill.config.model import Role
from gristmill.config.optim import AdamWConfig, MuonConfig, SoapConfig
from gristmill.optim.adamw import ADAM_PLACEMENTS, adam_groups, adam_step
from gristmill.optim.muon import (
    Chunk,
    MatrixRule,
    Stack,
    StepScalars,
    advance_momenta,
    advance_stacks,
    build_iteration,
    find_directions,
    is_compiled,
    maybe_compiled,
    move_weights,
    packed,
    pieces,
    shape_scale,
)
from gristmill.optim.soap import SOAP_PLACEMENTS, Soap, SoapRule, part_name
from gristmill.optim.spec import ParameterOptimizer, Placement, StateEntry

ADAM_LR = 4e-3
"""Default peak rate of a role."""

_NONE = torch.empty(0)

Group = dict[str, Any]
Parts = Mapping[str, tuple[int, ...]]
"""The rows of each matrix that is stacked in a parameter."""


class MatrixExchange(Protocol):
    """Communication between processes that hold shards of the same matrices."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole matrix."""

    def computes(self, name: str) -> bool:
        """Whether a matrix is assigned to this process."""

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


class MatrixOptimizer(ParameterOptimizer):
    """Updates each parameter by its role."""

    placements: ClassVar[Mapping[str, Placement]] = {
        **ADAM_PLACEMENTS,
        **SOAP_PLACEMENTS,
        "momentum": Placement.SHARDED,
        "second_moment": Placement.REPLICATED,
    }

    def __init__(
        self,
        config: MuonConfig | AdamWConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, Role],
        stacked_rows: Parts,
        compiled: bool | None = None,
        exchange: MatrixExchange | None = None,
        kernel: bool = False,
    ) -> None:
        """`compiled`: None compiles on CUDA only. With `exchange`, parameters are shards. `kernel`:
        whether AdamW uses ours."""
        matrices = {name: p for name, p in parameters.items() if roles[name] is Role.MATRIX}
        shapes = {
            name: tuple(p.shape) if exchange is None else exchange.shape(name)
            for name, p in matrices.items()
        }
        if isinstance(config, MuonConfig):
            _require_matrices(shapes)
        else:
            matrices = {name: p for name, p in matrices.items() if len(shapes[name]) == 2}
        rest = {name: p for name, p in parameters.items() if name not in matrices}
        groups = [
            *_matrix_groups(config, matrices, shapes=shapes, stacked_rows=stacked_rows),
            *_other_groups(config, rest, roles=roles),
        ]
        super().__init__(parameters, groups)
        self.compiled, self.exchange, self._matrices = compiled, exchange, frozenset(matrices)
        self.kernel = kernel
        self._scalars: dict[int, StepScalars] = {}
        self.soap: Soap | None = None
        if isinstance(config.preconditioner, SoapConfig):
            mine = {
                part_name(name, number, parts=len(group["rule"].parts)): (rows, group["columns"])
                for group in groups
                if "rule" in group
                for name in group["names"]
                if exchange is None or exchange.computes(name)
                for number, rows in enumerate(group["rule"].parts)
            }
            self.soap = Soap(_soap_rule(config, config.preconditioner), mine, compiled=compiled)

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        # The second moment is missing after a run with another `optim.normalise`, and SOAP's state
        # as long as a matrix had no gradient.
        return {
            name: ("momentum",) if name in self._matrices else ADAM_PLACEMENTS
            for name in self.parameters
        }

    def entries(self) -> Iterator[StateEntry]:
        yield from super().entries()
        if self.soap is not None:
            yield from self.soap.entries()

    def expects(self, kind: str, key: str) -> bool:
        if kind in SOAP_PLACEMENTS:
            return self.soap is not None and self.soap.expects(kind, key)
        return super().expects(kind, key)

    def load_entry(self, entry: StateEntry) -> None:
        if entry.kind in SOAP_PLACEMENTS:
            assert self.soap is not None
            self.soap.load_entry(entry)
        else:
            super().load_entry(entry)

    @torch.no_grad()
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Update every parameter that has a gradient."""
        chunks: list[Chunk] = []
        for number, group in enumerate(self.param_groups):
            if "rule" not in group:
                adam_step(self.state, group, divisor=divisor, skip=skip, kernel=self.kernel)
                continue
            scalars = self._step_scalars(number, group, divisor, skip)
            members = list(zip(group["names"], group["params"], strict=True))
            if self.exchange is None:
                members = [member for member in members if member[1].grad is not None]
            if not members:
                continue
            together = self.exchange is None and self.soap is None
            if together and is_compiled(self.compiled, members[0][1].device):
                matrices = [parameter for _, parameter in members]
                chunks += [
                    Chunk(group, scalars, piece)
                    for piece in pieces(matrices, size=matrices[0].numel())
                ]
            else:
                self._step_apart(group, scalars, members)
        for several in packed(chunks):
            self._step_stacks(several)

    def _step_scalars(
        self, number: int, group: Group, divisor: torch.Tensor, skip: torch.Tensor
    ) -> StepScalars:
        """A group's step-dependent scalars on the device, set without a sync."""
        # The same tensors in every step: numbers that change would be compiled in anew.
        if number not in self._scalars:
            lr, decay, momentum, factors = torch.zeros(4, device=divisor.device).unbind()
            self._scalars[number] = StepScalars(lr, decay, momentum, factors, divisor, skip)
        scalars = self._scalars[number]
        relative = group["lr"] / group["peak_lr"] if group["rule"].cautious else 1.0
        scalars.lr.fill_(group["lr"])
        scalars.decay.fill_(group["lr"] * relative * group["weight_decay"])
        scalars.momentum.fill_(group["momentum"])
        scalars.factor_decay.fill_(group.get("factor_decay", 0.0))
        return scalars._replace(divisor=divisor.reshape(()), skip=skip.reshape(()))

    def _step_apart(
        self, group: Group, scalars: StepScalars, members: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        """Update the matrices of one group: momenta, directions and weights one after the other,
        since directions may be computed by other processes than hold the shards. Every process
        takes part in every exchange, even with an empty shard or no gradient."""
        rule, columns, device = group["rule"], group["columns"], group["params"][0].device
        find = self._maybe_compiled(find_directions, rule, device)
        advance: Callable[..., list[torch.Tensor]] = advance_momenta
        move: Callable[..., None] = move_weights
        if self.exchange is None:  # shards have any size, and some have none
            advance = self._maybe_compiled(advance, rule, device)
            move = self._maybe_compiled(move, rule, device)
        for chunk in pieces(members, size=self._size(rule, columns)):
            names, parameters = [name for name, _ in chunk], [p for _, p in chunk]
            states = [self._matrix_state(p, rule, columns) for p in parameters]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            momenta = [state["momentum"] for state in states]
            moments = [] if rule.beta2 is None else [state["second_moment"] for state in states]
            # Momenta are linear in the gradients, so shards of them advance where they are; only
            # directions need whole matrices. All processes have the same chunks in the same order,
            # so the collectives of gather and scatter meet.
            assigned = self._gather(names, advance(gradients, momenta, scalars, rule))
            if self.soap is not None:
                whole = self._gather(names, [gradient.float() for gradient in gradients])
                assigned = self._whitened(self.soap, group, names, whole, assigned, scalars)
            computed: dict[int, torch.Tensor] = {}
            if assigned:
                its_moments = [moments[index] for index in assigned] if moments else []
                stacked = find(list(assigned.values()), its_moments, scalars, rule)
                computed = dict(zip(assigned, stacked.unbind(), strict=True))
            directions = list(computed.values())
            if self.exchange is not None:
                directions = self.exchange.scatter(names, computed, moments)
            move([p.detach() for p in parameters], directions, scalars, rule)

    def _gather(
        self, names: Sequence[str], shards: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        if self.exchange is None:
            return dict(enumerate(shards))
        return self.exchange.gather(names, shards)

    def _whitened(
        self,
        soap: Soap,
        group: Group,
        names: Sequence[str],
        gradients: Mapping[int, torch.Tensor],
        momenta: Mapping[int, torch.Tensor],
        scalars: StepScalars,
    ) -> dict[int, torch.Tensor]:
        """Whole momenta, by index in `names`, whitened part by part, with equal parts batched."""
        rows = list[int](group["rule"].parts)
        split = {index: list(torch.split(one, rows)) for index, one in momenta.items()}
        for height in sorted(set(rows)) if momenta else ():
            which = [(i, n) for i in momenta for n, other in enumerate(rows) if other == height]
            whitened = soap.whiten(
                [part_name(names[index], number, parts=len(rows)) for index, number in which],
                [torch.split(gradients[index], rows)[number] for index, number in which],
                [split[index][number] for index, number in which],
                scalars,
                refresh=group["refresh"],
            )
            for (index, number), one in zip(which, whitened, strict=True):
                split[index][number] = one
        return {index: torch.cat(parts) for index, parts in split.items()}

    def _size(self, rule: MatrixRule, columns: int) -> int:
        """Elements that a matrix takes while it is updated."""
        size = sum(rule.parts) * columns
        if self.soap is None:
            return size
        shapes = [self.soap.rule.shapes(rows, columns) for rows in rule.parts]
        bases = sum(
            math.prod(s) for shape in shapes for k, s in shape.items() if k.endswith("basis")
        )
        return max(size, bases)

    def _maybe_compiled(
        self, function: Callable[..., Any], constants: Hashable, device: torch.device
    ) -> Callable[..., Any]:
        return maybe_compiled(function, constants, compiled=self.compiled, device=device)

    def _step_stacks(self, chunks: Sequence[Chunk]) -> None:
        """Update matrices of several shapes with one compiled function."""
        stacks = []
        for chunk in chunks:
            rule = chunk.rule
            states = [self._matrix_state(p, rule, p.shape[1]) for p in chunk.parameters]
            moments = None if rule.beta2 is None else _stacked(states, "second_moment")
            gradients = torch.stack(chunk.gradients())
            stacks.append(Stack(gradients, _stacked(states, "momentum"), moments, chunk.scalars))
        rules = tuple(chunk.rule for chunk in chunks)
        device = stacks[0].gradients_NRC.device
        advance = self._maybe_compiled(advance_stacks, rules, device)
        for chunk, direction_NRC in zip(chunks, advance(stacks, rules), strict=True):
            directions = list(direction_NRC.unbind())
            self._move(chunk.group, chunk.weights(), directions, chunk.scalars)

    def _move(
        self,
        group: Group,
        weights: list[torch.Tensor],
        directions: list[torch.Tensor],
        scalars: StepScalars,
    ) -> None:
        """Update weights on a device for which steps are compiled."""
        rule = group["rule"]
        if rule.cautious or weights[0].dtype is not torch.float32:
            move = self._maybe_compiled(move_weights, rule, weights[0].device)
            move(weights, directions, scalars, rule)
            return
        # torch's own kernel for all matrices at once, which need not be compiled.
        sgd(
            weights,
            directions,
            [None] * len(weights),
            fused=True,
            found_inf=scalars.skip,
            weight_decay=group["weight_decay"],
            momentum=0.0,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _matrix_state(
        self, parameter: nn.Parameter, rule: MatrixRule, columns: int
    ) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        length = sum(rule.moments(columns))
        # A checkpoint with another `optim.split` has moments of another length: start over.
        if rule.beta2 is not None and state.get("second_moment", _NONE).shape != (length,):
            state["second_moment"] = torch.zeros(length, device=parameter.device)
        return state


def _stacked(states: Sequence[dict[str, torch.Tensor]], kind: str) -> torch.Tensor:
    """One tensor of the state of equal matrices, whose own state are views of it: made so at the
    first step, and at the first one after a checkpoint was loaded."""
    parts = [state[kind] for state in states]
    first, size = parts[0], parts[0].numel()
    storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        one.untyped_storage().data_ptr() == storage
        and one.storage_offset() == begin + number * size
        and one.is_contiguous()
        for number, one in enumerate(parts)
    ):
        return first.as_strided((len(parts), *first.shape), (size, *first.stride()))
    stacked = torch.stack(parts)
    for state, one in zip(states, stacked.unbind(), strict=True):
        state[kind] = one
    return stacked


def _require_matrices(shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if len(shape) != 2:
            what = f"{name} has {len(shape)} dimensions, and Muon orthogonalises matrices"
            raise UserError(what, where="optim.type", remedy='use "adamw" for this model')


# ------------------------------------------------------------------ groups


def _matrix_groups(
    config: MuonConfig | AdamWConfig,
    matrices: Mapping[str, nn.Parameter],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    stacked_rows: Parts,
) -> list[Group]:
    if isinstance(config, AdamWConfig):
        parts, momentum = stacked_rows, config.beta1
    else:
        parts, momentum = stacked_rows if config.split else {}, config.momentum
    equal: dict[tuple[Any, ...], list[str]] = {}
    for name, parameter in matrices.items():
        height, columns = shapes[name]
        rows = parts.get(name, (height,))
        assert sum(rows) == height, name
        key = (columns, rows, parameter.dtype, parameter.device)
        equal.setdefault(key, []).append(name)
    soap = {}
    if isinstance(config.preconditioner, SoapConfig):
        # The schedule sets both.
        soap = {"factor_decay": config.preconditioner.decay.values[0], "refresh": True}
    return [
        {
            "params": [matrices[name] for name in members],
            "names": members,
            "columns": columns,
            "role": Role.MATRIX,
            "lr": config.lr,
            "peak_lr": config.lr,
            "momentum": momentum,
            "weight_decay": config.weight_decay,
            "rule": _rule(config, rows=rows, columns=columns, device=device),
            **soap,
        }
        for (columns, rows, _, device), members in equal.items()
    ]


def _rule(
    config: MuonConfig | AdamWConfig, *, rows: tuple[int, ...], columns: int, device: torch.device
) -> MatrixRule:
    if isinstance(config, AdamWConfig):
        return MatrixRule(
            parts=rows,
            scales=(1.0,) * len(rows),
            iteration=None,
            nesterov=False,
            cautious=False,
            beta2=None,
        )
    # bf16 costs no accuracy: the iteration's own error is larger.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    normalises = config.normalise == "neurons"
    return MatrixRule(
        parts=rows,
        scales=tuple(shape_scale(config.scale, part, columns) for part in rows),
        iteration=build_iteration(config.coefficients, steps=config.steps, dtype=dtype),
        nesterov=config.nesterov,
        cautious=config.cautious,
        beta2=(0.95 if config.beta2 is None else config.beta2) if normalises else None,
    )


def _soap_rule(config: MuonConfig | AdamWConfig, soap: SoapConfig) -> SoapRule:
    beta2 = config.beta2 if isinstance(config, AdamWConfig) else 0.9
    return SoapRule(beta2 if soap.beta2 is None else soap.beta2, soap.eps, soap.max_dim)


def _other_groups(
    config: MuonConfig | AdamWConfig,
    parameters: Mapping[str, nn.Parameter],
    *,
    roles: Mapping[str, Role],
) -> list[Group]:
    if isinstance(config, AdamWConfig):
        return adam_groups(config, parameters, roles=roles)
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
