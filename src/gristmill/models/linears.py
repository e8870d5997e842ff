"""The linear layers inside the blocks of any model, by name."""

from __future__ import annotations

from torch import nn

from gristmill.config.lora import LinearShape
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


def linear_shapes(model: CausalLM) -> dict[str, LinearShape]:
    """The shapes that these layers have in the whole model."""
    stacked, found = model.stacked_rows(), {}
    for name, module in block_linears(model).items():
        shape = model.whole_shape(f"{name}.weight")
        outputs, inputs = reversed(shape) if is_transposed(module) else shape
        parts = stacked.get(f"{name}.weight", (outputs,))
        found[name] = LinearShape(inputs, parts, module.bias is not None)
    return found
