"""Names and layouts of weights here and in Hugging Face's GPT-2: one table for both directions.

    ours                            Hugging Face                     layout
    embedding.weight                transformer.wte.weight           padded rows added, dropped
    blocks.N.attention.qkv.weight   transformer.h.N.attn.c_attn...   transposed (Conv1D)

A region of one tensor is a region of its counterpart, with its dimensions swapped where that is
transposed. So weights are converted a region at a time, and no model has to fit into memory.

Models without biases are written with zero biases, which compute the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.models.gpt import GPT
from gristmill.models.spec import CausalLM

_BEFORE = {"embedding.weight": "wte.weight", "positions.weight": "wpe.weight"}
_LAYER = {
    f"blocks.{{layer}}.{ours}.{kind}": f"h.{{layer}}.{theirs}.{kind}"
    for ours, theirs in {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }.items()
    for kind in ("weight", "bias")
}
_AFTER = {"norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}


TensorParts = Iterator[tuple[TensorSlice, torch.Tensor]]
"""Parts of a tensor, each with its place in the whole tensor."""


class Weights(ABC):
    """Tensors by name, in memory or on disk, any region of which can be read."""

    where: str
    """Where they are, for messages."""
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        """The stored parts of a region, which must not be changed."""

    def read(
        self, name: str, region: TensorSlice | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A copy of a tensor, or of a region of it, on the CPU."""
        region = region or TensorSlice.whole(self.shapes[name])
        value = torch.empty(region.shape, dtype=dtype)
        for place, part in self.parts(name, region):
            value[place.relative_to(region).slices].copy_(part)
        return value


class WeightsInMemory(Weights):
    """Tensors in memory, such as a model's own."""

    where = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        common = region.intersect(TensorSlice.whole(self.shapes[name]))
        if common is not None:
            yield common, self._tensors[name].detach()[common.slices]


# ------------------------------------------------------------------ Hugging Face's GPT-2


@dataclass(frozen=True)
class Gpt2Tensor:
    """A tensor of Hugging Face's GPT-2, and its counterpart here."""

    name: str
    shape: tuple[int, ...]
    """Without padding."""
    ours: str | None
    """None if the model has no such parameter; then the tensor is zero."""
    transposed: bool

    def counterpart(self, region: TensorSlice) -> TensorSlice:
        """The region of our tensor for a region of theirs, and the other way round."""
        if not self.transposed:
            return region
        return TensorSlice(region.begin[::-1], region.end[::-1])

    def read(self, weights: Weights, region: TensorSlice) -> torch.Tensor:
        """A region of it, from weights under our names, in fp32 on the CPU."""
        if self.ours is None:
            return torch.zeros(region.shape)
        value = weights.read(self.ours, self.counterpart(region))
        return value.T.contiguous() if self.transposed else value


def gpt2_tensors(model: CausalLM) -> list[Gpt2Tensor]:
    """All tensors of a GPT-2 with this model's shapes, in the order in which it computes. The model
    needs no memory."""
    assert isinstance(model, GPT), "settings that GPT-2 cannot express are refused"
    names = dict(_BEFORE)
    for layer in range(model.config.layers):
        names |= {o.format(layer=layer): t.format(layer=layer) for o, t in _LAYER.items()}
    names = {ours: f"transformer.{theirs}" for ours, theirs in (names | _AFTER).items()}
    if not model.config.tie_head:
        names["head.weight"] = "lm_head.weight"
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tables, tensors = model.vocabulary_parameters(), []
    for ours, theirs in names.items():
        # The matrices in blocks, c_attn, c_proj and c_fc, are of type Conv1D.
        exists, transposed = ours in shapes, ".c_" in theirs and theirs.endswith(".weight")
        shape = shapes[ours] if exists else shapes[ours.removesuffix("bias") + "weight"][:1]
        if ours in tables:
            shape = (model.vocab, *shape[1:])
        shape = shape[::-1] if transposed else shape
        tensors.append(Gpt2Tensor(theirs, shape, ours if exists else None, transposed))
    return tensors


class Gpt2Weights(Weights):
    """Tensors of Hugging Face's GPT-2 under our names and in our layout, without padding."""

    def __init__(self, theirs: Weights, model: CausalLM) -> None:
        """Refuses tensors that do not fit the model, which needs no memory."""
        self.where, self._theirs = theirs.where, theirs
        # The published GPT-2 has names without this prefix.
        names = {name.removeprefix("transformer."): name for name in theirs.shapes}
        self._tensors: dict[str, Gpt2Tensor] = {}
        problems = []
        for one in gpt2_tensors(model):
            name = names.get(one.name.removeprefix("transformer."))
            if name is None:
                problems.append(f"the weights lack {one.name}")
            elif theirs.shapes[name] != one.shape:
                problems.append(f"{one.name} has shape {theirs.shapes[name]}, not {one.shape}")
            elif one.ours is not None:
                self._tensors[one.ours] = replace(one, name=name)
        if problems:
            raise UserError([Problem(what, self.where) for what in problems], exit=Exit.DATA)
        self.shapes = {
            ours: one.shape[::-1] if one.transposed else one.shape
            for ours, one in self._tensors.items()
        }

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        one = self._tensors[name]
        for place, part in self._theirs.parts(one.name, one.counterpart(region)):
            yield one.counterpart(place), part.T if one.transposed else part


def to_gpt2(model: CausalLM) -> dict[str, torch.Tensor]:
    """The weights of a model in memory under Hugging Face's names, in fp32 on the CPU, without
    padding."""
    weights = WeightsInMemory(dict(model.named_parameters()))
    return {
        one.name: one.read(weights, TensorSlice.whole(one.shape)) for one in gpt2_tensors(model)
    }
