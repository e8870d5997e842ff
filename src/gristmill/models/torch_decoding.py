"""Decoding of the native GPT with torch's own functions, on a CPU mostly.

A prompt is computed by itself, in chunks whose borders depend on positions only; when text is
generated, rows of several slots are computed at once. Rows are put into matrix products of such
sizes only for which every row comes out the same, and each slot attends by itself. So a slot's
results do not depend on the others.

Shapes: R rows, S slots, D width, N outputs of a layer, H heads, G key and value heads, K head
width, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from gristmill.models.decoding import PromptPart
from gristmill.models.gpt_decoding import AttentionShape, GPTDecoder, HeadNorm, Norm, Stream
from gristmill.models.layers import RotaryAngles, activated
from gristmill.models.spec import CausalLM, SlotMemory

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class TorchDecoder(GPTDecoder):
    """A decoder without kernels of its own."""

    turns_weights: ClassVar[bool] = True

    def __init__(
        self, model: CausalLM, memory: SlotMemory, *, capacity: int, dtype: torch.dtype
    ) -> None:
        super().__init__(model, memory, capacity=capacity, dtype=dtype)
        one_of_each_shape = {tuple(w.shape): w for w in self._named.values() if w.dim() == 2}
        self._sizes = invariant_sizes(list(one_of_each_shape.values()), self.slots)

    def prefill(self, parts: Sequence[PromptPart]) -> None:
        for part in parts:
            if part.ids:
                places = list(range(part.start, part.start + len(part.ids)))
                self._blocks(part.ids, places, _PromptRows(self.memory, part.slot, places))

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        count = len(slots)
        padding = [0] * (next(size for size in self._sizes if size >= count) - count)
        rows = _SlotRows(self.memory, slots, lengths)
        return self.logits(self._blocks([*tokens, *padding], [*lengths, *padding], rows))[:count]

    def _blocks(
        self, tokens: Sequence[int], places: Sequence[int], rows: _PromptRows | _SlotRows
    ) -> Stream:
        tokens_R, places_R = torch.tensor([list(tokens), list(places)], device=self.device)
        x_RD = functional.embedding(tokens_R, self._named["embedding.weight"])
        if "positions.weight" in self._named:
            x_RD = x_RD + functional.embedding(places_R, self._named["positions.weight"])
        if self._rotary is not None:
            cos_TK, sin_TK = self._rotary
            rows.angles = RotaryAngles(cos_TK[places_R][:, None], sin_TK[places_R][:, None])
        return self.blocks(x_RD, tokens_R, rows)

    def _normalised(
        self, x_RD: torch.Tensor, norm: Norm, added: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for y_RD in added:
            x_RD = x_RD + y_RD
        shape = x_RD.shape[1:]
        if norm.centred:
            return x_RD, functional.layer_norm(x_RD, shape, norm.gain_K, norm.shift_K, norm.eps)
        return x_RD, functional.rms_norm(x_RD, shape, norm.gain_K, norm.eps)

    def _linear(
        self, x_RK: torch.Tensor, name: str, *, activation: str | None = None
    ) -> torch.Tensor:
        y_RN = self._product(x_RK, name)
        return y_RN if activation is None else activated(y_RN, activation)

    def _product(self, x_RK: torch.Tensor, name: str) -> torch.Tensor:
        named = self._named
        return functional.linear(x_RK, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def _attend(
        self, qkv_RN: torch.Tensor, shape: AttentionShape, rows: _PromptRows | _SlotRows
    ) -> torch.Tensor:
        heads, groups, width = shape.heads, self.config.groups, self.config.head_size
        parts = qkv_RN.unflatten(1, (heads + 2 * groups, width)).split((heads, groups, groups), 1)
        query_RHK, key_RGK, value_RGK = parts
        if (norm := shape.norm) is not None:
            query_RHK = _head_normalised(query_RHK, norm, norm.query_gain_D)
            key_RGK = _head_normalised(key_RGK, norm, norm.key_gain_D)
        if rows.angles is not None:
            query_RHK, key_RGK = rows.angles.apply(query_RHK), rows.angles.apply(key_RGK)
        return rows.attend(query_RHK, key_RGK, value_RGK, shape).flatten(1)

    def _head(self, n_RD: torch.Tensor) -> torch.Tensor:
        return functional.linear(n_RD, self._named["head.weight"]).float()


def _head_normalised(
    x_RHK: torch.Tensor, norm: HeadNorm, gain_K: torch.Tensor | None
) -> torch.Tensor:
    return functional.rms_norm(x_RHK, x_RHK.shape[-1:], gain_K, norm.eps)


class _PromptRows:
    """Following positions of one slot."""

    angles: RotaryAngles | None = None

    def __init__(self, memory: SlotMemory, slot: int, places: Sequence[int]) -> None:
        self._memory, self._slot = memory, slot
        self._begin, self._end = places[0], places[-1] + 1
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def attend(
        self,
        query_RHK: torch.Tensor,
        key_RGK: torch.Tensor,
        value_RGK: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Append keys and values, and attend to all positions up to each row's own."""
        memory, slot, end = self._memory, self._slot, self._end
        keys_GCK = memory.keys_LSGCK[shape.layer, slot]
        values_GCK = memory.values_LSGCK[shape.layer, slot]
        keys_GCK[:, self._begin : end] = key_RGK.transpose(0, 1)
        values_GCK[:, self._begin : end] = value_RGK.transpose(0, 1)
        mask = self._mask(shape.window, query_RHK.device)
        y_HRK = functional.scaled_dot_product_attention(
            query_RHK.transpose(0, 1)[None],
            keys_GCK[None, :, :end],
            values_GCK[None, :, :end],
            attn_mask=mask,
            is_causal=mask is None,
            scale=shape.scale,
            enable_gqa=shape.heads != len(keys_GCK),
        )[0]
        return y_HRK.transpose(0, 1)

    def _mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which positions each row sees; None for all up to its own, from the first on."""
        if self._begin == 0 and window is None:
            return None
        if window not in self._masks:
            row = torch.arange(self._begin, self._end, device=device)[:, None]
            seen = torch.arange(self._end, device=device)
            self._masks[window] = (seen <= row) & (seen > row - (window or self._end))
        return self._masks[window]


class _SlotRows:
    """One more position of several slots; rows behind them are padding."""

    angles: RotaryAngles | None = None

    def __init__(self, memory: SlotMemory, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._memory, self._slots, self._lengths = memory, list(slots), list(lengths)
        self._known: dict[int | None, list[list[KeysAndValues]]] = {}

    def attend(
        self,
        query_RHK: torch.Tensor,
        key_RGK: torch.Tensor,
        value_RGK: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Append keys and values, and attend to all of each slot."""
        count, memory = len(self._slots), self._memory
        memory.keys_LSGCK[shape.layer, self._slots, :, self._lengths] = key_RGK[:count]
        memory.values_LSGCK[shape.layer, self._slots, :, self._lengths] = value_RGK[:count]
        grouped = key_RGK.shape[1] != shape.heads
        attended = [
            functional.scaled_dot_product_attention(
                query_1HK[:, :, None], *known[shape.layer], scale=shape.scale, enable_gqa=grouped
            )[:, :, 0]
            for query_1HK, known in zip(
                query_RHK[:count].split(1), self._seen(shape.window), strict=True
            )
        ]
        if len(query_RHK) > count:
            attended.append(torch.zeros_like(query_RHK[count:]))
        return torch.cat(attended)

    def _seen(self, window: int | None) -> list[list[KeysAndValues]]:
        """The keys and values that each row attends to, of every layer."""
        if window not in self._known:
            self._known[window] = []
            for slot, length in zip(self._slots, self._lengths, strict=True):
                first = 0 if window is None else max(0, length + 1 - window)
                at = slice(slot, slot + 1), slice(None), slice(first, length + 1)
                both = self._memory.keys_LSGCK[:, *at], self._memory.values_LSGCK[:, *at]
                self._known[window].append(list(zip(*(one.unbind() for one in both), strict=True)))
        return self._known[window]


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
