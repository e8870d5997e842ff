"""Low-rank adapters (LoRA) beside the linear layers of any model, added from outside.

    y = W x + b + scale B A dropout(x)       NAME.weight  NAME.bias    as they were, frozen
                                             NAME.lora_a  NAME.lora_b  trained

A model keeps its modules and the names of its parameters. A forward hook of each adapted layer adds
the product, so blocks, wrappers and the compiler treat an adapted model as any other. B starts at
0, so an adapted model starts as its base.

W + scale B A is a weight like any other: merged weights are what everything else in this program
reads of such a run. The product is computed in float64, in blocks of rows that depend on the shape
only, and rounded once after it is added. So the bits of a merged weight do not depend on which
regions of it are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gristmill.base.errors import UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.lora import LoraConfig
from gristmill.models.counter_rng import fill_uniform
from gristmill.models.spec import (
    ADAPTER_PARTS,
    CausalLM,
    block_linears,
    is_transposed,
    linear_shapes,
)
from gristmill.models.weights import TensorParts, Weights

A, B = ADAPTER_PARTS
_BLOCK = 2**22
"""Elements of a product that are computed at once."""


def add_adapters(model: CausalLM, lora: LoraConfig) -> None:
    """Freeze a model on the meta device, and add an adapter to each of the chosen layers."""
    layers, shapes = block_linears(model), linear_shapes(model)
    if broken := list(lora.problems(shapes)):
        raise UserError(broken)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in layers.items():
        if lora.chosen(name):
            shape = shapes[name]
            module.register_parameter(A, nn.Parameter(torch.empty(lora.rank, shape.inputs)))
            module.register_parameter(B, nn.Parameter(torch.empty(shape.outputs, lora.rank)))
            module.lora_scale, module.lora_dropout = lora.scale, lora.dropout  # type: ignore[assignment]
            module.register_forward_hook(_add_product)
            model.adapters[name] = is_transposed(module)


def draw_adapters(model: CausalLM, seed: int, names: Iterable[str]) -> None:
    """Draw A, uniform with variance 1 / (3 inputs), and set B to 0. Both depend only on the seed
    and the name."""
    for name in names:
        layer, _, part = name.rpartition(".")
        if layer not in model.adapters or part not in ADAPTER_PARTS:
            continue
        parameter = model.get_parameter(name)
        with torch.no_grad():
            if part == B:
                parameter.zero_()
            else:
                bound = 1 / math.sqrt(parameter.shape[1])
                fill_uniform(parameter, -bound, bound, seed=seed, name=name)


def keep_frozen_in(model: CausalLM, dtype: torch.dtype) -> None:
    """Hold the frozen weights of a model on the meta device in the dtype of its activations: half
    the memory, and the same bits for a model whose layers cast weights to that dtype anyway."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _add_product(module: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    x = inputs[0]
    if module.training and module.lora_dropout:
        x = functional.dropout(x, module.lora_dropout)
    inner = functional.linear(x, module.lora_a.to(x.dtype)) * module.lora_scale
    return output + functional.linear(inner, module.lora_b.to(inner.dtype))


class MergedWeights(Weights):
    """Weights with the products of their adapters added."""

    def __init__(
        self, base: Weights, adapters: Weights, *, layers: Mapping[str, bool], scale: float
    ) -> None:
        """`layers`: those with adapters, and whether their weight is transposed."""
        self.base, self.adapters, self.layers, self.scale = base, adapters, layers, scale
        self.where, self.shapes = adapters.where, base.shapes

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        layer, _, part = name.rpartition(".")
        if part != "weight" or layer not in self.layers:
            yield from self.base.parts(name, region)
            return
        transposed = self.layers[layer]
        place = region.transposed if transposed else region
        a, b = (self.adapters.read(f"{layer}.{one}", dtype=torch.float64) for one in ADAPTER_PARTS)
        rows = max(1, _BLOCK // a.shape[1])
        for first in range(place.begin[0] // rows * rows, place.end[0], rows):
            last = min(first + rows, b.shape[0])
            block = TensorSlice((first, 0), (last, a.shape[1]))
            common = place.intersect(block)
            if common is None:
                continue
            product = (b[first:last].clone() @ a).mul_(self.scale)[common.relative_to(block).slices]
            where = common.transposed if transposed else common
            value = self.base.read(name, where, dtype=torch.float64)
            value += product.T if transposed else product
            yield where, value.float()
