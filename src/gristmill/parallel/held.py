"""What one process holds of a model: for every parameter, a plain tensor and where it belongs.

However a model is divided (over layers, features, rows), norms, optimizers and checkpoints see the
same thing: a tensor in this process's memory, and the pieces of the whole parameter that it is.
Among the processes that hold a piece, exactly one owns it: it counts in norms, and it writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gristmill.base.boxes import Piece, whole_piece


@dataclass(frozen=True)
class Held:
    """This process's share of one parameter."""

    name: str
    """The parameter's name in the whole model."""
    shape: tuple[int, ...]
    """The whole parameter's shape."""
    local: nn.Parameter
    """What is kept here, as a plain tensor; it shares its memory with the model's own."""
    pieces: tuple[Piece, ...]
    """Where it lies in the whole; none if this process's share is empty."""
    owned: bool = True
    """Whether this process is the one that counts it and writes it."""

    @property
    def speaks(self) -> bool:
        """Whether this process writes what is not divided, such as counters of its optimizer."""
        origin = (0,) * len(self.shape)
        return self.owned and any(piece.whole.begin == origin for piece in self.pieces)


def held_whole(model: nn.Module) -> dict[str, Held]:
    """A model that is in one place."""
    return {
        name: Held(name, tuple(parameter.shape), parameter, whole_piece(parameter.shape))
        for name, parameter in model.named_parameters()
    }


def owned_squares(held: dict[str, Held]) -> torch.Tensor:
    """The sum of squares of the gradients that this process owns."""
    gradients = [
        one.local.grad for one in held.values() if one.owned and one.local.grad is not None
    ]
    if not gradients:
        device = next(iter(held.values())).local.device
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients)).square().sum()
