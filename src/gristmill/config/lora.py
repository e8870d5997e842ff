"""Settings of LoRA: a frozen model, and small trained matrices beside some of its linear layers.

    y = W x + b + (alpha / rank) B A dropout(x)     A: rank x inputs, random   B: outputs x rank, 0

Only linear layers inside blocks can be adapted. The head and the embeddings are computed by other
kernels, which read their weights directly.

The linear layers of a model: their shapes, and choosing some by name.

A pattern is a name with * and ? for any characters; the beginning of a name may be left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from gristmill.base.errors import Problem
from gristmill.config.settings import Count, Fraction, Settings


class LinearShape(NamedTuple):
    """The shape of a linear layer."""

    inputs: int
    parts: tuple[int, ...]
    """Outputs of each of the matrices that are stacked in its weight; usually one."""
    biased: bool

    @property
    def outputs(self) -> int:
        return sum(self.parts)


LayerPatterns = Annotated[tuple[str, ...], Field(strict=False)]

_MOST_NAMED = 8
"""How many kinds of layers a message names."""


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern stands for a layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def nearest_layers(pattern: str, layers: Iterable[str]) -> str:
    """Which layers there are, those with the most similar names first."""
    # Blocks differ in their number only.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers))
    if not kinds:
        return "it has none"
    end = pattern.rpartition(".")[2]
    kinds.sort(
        key=lambda kind: -difflib.SequenceMatcher(None, end, kind.rpartition(".")[2]).ratio()
    )
    more = f" and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
    return f"there are: {', '.join(kinds[:_MOST_NAMED])}{more}"


class LoraConfig(Settings):
    """Train low-rank adapters of the linear layers, and leave the weights themselves as they are.
    Checkpoints then hold the adapters only."""

    rank: Count
    """Rows of A and columns of B, such as 16; at most the inputs and outputs of each layer."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The output of adapters is scaled by alpha / rank; twice the rank if not given."""
    dropout: Fraction = 0.0
    """Dropout on the input of the adapters, in training."""
    layers: Annotated[LayerPatterns, Field(min_length=1)] = ("*",)
    """Which linear layers of the blocks to adapt: names, or patterns with * and ?. The beginning of
    a name may be left out: "qkv" stands for "blocks.*.attention.qkv". All if not given. The head
    and the embeddings are never adapted."""

    @property
    def scale(self) -> float:
        """What adapters are multiplied by."""
        return self.effective_alpha / self.rank

    @property
    def effective_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def identity(self) -> dict[str, Any]:
        """Settings that a resumed run must share with the run that wrote the checkpoint."""
        return {"rank": self.rank, "alpha": self.effective_alpha, "layers": list(self.layers)}

    def chosen(self, name: str) -> bool:
        """Whether a linear layer inside a block is adapted."""
        return any(matches(name, pattern) for pattern in self.layers)

    def problems(self, layers: Mapping[str, LinearShape]) -> Iterator[Problem]:
        """Why layers, by name, cannot be adapted like this."""
        for pattern in self.layers:
            if not any(matches(name, pattern) for name in layers):
                what = f"{pattern!r} matches no linear layer in a block of this model"
                yield Problem(what, "model.lora.layers", nearest_layers(pattern, layers))
        for name, shape in layers.items():
            least = min(shape.inputs, shape.outputs)
            if self.chosen(name) and self.rank > least:
                sizes = f"{shape.inputs} inputs, {shape.outputs} outputs"
                what = f"{self.rank} is more than {name} has: {sizes}"
                remedy = f"give at most {least}, or leave this layer out of model.lora.layers"
                yield Problem(what, "model.lora.rank", remedy)
                return
