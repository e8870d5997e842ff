"""What the rest of the program may ask of a model.

Everything goes through `forward`, so that wrappers (compilation, sharding) see every call:

    model(tokens_BT)                               -> logits_BTV, or _B1V with last_only
    model(tokens_BT, targets=, weights=, scale=)   -> Loss, for training and validation
    model(tokens_BT, cache=KVCache)                -> logits, the cache grown by T
    model(tokens_BT, positions=, documents=, ...)  -> the same with packed documents kept apart

A model may be one part of several that compute together. It knows its `Portion`, says by `Split`s
how its parameters are divided, and asks the other parts through `Links`; how these reach them is
not its business.

Shapes: B samples, T positions, D width, V vocabulary, H heads, K head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gristmill.config.schema import ModelConfig


class Kernels(NamedTuple):
    """Which of our own kernels a model uses; plain operations compute the rest."""

    loss: bool = False
    mlp: bool = False
    head_fp8: bool = False
    """Matrix products of the head in fp8, where there will be gradients."""


class Loss(NamedTuple):
    """A loss summed over the counted tokens of a batch."""

    scaled: torch.Tensor
    """The sum times the scale that was asked for: what is differentiated."""
    total: torch.Tensor
    """The plain sum in nats, detached: what is reported."""


@dataclass(frozen=True)
class Portion:
    """The part of a model that one process holds: some layers, and of each layer a share of the
    heads, inner features and vocabulary rows."""

    layers: tuple[int, ...]
    first: bool = True
    """With the embedding."""
    last: bool = True
    """With the last norm and the head."""
    rank: int = 0
    ranks: int = 1
    """Processes that share each layer."""

    @classmethod
    def whole(cls, config: ModelConfig) -> Portion:
        return cls(tuple(range(config.layers)))


class Split(NamedTuple):
    """A parameter that is divided among the processes that share a layer."""

    dim: int
    parts: tuple[int, ...]
    """Sizes along it of the matrices that are stacked in the whole parameter, each divided by
    itself."""


class Links:
    """What a part of a model asks of the other parts. These answer for a model without any."""

    alone = True
    """Whether there are no other parts, so that nothing need be asked."""
    sequence = False
    """Whether the stream between blocks is divided among the parts along the sequence."""
    attend: Callable[..., torch.Tensor] | None = None
    """Attention over sequences of which this process has a part; None where it has all."""

    def enter(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The stream as products divided by their columns need it: all positions. Its gradient is
        the sum of all parts' gradients."""
        return x_BTD

    def leave(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The sum of all parts' results of products divided by rows, as the stream is kept."""
        return x_BTD

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Those positions, along a dimension, that the stream here is kept for."""
        return x

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers of its own for this part, where the others have numbers in common."""
        return contextlib.nullcontext()

    def most(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of all parts' values."""
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all parts' values; for numbers that are not differentiated."""
        return x


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
