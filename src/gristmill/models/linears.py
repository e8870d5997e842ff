"""The linear layers inside the blocks of any model, by name."""

from __future__ import annotations

import torch
from torch import nn

from gristmill.config.roles import Role
from gristmill.models.spec import CausalLM


def block_linears(model: CausalLM) -> dict[str, nn.Module]:
    """The linear layers of the blocks, without the small ones that are gates."""
    roles, found = model.roles(), dict[str, nn.Module]()
    for block in model.block_names():
        for inner, module in model.get_submodule(block).named_modules(prefix=block):
            linear = isinstance(module, nn.Linear) or is_transposed(module)
            weight = model.canonical_name(f"{inner}.weight")
            if linear and roles.get(weight) is Role.MATRIX:
                found[inner] = module
    return found


def is_transposed(module: nn.Module) -> bool:
    """Whether this is a layer of transformers that has its weight as inputs x outputs."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a layer."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    first, second = weight.shape
    return (first, second) if is_transposed(module) else (second, first)
