"""Second moments of what flows through linear layers, collected in the backward pass.

For a layer y = W x + b and the gradient g of the loss with respect to y, sums over all positions of

    inputs    (x, 1) (x, 1)^T        the 1 only if the layer has a bias
    outputs   g_p g_p^T              for each matrix p that is stacked in W

are collected as the gradients of tensors that nothing is computed from. So they add up over
micro-batches as the gradients of weights do, a forward pass that is repeated in the backward pass
counts once, and the compiler treats them as any other gradient. All sums are in fp32.

Where features are sharded over tp, those of all ranks are gathered first: every rank has the sums
of the whole layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.models.spec import CausalLM, ShardComm

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
    """Collects the sums of some layers of a model while it is switched on."""

    def __init__(
        self, model: CausalLM, layers: Mapping[str, tuple[int, ...]], *, outputs: bool
    ) -> None:
        """`layers`: by module name, with the rows of the matrices stacked in the whole weight."""
        self._modules: dict[str, Any] = {}
        for name, parts in layers.items():
            module: Any = model.get_submodule(name)
            split = model.splits().get(f"{name}.weight")
            shape = model.whole_shape(f"{name}.weight")
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
        """Collect in the forward and backward passes that follow, or no longer. A compiled model
        has a graph for either."""
        for module in self._modules.values():
            module.statistics_on = on

    def take(self) -> dict[str, LayerSums]:
        """The sums since they were last taken; of a layer that had no gradient, zeros."""
        return {name: _taken(module) for name, module in self._modules.items()}


def _leaf(size: int, device: torch.device) -> torch.Tensor:
    """A tensor whose gradient will have this size, and which takes no memory itself."""
    return torch.zeros((), device=device).expand(size, size).requires_grad_()


def _taken(module: Any) -> LayerSums:
    leaves = (module.statistics_inputs, *module.statistics_outputs)
    sums = [torch.zeros_like(one).contiguous() if one.grad is None else one.grad for one in leaves]
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
        ctx.options, ctx.sizes = options, [one.shape[0] for one in leaves[1:]]
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
