"""A step that all processes make together, however the model and the batch are divided.

The loss is the sum over all counted tokens of the step divided by their number, so gradients of all
processes are summed and nothing is averaged. The global norm n, the clipping limit c and the loss
scale s meet in one factor: gradients are divided by s max(1, n / c) inside the fused optimizer
kernel, which also leaves everything untouched when the norm is not finite. Loss and norm are summed
over all processes in one exchange, so all of them decide alike. No step waits for the host, unless
the optimizer is there.

Dropout draws from a generator seeded anew for every step by the run's seed, the step's number and
the place in the mesh, so there is no random state to save.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from gristmill.base.units import Progress
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.models.gpt import GPT
from gristmill.optim.build import decide_step
from gristmill.parallel.context import positions_of, share_of_sequence
from gristmill.parallel.council import Council
from gristmill.parallel.flow import Flow
from gristmill.parallel.gather import gather_model
from gristmill.parallel.held import owned_squares
from gristmill.parallel.offload import Offload
from gristmill.parallel.precision import Precision
from gristmill.parallel.replicas import Replicas, sum_together
from gristmill.parallel.strategy import StepResult
from gristmill.parallel.waiting import Waiting
from gristmill.parallel.world import World


class Spmd:
    """Runs steps of one model on all processes."""

    def __init__(
        self,
        config: RunConfig,
        *,
        replicas: Replicas,
        flow: Flow,
        optimizer: torch.optim.Optimizer,
        world: World,
        council: Council,
        offload: Offload | None = None,
    ) -> None:
        self.replicas, self.flow, self.optimizer = replicas, flow, optimizer
        self.offload = offload
        self.world, self.council = world, council
        self.clip, self.seed = config.train.clip, config.train.seed
        self.loss_scale = Precision(config.precision, world.device).loss_scale()
        self.model: GPT = replicas.model
        self._everyone = world.groups.along(*world.mesh.sizes)
        self._waiting: Waiting | None = None
        at, tensor = world.at, world.groups.along("tp")
        # Processes that share layers compute the same loss: one of them reports it.
        self._reports = self.model.portion.last and at["tp"] == 0
        self._sums = [(self._held(self.model.partial(sequence=self.model.links.sequence)), tensor)]
        self._sums.append((self._held(["embedding.weight"]), _ends(self.model, world)))

    def _held(self, names: Iterable[str]) -> list[torch.nn.Parameter]:
        held = self.replicas.held
        return [held[name].local for name in names if name in held]

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult:
        """Gradients of the mean loss over all counted tokens of the step."""
        self._waiting = None if self._everyone is None else Waiting(self.world.device)
        done = None if self._waiting is None else self._waiting.done
        self.model.train()
        if self.model.config.dropout:
            torch.manual_seed(self._step_seed(progress.steps))
        counted = self._counted(batches)
        scale = 1.0 / counted
        if self.loss_scale is not None:
            scale = scale * self.loss_scale.scale
        total = self.flow.train([self._share(batch) for batch in batches], scale, done)
        parts = self.world.mesh.data
        return StepResult(
            samples=parts * sum(batch.samples for batch in batches),
            tokens=parts * sum(batch.tokens for batch in batches),
            loss=total / counted,
            loss_scale=None if self.loss_scale is None else self.loss_scale.scale,
        )

    @record_function("gristmill::update")
    def update(self, result: StepResult, *, stop: bool = False) -> StepResult:
        """Clip and step, or skip where the gradient is not finite."""
        self.replicas.settle()
        for parameters, group in self._sums:
            if group is not None:
                sum_together([p.grad for p in parameters if p.grad is not None], group)
        loss, squares, stops = self._agreed(result.loss, owned_squares(self.replicas.held), stop)
        waited = None if self._waiting is None else self._waiting.end()
        scale = result.loss_scale if result.loss_scale is not None else torch.ones_like(loss)
        norm = squares.sqrt() / scale
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
        excess = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        divisor, skip = scale * torch.where(bad, 1.0, excess), bad.float()
        if self.offload is not None:
            self.offload.step(self.optimizer, divisor=divisor, skip=skip)
        else:
            decide_step(self.optimizer, divisor=divisor, skip=skip)
            self.optimizer.step()
        self.replicas.clear()
        if self.loss_scale is not None:
            self.loss_scale.update(bad)
        return dataclasses.replace(
            result,
            loss=loss,
            grad_norm=norm,
            skipped=bad.float(),
            stops=stops,
            waited=waited,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the counted tokens of all batches."""
        self.model.eval()
        counted = 0.0

        def mine() -> Iterator[Batch]:
            nonlocal counted
            for batch in self._divided(batches):
                counted += batch.counted
                yield self._share(batch)

        total = self.flow.measure(mine()).item()
        # Processes with parts of one sequence have their own losses, but all count its tokens.
        own = [total, counted / self.world.mesh.cp] if self._reports else [0.0, 0.0]
        said = self.council.gather(own)
        return sum(one[0] for one in said) / sum(one[1] for one in said)

    def whole(self) -> GPT | None:
        """All of the model on the first process."""
        if self._everyone is None:
            return self.model
        return gather_model(self.replicas, self.world, self.council)

    def state(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}

    def load(self, state: dict[str, Any]) -> None:
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])
        if self.offload is not None:
            self.offload.send_weights()

    # -------------------------------------------------------------- what is this process's

    def _divided(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Every n-th batch is this process's. Where one is missing or smaller than the others of
        its turn, samples that do not count fill it up, so that all processes do the same work
        together."""
        source, parts = iter(batches), self.world.mesh.data
        while turn := list(islice(source, parts)):
            sizes = [batch.samples for batch in turn] + [0] * (parts - len(turn))
            mine = turn[min(self.world.data_rank, len(turn) - 1)]
            count = sizes[self.world.data_rank]
            yield mine if len(set(sizes)) == 1 else _filled(mine, count, max(sizes))

    def _share(self, batch: Batch) -> Batch:
        """This process's part of the sequences of a batch, on its device."""
        parts, rank = self.world.mesh.cp, self.world.at["cp"]
        if parts > 1:
            length = batch.tokens_BT.shape[1]
            positions = batch.positions_BT
            own: dict[str, Any] = {
                field: share_of_sequence(getattr(batch, field), 1, rank=rank, ranks=parts)
                for field in ("tokens_BT", "targets_BT", "weights_BT", "documents_BT")
                if getattr(batch, field) is not None
            }
            own["positions_BT"] = (
                positions_of(rank, parts, length, torch.device("cpu")).expand(batch.samples, -1)
                if positions is None
                else share_of_sequence(positions, 1, rank=rank, ranks=parts)
            )
            batch = dataclasses.replace(batch, **own)
        return batch.to(self.world.device)

    def _counted(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Tokens that count in the step, over all processes."""
        counted = sum(batch.counted for batch in batches)
        group = self.world.groups.along("dp_replicate", "dp_shard")
        if all(batch.weights_BT is None for batch in batches):
            counted, group = counted * self.world.mesh.data, None
        tensor = torch.full((), counted, device=self.world.device)
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _agreed(
        self, loss: torch.Tensor, squares: torch.Tensor, stop: bool
    ) -> tuple[torch.Tensor, ...]:
        """Loss, squared norm and wishes to stop over all processes."""
        stops = torch.full_like(loss, stop)
        if self._everyone is None:
            return loss, squares, stops
        own = loss if self._reports else torch.zeros_like(loss)
        numbers = torch.stack([own, squares, stops])
        dist.all_reduce(numbers, group=self._everyone)
        return tuple(numbers)

    def _step_seed(self, step: int) -> int:
        at = self.world.at
        shared = ("dp_replicate", "dp_shard", "cp", "pp")
        place = [at[axis] for axis in shared] + [at["tp"] if self.model.links.sequence else 0]
        own = f":{place}" if any(place) else ""
        digest = hashlib.sha256(f"{self.seed}:step:{step}{own}".encode()).digest()
        return int.from_bytes(digest[:7], "little")


def _filled(batch: Batch, count: int, size: int) -> Batch:
    """The first samples of a batch, and so many that do not count that there are `size`."""
    which = [min(number, max(count, 1) - 1) for number in range(size)]

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[which]

    weights = batch.weights_BT
    if weights is None:
        weights = torch.ones(batch.tokens_BT.shape)
    weights = weights[which].clone()
    weights[count:] = 0.0
    return Batch(
        batch.tokens_BT[which],
        batch.targets_BT[which],
        weights,
        batch.counted if count else 0.0,
        rows(batch.positions_BT),
        rows(batch.documents_BT),
    )


def _ends(model: GPT, world: World) -> dist.ProcessGroup | None:
    """First and last process of a pipeline whose ends have one embedding in common."""
    stages, portion = world.groups.mesh.group(world.rank, "pp"), model.portion
    apart = portion.first != portion.last
    if len(stages) == 1 or not model.config.tie_head or not apart:
        return None
    return world.groups.of([stages[0], stages[-1]])
