"""Names and layouts of weights here and in Hugging Face's GPT-2: one table, read in both
directions, part by part.

    ours                            Hugging Face                     layout
    embedding.weight                transformer.wte.weight           padded rows added, dropped
    blocks.N.attention.qkv.weight   transformer.h.N.attn.c_attn...   transposed (Conv1D)

A part of a tensor there is a part of one here, with its dimensions exchanged where it is
transposed. So models that are in no memory as a whole can be brought from one form to the other.

Models without biases are written with zero biases, which compute the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.model import GPTConfig
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
_TRANSPOSED = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_VOCABULARY = ("embedding.weight", "head.weight")


# ------------------------------------------------------------------ weights, wherever they are


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor as it lies where it is kept: to be copied, not to be changed."""

    box: TensorSlice
    tensor: torch.Tensor


class Weights(Protocol):
    """Tensors by name, of which any part can be had."""

    @property
    def where(self) -> str:
        """Where they are, for a person."""
        ...

    def __contains__(self, name: object, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def parts(self, name: str, box: TensorSlice) -> Iterator[TensorPart]:
        """What there is of a part of a tensor, piece by piece."""
        ...


class WeightsInMemory:
    """Tensors that are at hand, such as a model's own."""

    where = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def parts(self, name: str, box: TensorSlice) -> Iterator[TensorPart]:
        common = box.meet(TensorSlice.whole(self.shape(name)))
        if common is not None:
            yield TensorPart(common, self._tensors[name].detach()[common.slices])


def read_part(weights: Weights, name: str, box: TensorSlice) -> torch.Tensor:
    """A copy of a part of a tensor, in fp32 on the CPU."""
    value = torch.empty(box.shape)
    for part in weights.parts(name, box):
        value[part.box.seen_from(box).slices].copy_(part.tensor)
    return value


# ------------------------------------------------------------------ Hugging Face's GPT-2


@dataclass(frozen=True)
class Gpt2Tensor:
    """A tensor of Hugging Face's GPT-2, and its counterpart here."""

    name: str
    shape: tuple[int, ...]
    """Without padding."""
    ours: str | None
    """None where the model has no such parameter: then it is zero."""
    transposed: bool

    def turned_box(self, box: TensorSlice) -> TensorSlice:
        """A part here for a part there, and the other way round."""
        return TensorSlice(box.begin[::-1], box.end[::-1]) if self.transposed else box

    def turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.T if self.transposed else tensor

    def read(self, weights: Weights, box: TensorSlice) -> torch.Tensor:
        """A part of it, from weights under our names, in fp32 on the CPU."""
        if self.ours is None:
            return torch.zeros(box.shape)
        return self.turned(read_part(weights, self.ours, self.turned_box(box))).contiguous()


def gpt2_tensors(model: CausalLM) -> list[Gpt2Tensor]:
    """All that a GPT-2 of this depth has in Hugging Face's form, from the first layer to the last;
    of the model only shapes are looked at."""
    assert isinstance(model, GPT), "settings that GPT-2 cannot express are refused"
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = []
    for ours, theirs in _names(model.config).items():
        exists, transposed = ours in shapes, _TRANSPOSED.search(theirs) is not None
        shape = shapes[ours] if exists else shapes[ours.removesuffix("bias") + "weight"][:1]
        if ours in _VOCABULARY:
            shape = (model.vocab, *shape[1:])
        kept = shape[::-1] if transposed else shape
        found.append(Gpt2Tensor(theirs, kept, ours if exists else None, transposed))
    return found


def _names(config: GPTConfig) -> dict[str, str]:
    """Our names and theirs, in the order in which the model computes."""
    names = dict(_BEFORE)
    for layer in range(config.layers):
        names |= {o.format(layer=layer): t.format(layer=layer) for o, t in _LAYER.items()}
    names |= _AFTER
    head = {} if config.tie_head else {"head.weight": "lm_head.weight"}
    return {ours: f"transformer.{theirs}" for ours, theirs in names.items()} | head


class Gpt2Weights:
    """Tensors of Hugging Face's GPT-2 under our names and in our layout, without padding."""

    def __init__(self, theirs: Weights, model: CausalLM) -> None:
        """Refuses tensors that are not those of the model, of which only shapes are looked at."""
        self.where, self._theirs = theirs.where, theirs
        # The published GPT-2 has names without this beginning.
        names = {name.removeprefix("transformer."): name for name in theirs}
        self._tensors: dict[str, Gpt2Tensor] = {}
        problems = []
        for one in gpt2_tensors(model):
            name = names.get(one.name.removeprefix("transformer."))
            if name is None:
                problems.append(f"the weights lack {one.name}")
            elif theirs.shape(name) != one.shape:
                problems.append(f"{one.name} has shape {theirs.shape(name)}, not {one.shape}")
            elif one.ours is not None:
                self._tensors[one.ours] = replace(one, name=name)
        if problems:
            raise UserError([Problem(what, self.where) for what in problems], exit=Exit.DATA)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        one = self._tensors[name]
        return one.shape[::-1] if one.transposed else one.shape

    def parts(self, name: str, box: TensorSlice) -> Iterator[TensorPart]:
        one = self._tensors[name]
        for part in self._theirs.parts(one.name, one.turned_box(box)):
            yield TensorPart(one.turned_box(part.box), one.turned(part.tensor))


def to_gpt2(model: CausalLM) -> dict[str, torch.Tensor]:
    """The weights of a model in memory under Hugging Face's names, in fp32 on the CPU, without
    padding."""
    weights = WeightsInMemory(dict(model.named_parameters()))
    return {
        one.name: one.read(weights, TensorSlice.whole(one.shape)) for one in gpt2_tensors(model)
    }
