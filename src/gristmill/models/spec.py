"""The interface between models and the rest of the program.

Every call goes through `forward`, so that wrappers (compilation, FSDP) see it:

    model(tokens_BT)                               -> logits_BTV
    model(tokens_BT, logits_at_N=)                 -> logits_NV of some of the B x T positions
    model(tokens_BT, targets=, terms=LossTerms())  -> Loss, for training and validation
    model(tokens_BT, cache=Cache)                  -> logits; the cache grows by T
    model(tokens_BT, positions=, documents=, ...)  -> the same for packed documents

A model may be one shard of a larger one. It has a `ModelShard`, declares with `Split`s how its
parameters are divided, and communicates with the other shards only through a `ShardComm`.

Shapes: B samples, T positions, D width, V vocabulary, H heads, K head width.
"""

from __future__ import annotations

import contextlib
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from gristmill.config.lora import LinearShape
from gristmill.config.model import ModelConfig, Role
from gristmill.models.cache import Cache, SlotMemory
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms
from gristmill.models.recompute import Recompute
from gristmill.plan.arithmetic import TokenCost

COPY_ENGINE = (9, 0)
"""First compute capability with a tensor memory accelerator: Hopper."""
AMPERE = (8, 0)
"""First compute capability whose tensor cores take bf16."""
FP8 = (8, 9)
"""First compute capability with fp8 products: Ada."""


class Kernels(NamedTuple):
    """Which custom kernels a model and its optimizer use; torch's own compute the rest."""

    loss: bool = False
    products: bool = False
    """Matrix products of a block, with what is before or after them."""
    adamw: bool = False
    head_fp8: bool = False
    """Matrix products of the head in fp8, in training only."""
    decoding: bool = False
    """All of a decoding step."""
    document_blocks: bool = False
    """Block-sparse attention within packed documents; only where it is compiled."""

    @classmethod
    def on(cls, device: torch.device) -> Kernels:
        """All kernels that run on a device; none where Triton is not installed. Asked once, outside
        compiled code."""
        if device.type != "cuda" or importlib.util.find_spec("triton") is None:
            return cls()
        capability = torch.cuda.get_device_capability(device)
        return cls(
            loss=True,
            products=capability >= COPY_ENGINE,
            adamw=True,
            head_fp8=capability >= FP8,
            decoding=capability >= AMPERE,
        )


class Loss(NamedTuple):
    """A loss summed over the counted tokens of a batch, or of each of its samples."""

    scaled: torch.Tensor
    """The sum times the requested scale, for `backward`."""
    total: torch.Tensor
    """The plain sum in nats, detached, for reports; where the terms ask for sums by source, those
    come after it in the same tensor."""


ADAPTER_PARTS = ("lora_a", "lora_b")
"""What the parameters of an adapter are called, beside those of their layer."""


# ------------------------------------------------------------------ sharded models


@dataclass(frozen=True)
class ModelShard:
    """The part of a model that one process holds: some layers (pp), and a shard of each layer's
    heads, inner features and vocabulary rows (tp)."""

    layers: tuple[int, ...] | None = None
    """None for all layers."""
    first: bool = True
    """Whether it includes the embedding."""
    last: bool = True
    """Whether it includes the final norm and the head."""
    tp_rank: int = 0
    tp_size: int = 1


WHOLE = ModelShard()


class Split(NamedTuple):
    """How tensor parallelism divides a parameter."""

    dim: int
    parts: tuple[int, ...]
    """Sizes along `dim` of the matrices stacked in the whole parameter; each is split by itself."""


class ShardComm:
    """How a model shard communicates with the other shards. This base class is for a whole model
    and communicates nothing."""

    shards = 1
    """How many shards share each layer."""
    forks_rng = False
    """Whether `distinct_rng` forks the random state, which a compiled graph cannot contain."""
    sequence_parallel = False
    """Whether the residual stream between blocks is sharded along the sequence."""
    attend: Callable[..., torch.Tensor] | None = None
    """Attention for context parallelism; None where this process has whole sequences."""

    @property
    def single(self) -> bool:
        """Whether there are no other shards."""
        return self.shards == 1

    def copy_to(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The input of column-parallel linears, with all positions; backward sums its gradient over
        all shards."""
        return x_BTD

    def reduce_from(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Row-parallel products summed over all shards, laid out as the residual stream."""
        return x_BTD

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """The ones of these positions, (T) or (B, T), whose residual stream this process holds."""
        return positions

    def distinct_rng(self) -> contextlib.AbstractContextManager[None]:
        """A context in which each shard draws different random numbers."""
        return contextlib.nullcontext()

    def gather_features(self, x_NF: torch.Tensor) -> torch.Tensor:
        """The features of all shards, without a gradient."""
        return x_NF

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over all shards."""
        return x

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all shards, without a gradient."""
        return x


class Execution(NamedTuple):
    """How a model computes, which changes nothing about the model itself."""

    compute: torch.dtype = torch.float32
    """The dtype of activations."""
    kernels: Kernels = Kernels()
    comm: ShardComm = ShardComm()


PLAIN_EXECUTION = Execution()


# ------------------------------------------------------------------ the contract


class CausalLM(nn.Module):
    """A causal language model. Models are built on the meta device; placing one allocates memory,
    computes buffers and draws initial weights, block by block.

    Required: `forward`, `roles`, `block_names`, `initialise`, `token_cost`. The other methods have
    defaults for a model without the ability in question. Abilities are declared with the settings
    (`ModelConfig.abilities`), so a run file that needs a missing one is refused when it is read.
    """

    parts_beside_blocks: ClassVar[tuple[str, ...]] = ()
    """Methods that compute what blocks do not, for compiling block by block."""
    casts_weights: ClassVar[bool] = False
    """Whether layers cast their fp32 weights to the dtype of their input themselves; if not, the
    model is called under autocast."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab: int,
        shard: ModelShard = WHOLE,
        execution: Execution = PLAIN_EXECUTION,
    ) -> None:
        """`vocab`: ids that can be predicted; further rows of the embedding are padding."""
        super().__init__()
        self.config, self.vocab, self.shard = config, vocab, shard
        self.compute, self.kernels, self.comm = execution
        self.adapters: dict[str, bool] = {}
        """Layers with adapters (`models/lora.py`) by module name, and whether their weight is
        transposed. If there are any, only adapters are trained and saved."""

    # -------------------------------------------------------------- computation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.casts_weights or self.compute is torch.float32:
            return super().__call__(*args, **kwargs)
        with torch.autocast(self.device.type, dtype=self.compute):
            return super().__call__(*args, **kwargs)

    @abstractmethod
    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        targets_BT: torch.Tensor | None = None,
        terms: LossTerms = PLAIN_LOSS,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
        cache: Cache | None = None,
        logits_at_N: torch.Tensor | None = None,
    ) -> torch.Tensor | Loss:
        """Logits, or the loss if there are targets; `terms` say what it is. `logits_at_N`
        are positions in the flattened batch (sample x T + position): only their logits are
        computed, in shape (N, V)."""

    def new_cache(self, capacity: int | None = None) -> Cache | None:
        """A cache for `capacity` positions, the context if not given; None if the model uses
        none."""
        return None

    def slot_memory(self, slots: int, capacity: int, *, dtype: torch.dtype) -> SlotMemory | None:
        """Memory for keys and values of several sequences, for a model with a decoder of its own;
        None for any other."""
        return None

    def slot_bytes(self, capacity: int, *, dtype: torch.dtype) -> int:
        """What a slot of it needs; 0 if there is no such memory."""
        return 0

    @abstractmethod
    def token_cost(self, sequence: int, *, sampled: int | None = None) -> TokenCost:
        """Floating-point operations to train the whole model on one token; `sampled` are the rows
        of a sampled softmax."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    # -------------------------------------------------------------- parameters

    @abstractmethod
    def roles(self) -> dict[str, Role]:
        """The role of each parameter, by its name in the whole model."""

    def size_by_role(self) -> dict[Role, int]:
        """How many parameters of each role there are, without those of the base."""
        roles, base, sizes = self.roles(), self.base_parameters(), dict.fromkeys(Role, 0)
        for name, parameter in self.named_parameters():
            whole = self.canonical_name(name)
            sizes[roles[whole]] += 0 if whole in base else parameter.numel()
        return sizes

    def base_parameters(self) -> frozenset[str]:
        """Parameters, by name in the whole model, that are neither trained nor saved: all but those
        of the adapters, if there are any. They are read from the model that a run starts from."""
        if not self.adapters:
            return frozenset()
        own = {f"{layer}.{part}" for layer in self.adapters for part in ADAPTER_PARTS}
        return frozenset(self.roles()) - own

    def base_size(self) -> int:
        """How many parameters these are."""
        base, named = self.base_parameters(), self.named_parameters()
        return sum(one.numel() for name, one in named if self.canonical_name(name) in base)

    def canonical_name(self, name: str) -> str:
        """A parameter's name in the whole model and in checkpoints; of tied names, the first."""
        return name

    def vocabulary_parameters(self) -> frozenset[str]:
        """Parameters with one row per token, by name in the whole model; they may be padded."""
        return frozenset()

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Parameters that stack several matrices, with the rows of each in the whole model."""
        return {}

    # -------------------------------------------------------------- initialisation

    @abstractmethod
    def initialise(self, seed: int, names: Iterable[str] | None = None) -> None:
        """Draw all weights, or those named. Initial weights depend only on the seed and the
        parameter's name, not on the order of calls or the sharding."""

    def reset_buffers(self) -> None:
        """Compute the buffers, which are empty after memory is allocated."""

    def tie(self) -> None:
        """Tie parameters again after memory is allocated."""

    # -------------------------------------------------------------- blocks

    @abstractmethod
    def block_names(self) -> Sequence[str]:
        """The repeated modules, in order: the units of recomputation, compilation, FSDP and
        pipeline stages."""

    def recompute_blocks(self, recompute: Recompute) -> None:
        """Turn on activation checkpointing."""
        for number, name in enumerate(self.block_names()):
            recompute.wrap(self.get_submodule(name), number)

    # -------------------------------------------------------------- Ability.TENSOR

    def splits(self) -> dict[str, Split]:
        """How tensor parallelism divides parameters; those not listed are replicated."""
        return {}

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters in the whole model, tied ones under all of their names."""
        splits, shapes = self.splits(), dict[str, tuple[int, ...]]()
        for name, parameter in self.named_parameters(remove_duplicate=False):
            shape = list(parameter.shape)
            if name in splits:
                shape[splits[name].dim] = sum(splits[name].parts)
            shapes[name] = tuple(shape)
        return shapes

    def fp8_layers(self, parts: Iterable[str]) -> Mapping[str, Any]:
        """The linear layers of these parts of blocks, by name; of a model with Ability.FP8."""
        raise NotImplementedError

    def partial_gradients(self) -> list[str]:
        """Replicated parameters whose gradients must be summed over tp."""
        return []


class StagedModel(Protocol):
    """The additional methods of a model with Ability.PIPELINE."""

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
        terms: LossTerms = PLAIN_LOSS,
        positions_BT: torch.Tensor | None = None,
        documents_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | Loss:
        """The output of a stage, or the loss after the last; `hidden_BTD` is the previous stage's
        output."""

    def distinct_layers(self) -> Sequence[int]:
        """One layer of each kind of block; blocks of a kind compute the same with other weights."""

    def stage_hidden(self, samples: int, length: int) -> torch.Tensor:
        """A meta tensor shaped like a stage's output for micro-batches of this shape."""

    def tied_across_stages(self) -> list[str]:
        """Parameters, by name in the whole model, that the first and last stage both hold."""


# ------------------------------------------------------------------ parts of any model


def block_linears(model: CausalLM) -> dict[str, nn.Module]:
    """The linear layers of the blocks, without the small ones that are gates."""
    roles, linears = model.roles(), dict[str, nn.Module]()
    for block in model.block_names():
        for inner, module in model.get_submodule(block).named_modules(prefix=block):
            linear = isinstance(module, nn.Linear) or is_transposed(module)
            weight = model.canonical_name(f"{inner}.weight")
            if linear and roles.get(weight) is Role.MATRIX:
                linears[inner] = module
    return linears


def is_transposed(module: nn.Module) -> bool:
    """Whether this is a layer of transformers that has its weight as inputs x outputs."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linear_shapes(model: CausalLM) -> dict[str, LinearShape]:
    """The shapes that these layers have in the whole model."""
    stacked, whole, shapes = model.stacked_rows(), model.whole_shapes(), {}
    for name, module in block_linears(model).items():
        shape = whole[f"{name}.weight"]
        outputs, inputs = reversed(shape) if is_transposed(module) else shape
        parts = stacked.get(f"{name}.weight", (outputs,))
        shapes[name] = LinearShape(inputs, parts, module.bias is not None)
    return shapes


def document_mask(documents_BT: torch.Tensor) -> torch.Tensor:
    """A dense causal mask within documents, (B, 1, T, T)."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]
