"""Decoding: a model's state for several sequences at once, each in a slot of its own.

    prefill(parts)            prompts without their last ids, part by part
    decode(slots, tokens)     one more position of some slots: their logits

A slot's results must not depend on the other slots. So a prompt is computed by itself, in chunks
whose borders depend on positions only, attention reads each slot alone, and rows are put into
matrix products of such sizes only for which every row comes out the same (`invariant_sizes`).

    CacheDecoder   any model with the cache that it has, or none: one slot after the other
    SlotDecoder    keys and values in memory that is allocated once; one forward pass for all rows
    KernelDecoder  (`kernel_decoding.py`) the same for GPUs, with kernels of its own

Shapes: S slots, R rows (slots that decode), T positions, G key and value heads, H query heads,
C capacity of a slot, K head width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch.func import functional_call
from torch.nn import functional

from gristmill.base.limits import free_memory
from gristmill.config.model import Role
from gristmill.models.spec import Cache, CausalLM, SlotMemory, SlotRows

CHUNK = {"cpu": 128, "gpu": 512}
"""Positions of a prompt that are computed at once."""


class PromptPart(NamedTuple):
    """Some ids of a prompt, behind those that the slot holds."""

    slot: int
    ids: Sequence[int]
    start: int
    """The position of the first one."""


class Decoder(ABC):
    """A model's state for several sequences."""

    chunk: int
    """Positions of a prompt that are computed at once, at most."""
    pause: int
    """Positions of prompts that are computed between two steps of other sequences, about."""
    grain: int
    """A position has the same bits in all prompts that are the same up to the next multiple of
    this: chunks end there. With 1, also if it was generated."""
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
        """Compute parts of prompts, at most `chunk` positions of each, or together if the grain is
        1."""

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


class SlotDecoder(Decoder):
    """A model that reads keys and values from `SlotMemory`, in one pass for all rows."""

    copies: ClassVar[bool] = True
    turns_weights: ClassVar[bool] = True
    """Whether products with several rows are faster with transposed weights."""

    def __init__(
        self, model: CausalLM, memory: SlotMemory, *, capacity: int, dtype: torch.dtype
    ) -> None:
        super().__init__(model, slots=memory.slots, capacity=capacity, dtype=dtype)
        self.memory = memory
        turns = self.turns_weights and memory.slots > 1 and self.device.type == "cpu"
        self._weights = _prepared(model, dtype, transposed=turns)
        self._sizes = self._row_counts()

    def _row_counts(self) -> list[int]:
        """The numbers of rows that may be computed at once."""
        weights = self._weights or {}
        one_of_each_shape = {tuple(one.shape): one for one in weights.values() if one.dim() == 2}
        return invariant_sizes(list(one_of_each_shape.values()), self.slots)

    def prefill(self, parts: Sequence[PromptPart]) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        for slot, ids, start in parts:
            if ids:
                ids_BT = torch.tensor([list(ids)], device=self.device)
                self._forward(ids_BT, cache=self.memory.view(slot, start), logits_at_N=nothing)

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        count = len(slots)
        padding = next(size for size in self._sizes if size >= count) - count
        rows = SlotRows(self.memory, slots, lengths)
        tokens_R1 = torch.tensor([*tokens, *[0] * padding], device=self.device)[:, None]
        positions_R1 = torch.tensor([*lengths, *[0] * padding], device=self.device)[:, None]
        at_R = torch.arange(count + padding, device=self.device)
        logits_RV = self._forward(
            tokens_R1, positions_BT=positions_R1, cache=rows, logits_at_N=at_R
        )
        return logits_RV[:count]

    def copy(self, source: int, target: int, length: int) -> None:
        self.memory.copy(source, target, length)

    def _forward(self, ids_BT: torch.Tensor, **options: object) -> torch.Tensor:
        with computing_in(self.model, self.dtype):
            if self._weights is None:
                logits = self.model(ids_BT, **options)
            else:
                logits = functional_call(self.model, self._weights, (ids_BT,), options)
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


def _prepared(
    model: CausalLM, dtype: torch.dtype, *, transposed: bool
) -> dict[str, torch.Tensor] | None:
    """The weights for decoding; None if the model's own are. In half precision they are cast once
    instead of in every layer, and for several rows matrices are stored transposed: on a CPU that
    takes half the time, and two rows are computed as sixteen are."""
    named = dict(model.named_parameters())
    if not transposed and all(parameter.dtype == dtype for parameter in named.values()):
        return None
    roles = model.roles()
    tied = Role.HEAD not in roles.values()
    turned = {Role.MATRIX, Role.HEAD} | ({Role.EMBEDDING} if tied else set())
    weights = {}
    for name, parameter in named.items():
        weight = parameter.detach().to(dtype)
        if transposed and weight.dim() == 2 and roles[model.canonical_name(name)] in turned:
            weight = weight.T.contiguous().T
        weights[name] = weight
    return weights


def invariant_sizes(matrices: Sequence[torch.Tensor], largest: int) -> list[int]:
    """The numbers of rows, up to `largest`, for which a product with these matrices gives every row
    the same bits as among `largest` rows.

    Libraries choose another algorithm for a single row, and some for up to a dozen. Which they
    choose depends on shapes only, so one product of each size shows it.
    """
    sizes, generator = set(range(1, largest + 1)), torch.Generator().manual_seed(0)
    for matrix_NK in matrices:
        x_RK = torch.randn(largest, matrix_NK.shape[1], generator=generator)
        x_RK = x_RK.to(matrix_NK.device, matrix_NK.dtype)
        whole_RN = functional.linear(x_RK, matrix_NK)
        sizes = {
            size
            for size in sizes
            if torch.equal(functional.linear(x_RK[:size], matrix_NK), whole_RN[:size])
        }
    return sorted(sizes | {largest})
