"""Functions as operations of torch, which `torch.compile` calls without looking into them.

`torch.library.custom_op` does the same, but each call passes through its Python wrappers, which
take 70 us, several times what launching a kernel takes; a step has hundreds of calls, and then the
GPU waits for the host. What the wrappers add is not needed within an autograd function: gradients,
and versions of tensors that are written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("gristmill", "FRAGMENT")


def operation(
    *, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Makes an operation of a function, under its name without underscores in front; its schema
    follows from its annotations. Its results must be new tensors, and are not differentiable."""

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        name = function.__name__.lstrip("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        overload: torch._ops.OpOverload = getattr(torch.ops.gristmill, name).default
        return overload

    return register


def fake(of: torch._ops.OpOverload) -> Callable[[Function], Function]:
    """Says what an operation returns for tensors without values."""

    def register(function: Function) -> Function:
        torch.library.register_fake(of, function)
        return function

    return register
