"""K-FAC over the processes of a run, which `plan/preconditioner.py` assigns to layers.

In a step, after the gradients of all micro-batches are summed and found to be finite:

    factors        every `factor_every` steps, the second moments of all processes are summed up on
                   the process that keeps a layer's factors
    inverses       every `inverse_every` steps, it inverts them and sends the result to the others
                   that precondition the layer's gradient
    precondition   those gather the gradient as far as they have only a shard of it, and send every
                   process its part of the result
    KL clip        all preconditioned gradients are scaled by the same number

Before the first finite step there are no factors; until then they are collected in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.optim import KfacConfig
from gristmill.distributed.world import World
from gristmill.models.spec import (
    CausalLM,
    ShardComm,
    block_linears,
    is_transposed,
    linear_shapes,
)
from gristmill.optim.factors import side_by_side
from gristmill.optim.kfac import (
    FACTOR,
    KfacLayer,
    LayerCurvature,
    StepSettings,
    inverse_kinds,
)
from gristmill.optim.spec import Placement, StateEntry
from gristmill.plan.preconditioner import assign_layers, kfac_inversion
from gristmill.strategies.data_parallel import BUCKET, buckets, views_of
from gristmill.strategies.matrix_exchange import ShardedMatrixExchange, stage_ranks
from gristmill.strategies.sharding import ShardedParameters, ShardLayout
from gristmill.strategies.strategy import StepStatistics

UPDATES = "factor_updates"
"""How often the factors were updated, stored with the weight of each layer."""


class Kfac:
    """Preconditions the gradients of linear layers."""

    def __init__(
        self,
        config: KfacConfig,
        layers: Mapping[str, KfacLayer],
        *,
        statistics: LayerStatistics,
        layout: ShardLayout,
        world: World,
    ) -> None:
        self.config, self.layers, self.statistics, self.world = config, layers, statistics, world
        self.ranks, device = stage_ranks(world), world.device.torch_device
        costs = {name: kfac_inversion(config, layer.shape) for name, layer in layers.items()}
        self.work = assign_layers(costs, self.ranks, fraction=config.worker_fraction)
        self.curvatures = {
            name: LayerCurvature(layer, config)
            for name, layer in layers.items()
            if world.rank in self.work[name].preconditions
        }
        """The curvatures of the layers that this process preconditions."""
        for name, curvature in self.curvatures.items():
            curvature.allocate(device, factors=self._inverts(name))
        self.exchange = None
        self.group = world.groups.of(self.ranks)
        if self.group is not None:
            workers = {
                parameter: self.work[name].preconditions
                for name, layer in layers.items()
                for parameter in layer.parameters
            }
            self.exchange = ShardedMatrixExchange(
                layout, world, names=list(workers), workers=workers
            )
        self._everyone = world.groups.along(*world.mesh.sizes)
        self.updates = torch.zeros((), device=device)
        self._known = dict.fromkeys((layer.parameters[0] for layer in layers.values()), False)
        """Whether it is known that a weight's factors were updated."""
        self._settings = StepSettings(0.0, 0.0, 0.0)
        self._collecting = self._inverting = False

    def _inverts(self, name: str) -> bool:
        return self.work[name].inverts == self.world.rank

    @property
    def ready(self) -> bool:
        """Whether there are factors."""
        return all(self._known.values())

    # -------------------------------------------------------------- a step

    def begin(self, progress: Progress) -> None:
        config, done = self.config, progress.steps
        scheduled = (config.damping, config.decay, config.kl_clip)
        self._settings = StepSettings(*(one.at(progress) for one in scheduled))
        first = not self.ready
        if first:
            self.updates.zero_()
        self._collecting = first or done % config.factor_every.at(progress) == 0
        self._inverting = first or done % config.inverse_every.at(progress) == 0
        self.statistics.switch(self._collecting)

    @torch.no_grad()
    def apply(self, parameters: ShardedParameters, step: StepStatistics) -> None:
        self.statistics.switch(False)
        if self._collecting:
            self._update_factors(step)
        if not self.ready:
            # This waits for the device, but only until the first finite step, usually the very
            # first.
            self._known = dict.fromkeys(self._known, not step.skip.item())
            if not self.ready:
                return
        if self._inverting:
            self._update_inverses()
        self._precondition(parameters, step.lr)

    def _update_factors(self, step: StepStatistics) -> None:
        taken = self.statistics.take()
        samples = {name: self._means(sums, step) for name, sums in taken.items()}
        if self.group is not None:
            for rank in self.ranks:
                theirs = [name for name, work in self.work.items() if work.inverts == rank]
                self._sum_on(rank, [sample for name in theirs for sample in samples[name]])
        for name, curvature in self.curvatures.items():
            if self._inverts(name):
                curvature.advance(
                    samples[name],
                    decay=self._settings.decay,
                    updates=self.updates,
                    skip=step.skip,
                )
        self.updates += 1 - step.skip

    def _means(self, sums: LayerSums, step: StepStatistics) -> list[torch.Tensor]:
        """This process's share of the mean second moments, computed in place."""
        gradients = step.loss_tokens
        if step.loss_scale is not None:
            gradients = gradients / step.loss_scale**2
        inputs = sums.inputs.mul_(1 / (step.positions * sums.input_copies))
        return [inputs, *(output.mul_(gradients / sums.output_copies) for output in sums.outputs)]

    def _sum_on(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over the processes of the stage, in place on one of them."""
        for bucket in buckets(tensors):
            flat = torch.cat([one.reshape(-1) for one in bucket])
            dist.reduce(flat, group=self.group, group_dst=self.ranks.index(rank))
            if rank == self.world.rank:
                for one, part in zip(bucket, views_of(flat, bucket), strict=True):
                    one.copy_(part)

    def _update_inverses(self) -> None:
        mine = [
            (curvature, number)
            for name, curvature in self.curvatures.items()
            if self._inverts(name)
            for number in range(len(curvature.factors))
        ]
        mine.sort(key=lambda one: -one[0].sizes[one[1]])
        side_by_side(
            [partial(one.invert_factor, number, self._settings) for one, number in mine],
            self.updates.device,
        )
        for name, curvature in self.curvatures.items():
            work = self.work[name]
            group = self.world.groups.of(list(work.preconditions))
            if group is not None:
                source = work.preconditions.index(work.inverts)
                for inverse in curvature.inverses:
                    for tensor in inverse:
                        dist.broadcast(tensor, group=group, group_src=source)

    def _precondition(self, parameters: ShardedParameters, lr: float) -> None:
        new: dict[str, torch.Tensor] = {}
        for layers in _chunks(list(self.layers.values())):
            new |= self._preconditioned(parameters, layers)
        products = torch.zeros((), device=self.updates.device)
        for name, gradient in new.items():
            old = parameters[name].local.grad
            if parameters[name].owned and old is not None:
                products += (gradient * old).sum()
        if self._settings.kl_clip:
            if self._everyone is not None:
                dist.all_reduce(products, group=self._everyone)
            limit = (self._settings.kl_clip / (lr * lr * products.abs())).sqrt().clamp(max=1.0)
            for gradient in new.values():
                gradient.mul_(limit)
        for name, gradient in new.items():
            old = parameters[name].local.grad
            if old is not None:
                old.copy_(gradient)

    def _preconditioned(
        self, parameters: ShardedParameters, layers: Sequence[KfacLayer]
    ) -> dict[str, torch.Tensor]:
        """This process's shards of the preconditioned gradients of some layers, by parameter."""
        names = [name for layer in layers for name in layer.parameters]
        local = [_gradient(parameters, name) for name in names]
        places = {name: place for place, name in enumerate(names)}
        whole = dict(enumerate(local))
        if self.exchange is not None:
            whole = self.exchange.gather(names, local)
        done: dict[int, torch.Tensor] = {}
        for layer in layers:
            if layer.name in self.curvatures:
                its = [places[name] for name in layer.parameters]
                matrix = layer.join([whole[place] for place in its])
                result = self.curvatures[layer.name].precondition(matrix, self._settings)
                done |= zip(its, layer.separate(result), strict=True)
        shards = list(done.values())
        if self.exchange is not None:
            shards = self.exchange.scatter(names, done, [])
        return dict(zip(names, shards, strict=True))

    # -------------------------------------------------------------- checkpoints

    @property
    def placements(self) -> Mapping[str, Placement]:
        kinds = (FACTOR, *inverse_kinds(self.config))
        return {UPDATES: Placement.REPLICATED, **dict.fromkeys(kinds, Placement.ASSIGNED)}

    def entries(self) -> Iterator[StateEntry]:
        for name in self._known:
            yield StateEntry(UPDATES, name, self.updates)
        for name, curvature in self.curvatures.items():
            if self._inverts(name):
                yield from (StateEntry(*tensor) for tensor in curvature.tensors())

    def expects(self, kind: str, key: str) -> bool:
        if kind == UPDATES:
            return key in self._known
        name = key.rpartition(".")[0]
        held = name in self.curvatures and kind in self.placements
        return held and (kind != FACTOR or self._inverts(name))

    def load_entry(self, entry: StateEntry) -> None:
        kind, key, value = entry
        if kind == UPDATES:
            self.updates.copy_(value)
            self._known[key] = bool(value > 0)
        else:
            self.curvatures[key.rpartition(".")[0]].load(kind, key, value)


def build_kfac(config: KfacConfig, model: CausalLM, world: World) -> Kfac:
    """K-FAC for the linear layers in the blocks of a placed model."""
    layers = kfac_layers(config, model)
    return Kfac(
        config,
        layers,
        statistics=LayerStatistics(
            model,
            {name: layer.shape.parts for name, layer in layers.items()},
            outputs=config.sides == "both",
        ),
        layout=ShardLayout.of(model, world.mesh),
        world=world,
    )


def kfac_layers(config: KfacConfig, model: CausalLM) -> dict[str, KfacLayer]:
    """The layers of a model whose gradients are preconditioned, with the sizes of the whole."""
    shapes, modules = linear_shapes(model), block_linears(model)
    if broken := list(config.problems(shapes)):
        raise UserError(broken)
    return {
        name: KfacLayer(name, shape, is_transposed(modules[name]))
        for name, shape in shapes.items()
        if config.chosen(name)
    }


def _gradient(parameters: ShardedParameters, name: str) -> torch.Tensor:
    local = parameters[name].local
    return torch.zeros_like(local) if local.grad is None else local.grad.float()


def _chunks(layers: Sequence[KfacLayer]) -> Iterator[Sequence[KfacLayer]]:
    """Layers whose gradients are gathered at once."""
    size = max(1, BUCKET // max(layer.shape.inputs * layer.shape.outputs for layer in layers))
    return (layers[begin : begin + size] for begin in range(0, len(layers), size))


# ------------------------------------------------------------------ second moments
#
# Second moments of what flows through linear layers, collected in the backward pass. For a layer
# y = W x + b and the gradient g of the loss with respect to y, sums over all positions of
#
#     inputs    (x, 1) (x, 1)^T        the 1 only if the layer has a bias
#     outputs   g_p g_p^T              for each matrix p that is stacked in W
#
# are collected as the gradients of dummy tensors that nothing is computed from. So they add up over
# micro-batches as the gradients of weights do, a forward pass that is repeated in the backward pass
# counts once, and the compiler treats them as any other gradient. All sums are in fp32.
#
# Where features are sharded over tp, those of all ranks are gathered first: every rank has the sums
# of the whole layer.

COLUMNS, ROWS = 0, 1
"""The dimension of a weight that tp divides: its outputs (column-parallel) or its inputs."""


@dataclass(frozen=True)
class LayerSums:
    """The sums of one layer over a step."""

    inputs: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    """One for each stacked matrix; none if they are not collected."""
    input_copies: int = 1
    """How many ranks of a tp group have counted the same positions."""
    output_copies: int = 1


class LayerStatistics:
    """Collects the sums of some layers of a model while switched on."""

    def __init__(
        self, model: CausalLM, layers: Mapping[str, tuple[int, ...]], *, outputs: bool
    ) -> None:
        """`layers`: by module name, with the rows of the matrices stacked in the whole weight."""
        self._modules: dict[str, Any] = {}
        splits, shapes = model.splits(), model.whole_shapes()
        for name, parts in layers.items():
            module: Any = model.get_submodule(name)
            split, shape = splits.get(f"{name}.weight"), shapes[f"{name}.weight"]
            inputs = sum(shape) - sum(parts) + (module.bias is not None)
            module.statistics_on = False
            module.statistics_split = None if split is None else split.dim
            module.statistics_comm = model.comm
            module.statistics_inputs = _leaf(inputs, model.device)
            module.statistics_outputs = tuple(
                _leaf(part, model.device) for part in (parts if outputs else ())
            )
            module.register_forward_hook(_collect)
            self._modules[name] = module

    def switch(self, on: bool) -> None:
        """Switch collection on or off for the passes that follow. A compiled model has a graph for
        each."""
        for module in self._modules.values():
            module.statistics_on = on

    def take(self) -> dict[str, LayerSums]:
        """The sums since the last call; zeros for a layer that had no gradient."""
        return {name: _taken(module) for name, module in self._modules.items()}


def _leaf(size: int, device: torch.device) -> torch.Tensor:
    """A tensor whose gradient will have this size, and which takes no memory itself."""
    return torch.zeros((), device=device).expand(size, size).requires_grad_()


def _taken(module: Any) -> LayerSums:
    leaves = (module.statistics_inputs, *module.statistics_outputs)
    sums = [
        torch.zeros_like(leaf).contiguous() if leaf.grad is None else leaf.grad for leaf in leaves
    ]
    for leaf in leaves:
        leaf.grad = None
    comm: ShardComm = module.statistics_comm
    copies = comm.shards
    by_position = comm.sequence_parallel and module.statistics_split == ROWS
    return LayerSums(sums[0], tuple(sums[1:]), copies, 1 if by_position else copies)


def _collect(module: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    if not module.statistics_on or not torch.is_grad_enabled():
        return output
    options = _Options(module.bias is not None, module.statistics_split, module.statistics_comm)
    leaves = module.statistics_inputs, *module.statistics_outputs
    return _SecondMoments.apply(inputs[0], output, options, *leaves)


@dataclass(frozen=True)
class _Options:
    biased: bool
    split: int | None
    comm: ShardComm


class _SecondMoments(torch.autograd.Function):
    """The output as it is; its backward pass gives the sums as gradients of the leaves."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, options: _Options, *leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.options, ctx.sizes = options, [leaf.shape[0] for leaf in leaves[1:]]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), options = ctx.saved_tensors, ctx.options
        comm, shards = options.comm, options.comm.shards
        with torch.autocast(x.device.type, enabled=False):
            rows_NF = x.flatten(0, -2)
            if options.split == ROWS:
                rows_NF = comm.gather_features(rows_NF)
            if options.biased:
                rows_NF = torch.cat([rows_NF, rows_NF.new_ones(rows_NF.shape[0], 1)], dim=1)
            sums = [_products(rows_NF)]
            divided = options.split == COLUMNS
            sizes = [size // shards for size in ctx.sizes] if divided else ctx.sizes
            parts = gradients[0].flatten(0, -2).split(sizes, dim=1) if sizes else ()
            for part_NF in parts:
                sums.append(_products(comm.gather_features(part_NF) if divided else part_NF))
        return None, gradients[0], None, *sums


def _products(x_NF: torch.Tensor) -> torch.Tensor:
    """The sum of x x^T over rows, in fp32. Products of half precision are exact in it."""
    if x_NF.is_cuda and x_NF.dtype is not torch.float32:
        return torch.mm(x_NF.T, x_NF, out_dtype=torch.float32)
    x_NF = x_NF.float()
    return x_NF.T @ x_NF
