"""Pipeline parallelism: stages of layers on several ranks, through which micro-batches pass.

    stages of each rank        pp 2, one each: 0 | 1        two each: 0 2 | 1 3

torch's schedules decide which stage computes when, and send the residual stream from stage to
stage. Every rank reads the batches itself, so nothing else is sent. The last stage computes the
losses, and with them the first gradients.

Micro-batches of one step have equal shapes. A schedule is built for a number of micro-batches and
cached; a run with a growing batch needs several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.profiler import record_function

from gristmill.config.parallel import ParallelConfig
from gristmill.data.loader import Batch
from gristmill.distributed.world import World
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms
from gristmill.models.spec import CausalLM, Loss, StagedModel
from gristmill.strategies.sharding import stage_layers
from gristmill.strategies.spmd import sum_at_end

_SINGLE: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, Callable[..., Any]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
_FIELDS = (
    *("tokens_BT", "targets_BT", "loss_weights_BT", "positions_BT", "documents_BT"),
    "sources_B",
)


class StageModule(nn.Module):
    """Some layers of a model as a module, with the embedding before or the loss after them."""

    def __init__(self, model: StagedModel, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self._model, self.layers, self.first, self.last = [model], layers, first, last
        self.terms = PLAIN_LOSS
        self.totals: list[torch.Tensor] = []
        # Registered so that FSDP finds them.
        self.inner = nn.ModuleDict(model.stage_modules(layers, first=first, last=last))

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        loss_weights_BT: torch.Tensor | None = None,
        sources_B: torch.Tensor | None = None,
        **batch: torch.Tensor,
    ) -> torch.Tensor:
        """The residual stream after these layers, or the loss. `hidden_BTD` is the output of the
        stage before or, in the first stage, the tokens."""
        terms = self.terms._replace(
            loss_weights_BT=loss_weights_BT, sources_B=sources_B if self.terms.sources else None
        )
        result = self._model[0].forward_stage(
            hidden_BTD, self.layers, first=self.first, last=self.last, terms=terms, **batch
        )
        if isinstance(result, Loss):
            self.totals.append(result.total)
            return result.scaled.view(1).clone()
        return result


class _Stage(PipelineStage):
    """Keeps the graph of a micro-batch until the second half of its backward pass is done, where a
    schedule has two. Torch releases it after the first; the second would then fail on Python
    autograd functions, such as products with a custom backward pass, that no longer exist."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._graphs: dict[int, list[Any]] = {}

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> Any:
        if not full_backward:
            outputs = [*self.fwd_cache[bwd_chunk_id][0], *([] if loss is None else [loss])]
            with torch.enable_grad():
                self._graphs[bwd_chunk_id] = [
                    each.view_as(each).grad_fn for each in outputs if each.requires_grad
                ]
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> Any:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)


class PipelineMicroBatches:
    """Micro-batches through the stages of all ranks."""

    def __init__(
        self,
        model: CausalLM,
        stages: Sequence[StageModule],
        world: World,
        *,
        config: ParallelConfig,
    ) -> None:
        group = world.groups.along("pp")
        assert group is not None
        self.model, self.stages, self.world, self.config = model, stages, world, config
        self.group: dist.ProcessGroup = group
        self._schedules: dict[Any, Any] = {}

    def forward_backward(
        self, batches: Sequence[Batch], terms: LossTerms, done: Callable[[], None] | None = None
    ) -> torch.Tensor:
        with record_function("gristmill::pipeline"):
            losses = self._run(batches, terms, "step")
        if done is not None:
            done()
        assert terms.scale is not None
        return sum(losses, torch.zeros(terms.totals, device=terms.scale.device))

    def forward(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Forward only, as many batches at a time as keep all stages busy."""

        def losses() -> Iterator[torch.Tensor]:
            for several in _alike(batches, 4 * self.world.mesh.pp):
                # Schedules need a multiple of pp: the batches added as padding are not counted.
                added = -len(several) % self.world.mesh.pp
                totals = self._run([*several, *several[:1] * added], PLAIN_LOSS, "eval")
                yield from totals[: len(several)]

        return sum_at_end(losses())

    def _run(self, batches: Sequence[Batch], terms: LossTerms, verb: str) -> list[torch.Tensor]:
        """Run a schedule; returns the losses that this rank computed, one for each batch."""
        given = {
            name: torch.cat([getattr(batch, name) for batch in batches])
            for name in _FIELDS
            if getattr(batches[0], name) is not None
        }
        for stage in self.stages:
            stage.terms, stage.totals = terms, []
        args = (given["tokens_BT"],) if self.model.shard.first else ()
        target = given["targets_BT"] if self.model.shard.last else None
        schedule = self._schedule(batches, verb)
        run = schedule.step if verb == "step" else schedule.eval
        run(*args, target=target, **given)
        return [total for stage in self.stages for total in stage.totals]

    def _schedule(self, batches: Sequence[Batch], verb: str) -> Any:
        shape = tuple(batches[0].tokens_BT.shape)
        key = (len(batches), shape, verb)
        if key not in self._schedules:
            stages = self._torch_stages(shape)
            kind = self.config.schedule or "1f1b"
            forward_only = verb == "eval"
            options: dict[str, Any] = {"n_microbatches": len(batches), "scale_grads": False}
            if not forward_only or kind in _SEVERAL:
                # The last stage returns the loss itself.
                options["loss_fn"] = lambda output, target: output.sum()
            if kind in _SEVERAL:
                self._schedules[key] = _SEVERAL[kind](stages, **options)
            else:
                schedule = ScheduleGPipe if forward_only else _SINGLE[kind]
                self._schedules[key] = schedule(stages[0], **options)
        return self._schedules[key]

    def _torch_stages(self, shape: tuple[int, ...]) -> list[PipelineStage]:
        pp = self.world.mesh.pp
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        hidden = cast(StagedModel, self.model).stage_hidden(*shape)
        return [
            _Stage(
                stage,
                self.world.at["pp"] + number * pp,
                pp * self.config.stages_each,
                self.world.device.torch_device,
                input_args=(tokens if stage.first else hidden,),
                output_args=torch.empty(1, device="meta") if stage.last else hidden,
                group=self.group,
            )
            for number, stage in enumerate(self.stages)
        ]


def _alike(batches: Iterable[Batch], most: int) -> Iterator[list[Batch]]:
    """Consecutive batches of equal shape and fields, at most `most` at a time."""

    def kind(batch: Batch) -> tuple[Any, ...]:
        return (batch.tokens_BT.shape, *(getattr(batch, name) is None for name in _FIELDS))

    for _, group in itertools.groupby(batches, kind):
        while several := list(itertools.islice(group, most)):
            yield several


def build_stages(
    config: ParallelConfig, model: CausalLM, world: World, *, layers: int
) -> list[StageModule]:
    """The stages of this rank, over the modules of its part of the model."""
    shard = model.shard
    mine = stage_layers(config, world.mesh, layers=layers, rank=world.at["pp"])
    return [
        StageModule(
            cast(StagedModel, model),
            layers,
            first=shard.first and layers is mine[0],
            last=shard.last and layers is mine[-1],
        )
        for layers in mine
    ]
