"""What the rest of the program may ask of a model.

Everything goes through `forward`, so that wrappers (compilation, sharding) see every call:

    model(tokens_BT)                               -> logits_BTV, or _B1V with last_only
    model(tokens_BT, targets=, weights=, scale=)   -> Loss, for training and validation
    model(tokens_BT, cache=Cache)                  -> logits, the cache grown by T
    model(tokens_BT, positions=, documents=, ...)  -> the same with packed documents kept apart

A model may be a shard of one that several processes compute together. It knows its `ModelShard`,
says by `Split`s how its parameters are divided, and reaches the other shards through a `ShardComm`;
how that communicates is not its business.

Shapes: B samples, T positions, D width, V vocabulary, H heads, K head width.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from gristmill.config.model import ModelConfig
from gristmill.config.roles import Role
from gristmill.models.recompute import Recompute
from gristmill.plan.arithmetic import TokenCost


class Kernels(NamedTuple):
    """Which of our own kernels a model uses; plain operations compute the rest."""

    loss: bool = False
    mlp: bool = False
    head_fp8: bool = False
    """Matrix products of the head in fp8, where there will be gradients."""
    document_blocks: bool = False
    """Attention that skips what packed documents do not see; only where it is compiled."""


class Loss(NamedTuple):
    """A loss summed over the counted tokens of a batch."""

    scaled: torch.Tensor
    """The sum times the scale that was asked for: what is differentiated."""
    total: torch.Tensor
    """The plain sum in nats, detached: what is reported."""


# ------------------------------------------------------------------ sharded models


@dataclass(frozen=True)
class ModelShard:
    """The part of a model that one process holds: some layers, and of each layer a share of the
    heads, inner features and vocabulary rows."""

    layers: tuple[int, ...] | None = None
    """None for all of them."""
    first: bool = True
    """With the embedding."""
    last: bool = True
    """With the last norm and the head."""
    tp_rank: int = 0
    tp_size: int = 1
    """Processes that share each layer."""


WHOLE = ModelShard()


class Split(NamedTuple):
    """A parameter that is divided among the processes that share a layer."""

    dim: int
    parts: tuple[int, ...]
    """Sizes along it of the matrices that are stacked in the whole parameter, each divided by
    itself."""


class ShardComm:
    """How a model shard communicates with the others. This one is for a model that is whole."""

    single = True
    """Whether there are no other shards, so that nothing is communicated."""
    forks_rng = False
    """Whether `distinct_rng` forks the random state, which a compiled graph cannot hold."""
    sequence_parallel = False
    """Whether the residual stream between blocks is divided among the shards along the sequence."""
    attend: Callable[..., torch.Tensor] | None = None
    """Attention over sequences of which this process has a part; None where it has all."""

    def enter(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The input of column-parallel products, with all positions. Its gradient is the sum of all
        shards' gradients."""
        return x_BTD

    def leave(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The sum of all shards' row-parallel products, laid out as the residual stream."""
        return x_BTD

    def local_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Those positions, along a dimension, for which this process has the residual stream."""
        return x

    def distinct_rng(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers that differ between shards which otherwise draw the same."""
        return contextlib.nullcontext()

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over all shards."""
        return x

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all shards; for numbers that are not differentiated."""
        return x


# ------------------------------------------------------------------ caches


class Cache(Protocol):
    """What a model remembers of the positions it has already seen."""

    length: int
    """How many these are."""

    def clear(self) -> None:
        """Forget everything; the memory is used again."""


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


# ------------------------------------------------------------------ the contract


class CausalLM(nn.Module):
    """A causal language model. Models are built without memory, on the device `meta`; placing one
    gives it memory, buffers and start weights, block by block.

    Required: `forward`, `roles`, `block_names`, `initialise`, `token_cost`. The rest has a default
    that fits a model without the ability in question; abilities are declared with the settings
    (`ModelConfig.abilities`), so that whoever needs one is refused when the run file is read.
    """

    casts_weights: ClassVar[bool] = False
    """Whether layers convert their fp32 weights to the number format of their input themselves;
    the `forward` of a model whose layers do not runs under `self.autocast()`."""

    def __init__(self, config: ModelConfig, *, vocab: int, shard: ModelShard = WHOLE) -> None:
        """`vocab`: how many ids can be predicted; there may be more rows, which are padding."""
        super().__init__()
        self.config, self.vocab, self.shard = config, vocab, shard
        self.compute: torch.dtype = torch.float32
        """The number format of activations."""
        self.kernels = Kernels()
        self.comm = ShardComm()

    # -------------------------------------------------------------- what it computes

    @abstractmethod
    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        targets_BT: torch.Tensor | None = None,
        weights_BT: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor | Loss:
        """Logits, or the loss if there are targets."""

    def new_cache(self) -> Cache | None:
        """A cache for generating text; None if the model has no use for one."""
        return None

    @abstractmethod
    def token_cost(self, sequence: int) -> TokenCost:
        """Floating-point operations to train the whole model on one token."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Computes in the model's number format although its weights are kept in fp32."""
        half = self.compute is not torch.float32
        return torch.autocast(self.device.type, dtype=self.compute, enabled=half)

    # -------------------------------------------------------------- its parameters

    @abstractmethod
    def roles(self) -> dict[str, Role]:
        """What each parameter is for, by its name in the whole model."""

    def canonical_name(self, name: str) -> str:
        """A parameter's name in the whole model, under which checkpoints know it: that of the first
        of several names that are tied together."""
        return name

    def vocabulary_parameters(self) -> frozenset[str]:
        """Parameters, by name in the whole model, with a row for each token, which may be padded
        with more rows."""
        return frozenset()

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows, in the whole model, of each matrix in parameters that are several matrices stacked
        on top of one another."""
        return {}

    # -------------------------------------------------------------- how it begins

    @abstractmethod
    def initialise(self, seed: int, names: Iterable[str] | None = None) -> None:
        """Draw weights, all or those named. What a parameter begins as depends on the seed and its
        name only, not on the order of calls nor on how the model is sharded."""

    def reset_buffers(self) -> None:
        """Compute the buffers that were made without memory."""

    def tie(self) -> None:
        """Make parameters that are tied together one, after they were given memory."""

    # -------------------------------------------------------------- its blocks

    @abstractmethod
    def block_names(self) -> Sequence[str]:
        """The modules, by name and in order, that are alike: they are recomputed, compiled, sharded
        and divided into pipeline stages one by one."""

    def recompute_blocks(self, recompute: Recompute) -> None:
        """Let the backward pass compute activations again instead of keeping them."""
        for number, name in enumerate(self.block_names()):
            recompute.wrap(self.get_submodule(name), number)

    # -------------------------------------------------------------- Ability.TENSOR

    def splits(self) -> dict[str, Split]:
        """How parameters are divided among processes that share layers; those not named here are
        on each of them."""
        return {}

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape in the whole model."""
        shape = list(self.get_parameter(name).shape)
        split = self.splits().get(name)
        if split is not None:
            shape[split.dim] = sum(split.parts)
        return tuple(shape)

    def partial_gradients(self) -> list[str]:
        """Parameters that every process sharing layers has, and whose gradient is the sum of all
        processes' gradients."""
        return []


class StagedModel(Protocol):
    """What a model with Ability.PIPELINE offers besides."""

    def stage_modules(
        self, layers: Sequence[int], *, first: bool, last: bool
    ) -> Mapping[str, nn.Module]:
        """The modules of a pipeline stage."""

    def forward_stage(
        self,
        hidden_BTD: torch.Tensor,
        layers: Sequence[int],
        *,
        first: bool,
        last: bool,
        tokens_BT: torch.Tensor,
        targets_BT: torch.Tensor,
        weights_BT: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | Loss:
        """The residual stream after some layers, or the loss after the last; `hidden_BTD` is what
        the stage before sent."""

    def stage_hidden(self, samples: int, length: int) -> torch.Tensor:
        """What one stage sends to the next for micro-batches of this shape, without memory."""

    def tied_across_stages(self) -> list[str]:
        """Parameters, by name in the whole model, that the first and the last stage both hold."""
