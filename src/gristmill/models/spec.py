"""What the rest of the program may ask of a model.

Everything goes through `forward`, so that wrappers (compilation, sharding) see every call:

    model(tokens_BT)                               -> logits_BTV, or _B1V with last_only
    model(tokens_BT, targets=, weights=, scale=)   -> Loss, for training and validation
    model(tokens_BT, cache=KVCache)                -> logits, the cache grown by T
    model(tokens_BT, positions=, documents=, ...)  -> the same with packed documents kept apart

Shapes: B samples, T positions, D width, V vocabulary, H heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Kernels(NamedTuple):
    """Which of our own kernels a model uses; plain operations compute the rest."""

    loss: bool = False
    mlp: bool = False
    head_fp8: bool = False
    """The head's matrix products in fp8, where there will be gradients."""


class Loss(NamedTuple):
    """A loss summed over the counted tokens of a batch."""

    scaled: torch.Tensor
    """The sum times the scale that was asked for: what is differentiated."""
    total: torch.Tensor
    """The plain sum in nats, detached: what is reported."""


@dataclass
class KVCache:
    """Keys and values of the positions a model has already seen, one pair of tensors per layer."""

    capacity: int
    keys_BHTK: list[torch.Tensor] = field(default_factory=list)
    values_BHTK: list[torch.Tensor] = field(default_factory=list)
    length: int = 0

    def extend(
        self, layer: int, key_BHTK: torch.Tensor, value_BHTK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's new keys and values and return all of them."""
        if layer == len(self.keys_BHTK):
            shape = (*key_BHTK.shape[:2], self.capacity, key_BHTK.shape[3])
            self.keys_BHTK.append(key_BHTK.new_empty(shape))
            self.values_BHTK.append(value_BHTK.new_empty(shape))
        end = self.length + key_BHTK.shape[2]
        assert end <= self.capacity, "the caller keeps within the context"
        self.keys_BHTK[layer][:, :, self.length : end] = key_BHTK
        self.values_BHTK[layer][:, :, self.length : end] = value_BHTK
        return self.keys_BHTK[layer][:, :, :end], self.values_BHTK[layer][:, :, :end]

    def clear(self) -> None:
        """Forget everything; the memory is used again."""
        self.length = 0
