"""One exchange: from the weights of all workers to the weights from which each continues.

Every exchange follows one formula. Worker i has weights x, its anchor y, the weights from which it
continued after the last exchange, and the outer gradient d = y - x:

    u_i = y_i - outer(d_i)            plain: u = x; SGD: lr d; Nesterov: lr (d + momentum m)
    y_i <- sum_j W_ij C(u_j)          W: the topology's matrix of this round; C: what is sent

    gossip        an exchange after every step, plain                (D-PSGD, decentralized Adam)
    DiLoCo        many steps, complete graph, Nesterov               (arXiv 2311.08105)
    NoLoCo-like   many steps, random pairs, Nesterov                 (arXiv 2506.10911)

(arXiv 2606.11081 has the same unification.) If the graph is complete and every worker has the same
anchor, only differences need to be sent: they are small, so few bits suffice, and rounding errors
are added to the next exchange (error feedback). The outer step is then applied to their mean, which
gives the same result since all of it is linear.

Without a common anchor, a lossy format sends rounded weights, and a worker adds only their
differences, x_i + sum_j W_ij (C(x_j) - C(x_i)). So the mean over all workers is preserved exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.distributed as dist

from gristmill.config.parallel import ParallelConfig, topology_fits
from gristmill.strategies.decentralized.codecs import Transfer, build_codec
from gristmill.strategies.decentralized.topologies import Members, groups_of_round
from gristmill.strategies.decentralized.workers import WorkerSet
from gristmill.strategies.sharding import ShardedParameter, ShardedParameters

BUCKET = 2**24
"""Elements per bucket, above which no further parameter is added."""

Buckets = list[torch.Tensor]
"""One flat tensor for each bucket."""


class FlatLayout:
    """This process's shards of all parameters as a few flat tensors, for communication.

    Parameters that are not sharded within a worker come first, in separate buckets: all processes
    of a worker hold them at the same positions, so that a sum over workers is rounded in the same
    way on all of them.
    """

    def __init__(self, parameters: ShardedParameters) -> None:
        self.parameters = parameters
        ordered = sorted(parameters.values(), key=_is_sharded)
        self.buckets: list[list[ShardedParameter]] = []
        for _, same in groupby(ordered, key=_is_sharded):
            self.buckets.append([])
            for one in same:
                if sum(other.local.numel() for other in self.buckets[-1]) >= BUCKET:
                    self.buckets.append([])
                self.buckets[-1].append(one)

    @torch.no_grad()
    def read(self) -> Buckets:
        """A copy of the weights."""
        return [
            torch.cat([one.local.detach().reshape(-1) for one in bucket]) for bucket in self.buckets
        ]

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Replace the weights."""
        for name, view in self.views(values).items():
            self.parameters[name].local.copy_(view)

    @torch.no_grad()
    def add(self, values: Sequence[torch.Tensor]) -> None:
        """Add to the weights."""
        for name, view in self.views(values).items():
            self.parameters[name].local.add_(view)

    def zeros(self) -> Buckets:
        return [torch.zeros_like(one) for one in self.read()]

    def views(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter's part of the buckets, in its shape, by name."""
        found = {}
        for bucket, flat in zip(self.buckets, values, strict=True):
            parts = flat.split([one.local.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                found[one.name] = part.view(one.local.shape)
        return found

    def owned_squares(self, values: Sequence[torch.Tensor]) -> float:
        """The sum of squares over the elements that this process owns."""
        views = self.views(values)
        owned = [views[parameter.name] for parameter in self.parameters.values() if parameter.owned]
        if not owned:
            return 0.0
        return float(sum(one.double().square().sum() for one in owned))


def _is_sharded(parameter: ShardedParameter) -> bool:
    return tuple(parameter.local.shape) != parameter.shape


DENSITY = 1 / 64
"""The default share of the elements that top-k sends."""


@dataclass(frozen=True)
class OuterStep:
    """The outer optimizer: plain averaging if the rate is 1 and there is no momentum."""

    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def of(cls, config: ParallelConfig) -> OuterStep:
        if config.local is None:
            return cls()
        momentum = 0.9 if config.local.outer_momentum is None else config.local.outer_momentum
        return cls(config.local.outer_lr, momentum if config.local.outer == "nesterov" else 0.0)

    @property
    def is_plain(self) -> bool:
        return self.lr == 1.0 and not self.momentum

    def apply(
        self, anchor: torch.Tensor, gradient: torch.Tensor, memory: torch.Tensor | None
    ) -> torch.Tensor:
        """The anchor after a step along an outer gradient; updates the momentum buffer."""
        if memory is None:
            return anchor - self.lr * gradient
        memory.mul_(self.momentum).add_(gradient)
        return anchor - self.lr * (gradient + self.momentum * memory)


@dataclass
class OuterState:
    """State that exchanges keep from one to the next; empty where not needed."""

    anchor: Buckets = field(default_factory=list)
    """The weights after the last exchange."""
    momentum: Buckets = field(default_factory=list)
    """The outer optimizer's momentum."""
    residual: Buckets = field(default_factory=list)
    """Accumulated rounding errors, to be sent with the next exchange."""

    def named(self) -> dict[str, Buckets]:
        return {name: value for name, value in vars(self).items() if value}


class Exchange:
    """Computes exchanges, and holds the outer optimizer's state."""

    def __init__(
        self, config: ParallelConfig, workers: WorkerSet, layout: FlatLayout, *, seed: int
    ) -> None:
        self.layout, self.wanted, self.seed = layout, config.topology, seed
        self.outer = OuterStep.of(config)
        send = None if config.exchange is None else config.exchange
        density = DENSITY if send is None or send.density is None else send.density
        self.codec = build_codec("fp32" if send is None else send.send, density=density)
        self.enter(workers)
        complete = self.wanted == "complete"
        self.shares_anchor = complete and (self.codec.lossy or not self.outer.is_plain)
        """Whether all workers have the same anchor, so that differences to it can be sent."""
        self.restart()

    def restart(self) -> None:
        """Restart from the current weights."""
        self.state = OuterState()
        if self.shares_anchor or not self.outer.is_plain:
            self.state.anchor = self.layout.read()
        if self.outer.momentum:
            self.state.momentum = self.layout.zeros()
        if self.shares_anchor and self.codec.lossy:
            self.state.residual = self.layout.zeros()

    def enter(self, workers: WorkerSet) -> None:
        """From now on, exchange with these workers."""
        self.workers = workers
        self.transfer = Transfer(self.codec, workers.on_host, workers.interrupt)
        exact = build_codec("fp32", density=1.0)
        self.exact = Transfer(exact, workers.on_host, workers.interrupt)
        fit = topology_fits(self.wanted, workers=workers.count, per_node=workers.per_node)
        self.topology = self.wanted if fit else "random"
        """The topology, which may differ from the configured one while workers are missing."""

    def group_of(self, round: int) -> Members:
        """The group of this worker in a round, as indices of the workers that take part."""
        index = self.workers.index
        groups = groups_of_round(
            self.topology,
            workers=self.workers.count,
            per_node=self.workers.per_node,
            round=round,
            seed=self.seed,
        )
        return next(members for members in groups if index in members)

    def connect(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """The process group to exchange with, given indices of the workers that take part."""
        return self.workers.connect([self.workers.members[place] for place in members])

    @torch.no_grad()
    def run(self, weights: Buckets, *, round: int) -> tuple[Buckets, int]:
        """Exchange weights with the group of a round; returns those to continue from, which become
        the anchor, and the bytes that this process sent."""
        processes, sent = self.connect(self.group_of(round)), 0
        results = []
        for place, x in enumerate(weights):
            if self.shares_anchor:
                result, count = self._step_together(x, place, processes)
            else:
                result, count = self._mean(self._stepped(x, place), processes)
            results.append(result)
            sent += count
        if self.state.anchor:
            self.state.anchor = [result.clone() for result in results]
        return results, sent

    def _step_together(
        self, x: torch.Tensor, place: int, processes: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, int]:
        """An outer step along the mean of all outer gradients."""
        anchor, gradient, sent = self.state.anchor[place], self.state.anchor[place] - x, 0
        if self.state.residual:
            gradient += self.state.residual[place]
        if processes is not None:
            done = self.transfer.sum(gradient, processes, round_sum=True)
            if self.state.residual:
                self.state.residual[place] = gradient - done.own
            gradient, sent = done.total / processes.size(), done.sent
        elif self.state.residual:
            self.state.residual[place].zero_()
        memory = self.state.momentum[place] if self.state.momentum else None
        return self.outer.apply(anchor, gradient, memory), sent

    def _stepped(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """A worker's own outer step."""
        if self.outer.is_plain:
            return x
        anchor = self.state.anchor[place]
        memory = self.state.momentum[place] if self.state.momentum else None
        return self.outer.apply(anchor, anchor - x, memory)

    def _mean(
        self, x: torch.Tensor, processes: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, int]:
        """The mean over a group."""
        if processes is None:
            return x, 0
        done = self.transfer.sum(x, processes, round_sum=False)
        mean = 1 / processes.size() * done.total
        if self.codec.lossy:
            # This worker's own values are exact here, without the loss of the transfer.
            mean += x - done.own
        return mean, done.sent

    @torch.no_grad()
    def average(self, weights: Buckets, *, counts: bool = True) -> Buckets:
        """The exact mean over all workers for which it `counts`."""
        processes = self.connect(range(self.workers.count))
        if processes is None:
            return weights
        number = torch.tensor([float(counts)], device=weights[0].device)
        self.exact.all_reduce(number, processes)
        for weight in weights:
            if not counts:
                weight.zero_()
            self.exact.all_reduce(weight, processes).div_(number)
        return weights

    @torch.no_grad()
    def catch_up(self, *, counts: bool) -> None:
        """Give joining workers the average weights and outer state of those for which it `counts`.
        A common anchor becomes common again."""
        average = self.average(self.layout.read(), counts=counts)
        if not counts:
            self.layout.write(average)
        for kind, held in self.state.named().items():
            average = self.average([one.clone() for one in held], counts=counts)
            if kind == "residual":
                average = [torch.zeros_like(one) for one in average]
            if not counts or (self.shares_anchor and kind != "residual"):
                setattr(self.state, kind, average)

    def views(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """The state by kind and parameter."""
        return {kind: self.layout.views(held) for kind, held in self.state.named().items()}
