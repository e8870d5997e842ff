"""Steps of optimizers, compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

import torch


def maybe_compiled(
    function: Callable[..., Any],
    constants: Hashable,
    *,
    compiled: bool | None,
    device: torch.device,
) -> Callable[..., Any]:
    """A function that is called with the same constants, such as the rule of a group, each time."""
    return _compiled(function, constants) if is_compiled(compiled, device) else function


def is_compiled(compiled: bool | None, device: torch.device) -> bool:
    """Whether steps are compiled on a device; None asks for it on CUDA only."""
    return device.type == "cuda" if compiled is None else compiled


@cache
def _compiled(function: Any, constants: Hashable) -> Callable[..., Any]:
    # torch limits recompilations per code object, so each call with other constants gets its own.
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__)
    return torch.compile(copy, dynamic=False)
