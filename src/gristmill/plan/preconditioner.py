"""What a preconditioner costs in memory and communication, by formula, and which processes compute
what for K-FAC.

All of its state is in fp32. Of matrices stacked in one weight, each has factors of its own for its
outputs, and K-FAC one for the inputs of them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gristmill.base.units import format_bytes
from gristmill.config.lora import LinearShape
from gristmill.config.optim import KfacConfig, MuonConfig, OptimizerConfig, SoapConfig

BYTES = 4


def preconditioner_bytes(optim: OptimizerConfig, linears: Mapping[str, LinearShape]) -> int:
    """Bytes of a preconditioner's state, on all processes together; what several hold, once."""
    match optim.preconditioning:
        case KfacConfig() as kfac:
            chosen = (shape for name, shape in linears.items() if kfac.chosen(name))
            return sum(_factor_bytes(kfac, one) + _inverse_bytes(kfac, one) for one in chosen)
        case SoapConfig() as soap:
            return sum(_soap_bytes(soap, shape, optim) for shape in linears.values())
        case _:
            return 0


def describe_preconditioner(
    optim: OptimizerConfig, linears: Mapping[str, LinearShape], *, processes: int
) -> str | None:
    """What it costs, in words; None if there is none."""
    match optim.preconditioning:
        case KfacConfig() as kfac:
            return kfac_cost(kfac, linears, processes).described(kfac, processes=processes)
        case SoapConfig():
            size = format_bytes(preconditioner_bytes(optim, linears))
            divided = f", divided over {processes} processes" if processes > 1 else ""
            return f"SOAP keeps {size} of factors, bases and moments{divided}"
        case _:
            return None


def kfac_sizes(kfac: KfacConfig, shape: LinearShape) -> tuple[int, ...]:
    """Rows of the factors of a layer: that of the inputs, then those of the outputs."""
    inputs = shape.inputs + shape.biased
    return (inputs, *shape.parts) if kfac.sides == "both" else (inputs,)


def _factor_bytes(kfac: KfacConfig, shape: LinearShape) -> int:
    return BYTES * sum(n * n for n in kfac_sizes(kfac, shape))


def _inverse_bytes(kfac: KfacConfig, shape: LinearShape) -> int:
    sizes = kfac_sizes(kfac, shape)
    return _factor_bytes(kfac, shape) + (BYTES * sum(sizes) if kfac.method == "eigen" else 0)


def _soap_bytes(soap: SoapConfig, shape: LinearShape, optim: OptimizerConfig) -> int:
    """Factors and bases; with Muon also the second moment, which AdamW has anyway."""
    parts = shape.parts if getattr(optim, "split", True) else (shape.outputs,)
    sides = [n for part in parts for n in (part, shape.inputs) if n <= soap.max_dim]
    moments = shape.inputs * shape.outputs if isinstance(optim, MuonConfig) else 0
    return BYTES * (2 * sum(n * n for n in sides) + moments)


@dataclass(frozen=True)
class KfacCost:
    """What K-FAC costs a run, in bytes."""

    layers: int
    held: int
    """State of the process that holds most."""
    collected: int
    """What every process holds in addition in a step that updates factors, and sends in it."""
    inverses: int
    """Received by the process that receives most, when factors are inverted."""
    gradients: int
    """Preconditioned gradients sent, over all processes, in each step."""

    def described(self, kfac: KfacConfig, *, processes: int) -> str:
        """In words, for the start of a run."""
        collected, inverted = _every(kfac)
        own, sums = format_bytes(self.held), format_bytes(self.collected)
        if processes == 1:
            return (
                f"K-FAC for {self.layers} layers: {own} of factors and inverses; {sums} more to "
                f"collect the factors, {collected}; inverses are computed {inverted}"
            )
        return (
            f"K-FAC for {self.layers} layers: at most {own} of factors and inverses in a process; "
            f"{sums} more to collect the factors, sent {collected}; inverses are computed "
            f"{inverted}, and at most {format_bytes(self.inverses)} sent to a process; "
            f"{format_bytes(self.gradients)} of preconditioned gradients are sent in each step"
        )


def _every(kfac: KfacConfig) -> tuple[str, str]:
    counts = (kfac.factor_every.values, kfac.inverse_every.values)
    words = [
        f"every {values[0]} steps"
        if len(values) == 1
        else f"every {min(values)} to {max(values)} steps"
        for values in counts
    ]
    return words[0], words[1]


def kfac_cost(kfac: KfacConfig, linears: Mapping[str, LinearShape], processes: int) -> KfacCost:
    """The cost for the processes of one pipeline stage that holds these layers."""
    chosen = {name: shape for name, shape in linears.items() if kfac.chosen(name)}
    costs = {name: kfac_inversion(kfac, shape) for name, shape in chosen.items()}
    work = assign_layers(costs, range(processes), fraction=kfac.worker_fraction)
    kept, received = [0] * processes, [0] * processes
    gradients = 0
    for name, shape in chosen.items():
        inverse = _inverse_bytes(kfac, shape)
        kept[work[name].inverts] += _factor_bytes(kfac, shape)
        for rank in work[name].preconditions:
            kept[rank] += inverse
            received[rank] += inverse if rank != work[name].inverts else 0
        elements = shape.outputs * (shape.inputs + shape.biased)
        gradients += BYTES * elements * (processes - len(work[name].preconditions))
    collected = sum(_factor_bytes(kfac, shape) for shape in chosen.values())
    return KfacCost(len(chosen), max(kept), collected, max(received), gradients)


def kfac_inversion(kfac: KfacConfig, shape: LinearShape) -> float:
    """The work of inverting a layer's factors, in some unit."""
    return float(sum(n**3 for n in kfac_sizes(kfac, shape)))


# ------------------------------------------------------------------ which processes compute what
#
# KAISA's grid (arXiv 2107.01739): W processes form a grid of m rows and W / m columns, where m / W
# is the fraction of the processes that precondition the gradient of a layer. Each layer belongs to
# one column:
#
#     one process of the column   keeps the layer's factors and inverts them
#     all m of them               keep the inverses and precondition the layer's gradient
#     all others                  get the preconditioned gradient from the one in their row
#
# With m = 1 nothing is kept twice; with m = W no gradient is sent.


@dataclass(frozen=True)
class LayerWork:
    """The processes that work on one layer."""

    inverts: int
    preconditions: tuple[int, ...]
    """By row."""


def rows_of_grid(fraction: float, processes: int) -> int:
    """The number of rows: the divisor of the number of processes nearest to the fraction of it."""
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    return min(divisors, key=lambda n: (abs(n - fraction * processes), n))


def assign_layers(
    costs: Mapping[str, float], ranks: Sequence[int], *, fraction: float
) -> dict[str, LayerWork]:
    """Divide layers, with the cost of inverting each, evenly over columns and their processes."""
    rows = rows_of_grid(fraction, len(ranks))
    width = len(ranks) // rows
    columns = [tuple(ranks[column::width]) for column in range(width)]
    load = dict.fromkeys(ranks, 0.0)
    work = {}
    for name, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        column = min(columns, key=lambda column: (sum(load[rank] for rank in column), column))
        least = min(column, key=lambda rank: (load[rank], rank))
        load[least] += cost
        work[name] = LayerWork(least, column)
    return work
