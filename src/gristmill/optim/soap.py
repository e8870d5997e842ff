"""SOAP: Adam's second moment in the eigenbasis of Shampoo's factors.

For each matrix, or each part of stacked ones, with gradient g, momentum m, factors L and R, and
their eigenvectors QL and QR as columns:

    L <- average(g g^T)             R <- average(g^T g)
    g' = QL^T g QR                  the gradient in the eigenbasis
    v <- beta2 v + (1 - beta2) g'^2
    u' = QL^T m QR / (sqrt(v) + eps)
    u  = QL u' QR^T                 back from the eigenbasis: what the optimizer gets as momentum

m and v are divided by 1 - momentum^t and 1 - beta2^t at the t-th update, as in Adam; what is
orthogonalised afterwards does not depend on it. A side that is longer than `max_dim` has neither
factor nor basis.

The first basis is a decomposition of the first gradient's factors, so that the first update counts.
In this basis the gradient is diagonal, and what is not on the diagonal is rounding. So the first
update has a larger eps, by FIRST_EPS x the largest root: u has the singular vectors of m then, with
singular values close to 1.

After that, every `basis_every` steps, one step of orthogonal iteration brings it closer to the
factors' eigenvectors. They are sorted by their eigenvalues; rows and columns of v move with them.

Until a matrix has its first gradient that is not zero, nothing is known about its basis, and the
host has to look at the gradients. From then on, everything is decided on the device.

Shapes: N matrices, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gristmill.optim.factors import advance, decompose, refresh_basis, side_by_side
from gristmill.optim.muon import StepScalars, in_order, maybe_compiled
from gristmill.optim.spec import Placement, StateEntry

FIRST_EPS = 0.01
"""Above the rounding of products in TF32, relative to the largest."""

State = dict[str, torch.Tensor]
"""The state of one part, by kind."""

SOAP_PLACEMENTS: Mapping[str, Placement] = dict.fromkeys(
    (
        "soap_step",
        "soap_exp_avg_sq",
        "row_factor",
        "column_factor",
        "row_basis",
        "column_basis",
    ),
    Placement.ASSIGNED,
)


@dataclass(frozen=True)
class SoapRule:
    """The constants of SOAP."""

    beta2: float
    eps: float
    max_dim: int

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """The shape of each kind of state of a part."""
        shapes: dict[str, tuple[int, ...]] = {"soap_step": (), "soap_exp_avg_sq": (rows, columns)}
        for side, size in (("row", rows), ("column", columns)):
            if size <= self.max_dim:
                shapes |= {f"{side}_factor": (size, size), f"{side}_basis": (size, size)}
        return shapes


def part_name(name: str, number: int, *, parts: int) -> str:
    """The name of one of the matrices that are stacked in a parameter."""
    return name if parts == 1 else f"{name}.{number}"


class Soap:
    """SOAP's state of all parts that this process computes."""

    def __init__(
        self, rule: SoapRule, shapes: Mapping[str, tuple[int, int]], *, compiled: bool | None
    ) -> None:
        """`shapes`: of each part, by its name."""
        self.rule, self.compiled = rule, compiled
        self._shapes = {name: rule.shapes(*shape) for name, shape in shapes.items()}
        self._states: dict[str, State] = {}

    def entries(self) -> Iterator[StateEntry]:
        for name, state in self._states.items():
            for kind, value in state.items():
                yield StateEntry(kind, name, value)

    def expects(self, kind: str, name: str) -> bool:
        return kind in self._shapes.get(name, ())

    def load_entry(self, entry: StateEntry) -> None:
        self._states.setdefault(entry.key, {})[entry.kind] = entry.value

    def whiten(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        momenta: Sequence[torch.Tensor],
        scalars: StepScalars,
        *,
        refresh: bool,
    ) -> list[torch.Tensor]:
        """The momenta of equal parts, each divided by the root of the second moment in its
        eigenbasis; updates the state of these parts."""
        known = {name for name in names if self._is_complete(name)}
        if len(known) < len(names):
            self._start(names, gradients, scalars, known=known)
        chosen = [index for index, name in enumerate(names) if self._is_complete(name)]
        result = list(momenta)
        if not chosen:
            return result
        states = [self._states[names[index]] for index in chosen]
        function = maybe_compiled(
            whiten_parts,
            (self.rule, gradients[0].shape),
            compiled=self.compiled,
            device=gradients[0].device,
        )
        whitened = function(
            [gradients[index] for index in chosen],
            [momenta[index] for index in chosen],
            states,
            scalars,
            self.rule,
        )
        for index, one in zip(chosen, whitened.unbind(), strict=True):
            result[index] = one
        # After the update: v belongs to the basis it was accumulated in, and moves with it. Parts
        # that have just started have the eigenvectors of their factors already.
        if refresh:
            refresh_parts([self._states[name] for name in names if name in known], scalars.skip)
        return result

    def _is_complete(self, name: str) -> bool:
        state = self._states.get(name, {})
        return {kind: tuple(one.shape) for kind, one in state.items()} == self._shapes[name]

    def _start(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        scalars: StepScalars,
        *,
        known: set[str],
    ) -> None:
        """Give a state to the parts that have a gradient for the first time."""
        waiting = [(n, g) for n, g in zip(names, gradients, strict=True) if n not in known]
        sizes = torch.stack([gradient.abs().amax() for _, gradient in waiting])
        counts = ((sizes > 0) & (scalars.skip == 0)).tolist()
        for (name, gradient), counted in zip(waiting, counts, strict=True):
            # Of other shapes or not whole, after a run with another `max_dim`.
            self._states.pop(name, None)
            if counted:
                self._states[name] = _first_state(gradient / scalars.divisor, self._shapes[name])


def _first_state(gradient: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> State:
    state = {kind: torch.zeros(shape, device=gradient.device) for kind, shape in shapes.items()}
    gradient = gradient.float()
    if "row_basis" in state:
        state["row_basis"] = decompose(gradient @ gradient.mT).basis
    if "column_basis" in state:
        state["column_basis"] = decompose(gradient.mT @ gradient).basis
    return state


def whiten_parts(
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    states: Sequence[State],
    scalars: StepScalars,
    rule: SoapRule,
) -> torch.Tensor:
    """Update factors and second moments of equal parts in place; returns their whitened momenta."""
    skipped = scalars.skip > 0
    g_NRC = torch.stack([gradient.float() for gradient in gradients]) / scalars.divisor
    rows_NRR, columns_NCC = (_stacked(states, f"{side}_basis") for side in ("row", "column"))
    if rows_NRR is not None:
        _advance_factors("row_factor", torch.bmm(g_NRC, in_order(g_NRC.mT)), states, scalars)
    if columns_NCC is not None:
        _advance_factors("column_factor", torch.bmm(in_order(g_NRC.mT), g_NRC), states, scalars)
    updates_N11 = torch.stack([state["soap_step"] for state in states])[:, None, None] + 1
    squares_NRC = _rotate(g_NRC, rows_NRR, columns_NCC).square()
    v_NRC = torch.lerp(
        squares_NRC, torch.stack([state["soap_exp_avg_sq"] for state in states]), rule.beta2
    )
    m_NRC = _rotate(torch.stack(list(momenta)), rows_NRR, columns_NCC)
    m_NRC = m_NRC / (1 - scalars.momentum**updates_N11)
    root_NRC = (v_NRC / (1 - rule.beta2**updates_N11)).sqrt()
    eps_N11 = root_NRC.amax(dim=(1, 2), keepdim=True) * (updates_N11 == 1) * FIRST_EPS + rule.eps
    for state, v_RC in zip(states, v_NRC.unbind(), strict=True):
        state["soap_exp_avg_sq"].copy_(torch.where(skipped, state["soap_exp_avg_sq"], v_RC))
        state["soap_step"].add_(torch.where(skipped, 0.0, 1.0))
    return _rotate(m_NRC / (root_NRC + eps_N11), _transposed(rows_NRR), _transposed(columns_NCC))


def refresh_parts(states: Sequence[State], skip: torch.Tensor) -> None:
    """Move the bases of equal parts towards the eigenvectors of their factors, and the second
    moments with them; in place, unless `skip` is 1."""
    side_by_side([partial(_refresh, state, skip) for state in states], skip.device)


def _refresh(state: State, skip: torch.Tensor) -> None:
    skipped = skip > 0
    for side, dim in (("row", 0), ("column", 1)):
        if f"{side}_factor" not in state:
            continue
        basis, v_RC = state[f"{side}_basis"], state["soap_exp_avg_sq"]
        fresh = refresh_basis(state[f"{side}_factor"], basis)
        basis.copy_(torch.where(skipped, basis, fresh.basis))
        v_RC.copy_(torch.where(skipped, v_RC, v_RC.index_select(dim, fresh.order)))


def _advance_factors(
    kind: str, samples: torch.Tensor, states: Sequence[State], scalars: StepScalars
) -> None:
    for state, sample in zip(states, samples.unbind(), strict=True):
        advance(
            state[kind],
            sample,
            decay=scalars.factor_decay,
            updates=state["soap_step"],
            skip=scalars.skip,
        )


def _stacked(states: Sequence[State], kind: str) -> torch.Tensor | None:
    return torch.stack([state[kind] for state in states]) if kind in states[0] else None


def _transposed(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.mT


def _rotate(
    x_NRC: torch.Tensor, rows_NRR: torch.Tensor | None, columns_NCC: torch.Tensor | None
) -> torch.Tensor:
    """rows^T x columns; a side without a basis stays as it is."""
    if rows_NRR is not None:
        x_NRC = torch.bmm(in_order(rows_NRR.mT), x_NRC)
    return x_NRC if columns_NCC is None else torch.bmm(x_NRC, in_order(columns_NCC))
