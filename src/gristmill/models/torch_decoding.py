"""Decoding of the native GPT with torch's own functions, on a CPU mostly.

Prompts are computed in chunks whose borders depend on positions only, those of several slots at
once where they are short, and so are the rows of all slots that generate. Rows are put into matrix
products of such sizes only for which every row comes out the same, and attention reads a number of
positions that each slot's own length decides. So a slot's results do not depend on the others.

Shapes: R rows, S slots, D width, N outputs of a layer, H heads, G key and value heads, K head
width, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch.nn import functional

from gristmill.config.model import Role
from gristmill.models.cache import SlotMemory
from gristmill.models.decoding import AttentionShape, HeadNorm, Norm, PromptPart
from gristmill.models.gpt_decoding import GPTDecoder, ResidualStream
from gristmill.models.layers import RotaryAngles, activated
from gristmill.models.spec import CausalLM

STEP = 16
"""Rows of prompts are filled up to a multiple of this."""
FEW = 8
"""Rows that decode are filled up to a multiple of this if there are more."""
SPAN = 64
"""What is generated attends to a multiple of so many positions, the last of which are masked: so
rows of about the same length are computed at once."""


class TorchDecoder(GPTDecoder):
    """A decoder without kernels of its own."""

    turns_weights: ClassVar[bool] = True

    def __init__(
        self, model: CausalLM, memory: SlotMemory, *, capacity: int, dtype: torch.dtype
    ) -> None:
        super().__init__(model, memory, capacity=capacity, dtype=dtype)
        matrices = self._matrices(model)
        head_VD = self._named["head.weight"]
        few = min(self.slots, FEW)
        sizes = [*range(1, few), *range(few, self.slots, FEW), self.slots]
        self._sizes = invariant_sizes([*matrices, head_VD], sizes)
        if self.slots > 1:
            steps = range(STEP, self.chunk + 1, STEP)
            self.joins = invariant_sizes(matrices, steps) == list(steps)

    def _matrices(self, model: CausalLM) -> list[torch.Tensor]:
        """One matrix of each shape in the blocks."""
        roles, shapes = model.roles(), dict[tuple[int, ...], torch.Tensor]()
        for name, _ in model.named_parameters():
            weight = self._named[name]
            # Gates are vectors by their role.
            if weight.dim() == 2 and roles[model.canonical_name(name)] in (
                Role.MATRIX,
                Role.VECTOR,
            ):
                shapes[tuple(weight.shape)] = weight
        return list(shapes.values())

    def prefill(self, parts: Sequence[PromptPart]) -> None:
        parts = [part for part in parts if part.ids]
        if not parts:
            return
        tokens = [id for part in parts for id in part.ids]
        places = [part.start + at for part in parts for at in range(len(part.ids))]
        padding = [0] * (-len(tokens) % STEP if self.joins else 0)
        self._blocks([*tokens, *padding], [*places, *padding], _PromptRows(self.memory, parts))

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        count = len(slots)
        padding = [0] * (next(size for size in self._sizes if size >= count) - count)
        rows = _SlotRows(self.memory, slots, lengths)
        return self.logits(self._blocks([*tokens, *padding], [*lengths, *padding], rows))[:count]

    def _blocks(
        self, tokens: Sequence[int], places: Sequence[int], rows: _PromptRows | _SlotRows
    ) -> ResidualStream:
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
    """Following positions of some slots; rows behind them are padding."""

    angles: RotaryAngles | None = None

    def __init__(self, memory: SlotMemory, parts: Sequence[PromptPart]) -> None:
        self._memory, self._parts = memory, parts
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def attend(
        self,
        query_RHK: torch.Tensor,
        key_RGK: torch.Tensor,
        value_RGK: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Append keys and values, and attend to all positions up to each row's own."""
        y_RHK, row = torch.zeros_like(query_RHK), 0
        for number, part in enumerate(self._parts):
            rows = slice(row, row := row + len(part.ids))
            begin, end = part.start, part.start + len(part.ids)
            keys_GCK = self._memory.keys_LSGCK[shape.layer, part.slot]
            values_GCK = self._memory.values_LSGCK[shape.layer, part.slot]
            keys_GCK[:, begin:end] = key_RGK[rows].transpose(0, 1)
            values_GCK[:, begin:end] = value_RGK[rows].transpose(0, 1)
            mask = self._mask(number, shape.window, query_RHK.device)
            y_HTK = functional.scaled_dot_product_attention(
                query_RHK[rows].transpose(0, 1)[None],
                keys_GCK[None, :, :end],
                values_GCK[None, :, :end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=shape.scale,
                enable_gqa=shape.heads != len(keys_GCK),
            )[0]
            y_RHK[rows] = y_HTK.transpose(0, 1)
        return y_RHK

    def _mask(self, number: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which positions each row of a part sees; None for all up to its own, from the first
        on."""
        part = self._parts[number]
        if part.start == 0 and window is None:
            return None
        if (number, window) not in self._masks:
            end = part.start + len(part.ids)
            row = torch.arange(part.start, end, device=device)[:, None]
            seen = torch.arange(end, device=device)
            self._masks[number, window] = (seen <= row) & (seen > row - (window or end))
        return self._masks[number, window]


class _Together(NamedTuple):
    """Rows that attend to equally many positions."""

    rows: list[int]
    slots: slice | list[int]
    seen: slice
    mask_R11C: torch.Tensor


class _SlotRows:
    """One more position of several slots; rows behind them are padding."""

    angles: RotaryAngles | None = None

    def __init__(self, memory: SlotMemory, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._memory, self._slots, self._lengths = memory, list(slots), list(lengths)
        self._groups: dict[int | None, list[_Together]] = {}

    def attend(
        self,
        query_RHK: torch.Tensor,
        key_RGK: torch.Tensor,
        value_RGK: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Append keys and values, and attend to all of each slot."""
        count = len(self._slots)
        keys_SGCK = self._memory.keys_LSGCK[shape.layer]
        values_SGCK = self._memory.values_LSGCK[shape.layer]
        keys_SGCK[self._slots, :, self._lengths] = key_RGK[:count]
        values_SGCK[self._slots, :, self._lengths] = value_RGK[:count]
        y_RHK = torch.zeros_like(query_RHK)
        for group in self._together(shape.window, query_RHK.device):
            y_RHK[group.rows] = functional.scaled_dot_product_attention(
                query_RHK[group.rows, :, None],
                keys_SGCK[group.slots, :, group.seen],
                values_SGCK[group.slots, :, group.seen],
                attn_mask=group.mask_R11C,
                scale=shape.scale,
                enable_gqa=key_RGK.shape[1] != shape.heads,
            )[:, :, 0]
        return y_RHK

    def _together(self, window: int | None, device: torch.device) -> list[_Together]:
        if window not in self._groups:
            spans: dict[tuple[int, int], list[int]] = {}
            for row, length in enumerate(self._lengths):
                first = 0 if window is None else max(0, length + 1 - window) // SPAN * SPAN
                last = min(-(-(length + 1) // SPAN) * SPAN, self._memory.capacity)
                spans.setdefault((first, last), []).append(row)
            self._groups[window] = [
                self._group(rows, slice(*span), window, device) for span, rows in spans.items()
            ]
        return self._groups[window]

    def _group(
        self, rows: list[int], seen: slice, window: int | None, device: torch.device
    ) -> _Together:
        taken = [self._slots[row] for row in rows]
        following = slice(taken[0], taken[0] + len(taken))
        # Without a copy if they lie one behind the other.
        slots = following if taken == list(range(following.start, following.stop)) else taken
        place = torch.arange(seen.start, seen.stop, device=device)
        length_R1 = torch.tensor([[self._lengths[row]] for row in rows], device=device)
        mask_RC = (place <= length_R1) & (place > length_R1 - (window or seen.stop))
        return _Together(rows, slots, seen, mask_RC[:, None, None])


def invariant_sizes(matrices: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[int]:
    """The numbers of rows for which a product with these matrices gives every row the same bits as
    among the largest number.

    Libraries choose another algorithm for a single row, and some for up to a dozen. Which they
    choose depends on shapes only, so one product of each size shows it.
    """
    largest, generator = max(sizes), torch.Generator().manual_seed(0)
    left = set(sizes)
    for matrix_NK in matrices:
        x_RK = torch.randn(largest, matrix_NK.shape[1], generator=generator)
        x_RK = x_RK.to(matrix_NK.device, matrix_NK.dtype)
        whole_RN = functional.linear(x_RK, matrix_NK)
        left = {
            size
            for size in left
            if torch.equal(functional.linear(x_RK[:size], matrix_NK), whole_RN[:size])
        }
    return sorted(left | {largest})
