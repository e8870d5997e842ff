"""What a model keeps between calls while it generates.

    Cache        what a caller may do with the state of any model
    KVCache      keys and values of one batch, a pair of tensors per layer
    SlotMemory   keys and values of many sequences, each in a slot of its own

Shapes: L layers, B samples, S slots, G groups of heads that share keys and values, H heads, C
capacity in positions, T positions, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class Cache(Protocol):
    """The state of a model between calls while it generates."""

    length: int
    """Positions already processed."""

    def clear(self) -> None:
        """Reset to empty and keep the memory."""

    def branch(self, rows_B: torch.Tensor) -> Cache:
        """Another cache, with these samples of the batch; one may occur several times."""


@dataclass
class KVCache:
    """Keys and values of the positions already processed, one pair of tensors per layer."""

    capacity: int
    keys_BHTK: list[torch.Tensor] = field(default_factory=list)
    values_BHTK: list[torch.Tensor] = field(default_factory=list)
    length: int = 0

    def extend(
        self, layer: int, key_BHTK: torch.Tensor, value_BHTK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values; returns all of that layer's."""
        if layer == len(self.keys_BHTK):
            shape = (*key_BHTK.shape[:2], self.capacity, key_BHTK.shape[3])
            self.keys_BHTK.append(key_BHTK.new_empty(shape))
            self.values_BHTK.append(value_BHTK.new_empty(shape))
        keys, values, begin = self.keys_BHTK[layer], self.values_BHTK[layer], self.length
        end = begin + key_BHTK.shape[2]
        assert end <= self.capacity, "the caller stays within the context"
        keys[:, :, begin:end] = key_BHTK
        values[:, :, begin:end] = value_BHTK
        return keys[:, :, :end], values[:, :, :end]

    def clear(self) -> None:
        self.length = 0

    def branch(self, rows_B: torch.Tensor) -> KVCache:
        keys, values = self.keys_BHTK, self.values_BHTK
        chosen = [key[rows_B] for key in keys], [value[rows_B] for value in values]
        return KVCache(self.capacity, *chosen, length=self.length)


class SlotMemory:
    """Keys and values of several sequences, each in a slot of its own; allocated once."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        groups: int,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.capacity = slots, capacity
        shape = layers, slots, groups, capacity, width
        # Not left as it is: an attention kernel may read what it then masks, and NaN would remain.
        self.keys_LSGCK = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LSGCK = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one."""
        for tensor in (self.keys_LSGCK, self.values_LSGCK):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]
