"""Decoding: a model's state for several sequences at once, each in a slot of its own.

    prefill(parts)            prompts without their last ids, part by part
    decode(slots, tokens)     one more position of some slots: their logits

A slot's results must not depend on the other slots.

    CacheDecoder   any model with the cache that it has, or none: one slot after the other
    TorchDecoder   (`torch_decoding.py`) the native GPT: keys and values of all slots in memory that
                   is allocated once, and one pass for one position of each
    KernelDecoder  (`kernel_decoding.py`) the same for GPUs, with kernels of its own

Shapes: R rows (slots that decode), T positions, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch

from gristmill.base.limits import free_memory
from gristmill.config.model import Role
from gristmill.models.cache import Cache
from gristmill.models.spec import CausalLM

CHUNK = {"cpu": 128, "gpu": 512}
"""Positions of a prompt that are computed at once."""


class PromptPart(NamedTuple):
    """Some ids of a prompt, behind those that the slot holds."""

    slot: int
    ids: Sequence[int]
    start: int
    """The position of the first one."""


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm."""

    centred: bool
    eps: float
    gain_K: torch.Tensor | None = None
    shift_K: torch.Tensor | None = None


class HeadNorm(NamedTuple):
    """RMSNorm of queries and keys."""

    eps: float
    query_gain_D: torch.Tensor | None = None
    key_gain_D: torch.Tensor | None = None


class AttentionShape(NamedTuple):
    """What a layer's attention does."""

    layer: int
    heads: int
    scale: float
    window: int | None
    norm: HeadNorm | None


class Decoder(ABC):
    """A model's state for several sequences."""

    chunk: int
    """Positions of a prompt that are computed at once, at most."""
    pause: int
    """Positions of prompts that are computed between two steps of other sequences, about."""
    grain: int
    """A position has the same bits in all prompts that are the same up to the next multiple of
    this: chunks end there. With 1, also if it was generated."""
    joins = False
    """Whether parts of several prompts may be computed at once, `chunk` positions together."""
    copies: ClassVar[bool] = False
    """Whether `copy` works: chunks that prompts share are then computed once."""
    runs_in_graphs: ClassVar[bool] = False
    """Whether a step runs on the device alone, so that a CUDA graph can hold it."""

    def __init__(self, model: CausalLM, *, slots: int, capacity: int, dtype: torch.dtype) -> None:
        self.model, self.slots, self.capacity, self.dtype = model, slots, capacity, dtype
        self.device, self.vocab = model.device, model.vocab
        self.chunk = CHUNK["cpu" if self.device.type == "cpu" else "gpu"]
        self.grain = self.pause = self.chunk

    @abstractmethod
    def prefill(self, parts: Sequence[PromptPart]) -> None:
        """Compute parts of prompts, of at most `chunk` positions; all of them together have no more
        if the decoder joins them."""

    @abstractmethod
    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Append a token to each of these slots, which hold so many positions; their logits, (R,
        V)."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one."""
        raise NotImplementedError


class CacheDecoder(Decoder):
    """Any model, one sequence after the other: with the cache that it has; without one, all
    positions are computed again for every token."""

    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        cached: bool = True,
    ) -> None:
        super().__init__(model, slots=slots, capacity=capacity, dtype=dtype)
        self._cached = cached and model.new_cache(1) is not None
        self._caches: list[Cache | None] = [None] * slots
        self._ids: list[list[int]] = [[] for _ in range(slots)]
        if not self._cached:
            self.chunk = self.grain = capacity

    def prefill(self, parts: Sequence[PromptPart]) -> None:
        for slot, ids, start in parts:
            if start == 0:
                self._ids[slot] = []
                self._caches[slot] = self.model.new_cache(self.capacity) if self._cached else None
            if not self._cached:
                self._ids[slot] += ids
            elif ids:
                nothing = torch.empty(0, dtype=torch.int64, device=self.device)
                self._forward(slot, ids, nothing)

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        rows = []
        for slot, token in zip(slots, tokens, strict=True):
            ids = [token]
            if not self._cached:
                self._ids[slot].append(token)
                ids = self._ids[slot]
            rows.append(self._forward(slot, ids, torch.tensor([len(ids) - 1], device=self.device)))
        return torch.cat(rows)

    def _forward(self, slot: int, ids: Sequence[int], at_N: torch.Tensor) -> torch.Tensor:
        ids_BT = torch.tensor([list(ids)], device=self.device)
        with computing_in(self.model, self.dtype):
            logits = self.model(ids_BT, cache=self._caches[slot], logits_at_N=at_N)
        assert isinstance(logits, torch.Tensor)
        return logits


def affordable_slots(
    model: CausalLM, wanted: int, *, capacity: int, dtype: torch.dtype, budget: int | None = None
) -> int:
    """How many slots fit into a budget of bytes, at least one: if none is given, into a third of
    the memory that is free."""
    one = model.slot_bytes(capacity, dtype=dtype)
    if one == 0:
        return wanted
    if budget is None:
        device = model.device
        cuda = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if cuda else free_memory()
        budget = free // 3
    return max(1, min(wanted, budget // one))


@contextmanager
def computing_in(model: CausalLM, dtype: torch.dtype) -> Iterator[None]:
    """The model, with activations of another dtype."""
    before, model.compute = model.compute, dtype
    try:
        yield
    finally:
        model.compute = before


def prepared_weights(
    model: CausalLM, dtype: torch.dtype, *, transposed: bool
) -> dict[str, torch.Tensor]:
    """The weights for decoding, by name. In half precision they are cast once instead of in every
    layer, and for several rows on a CPU matrices are stored transposed: that takes half the time,
    and two rows are computed as sixteen are."""
    roles = model.roles()
    turned = {Role.MATRIX, Role.HEAD}
    if Role.HEAD not in roles.values():
        turned.add(Role.EMBEDDING)  # it is the head, too
    weights = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(dtype)
        if transposed and weight.dim() == 2 and roles[model.canonical_name(name)] in turned:
            weight = weight.T.contiguous().T
        weights[name] = weight
    return weights
