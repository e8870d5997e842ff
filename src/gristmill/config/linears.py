"""The linear layers of a model: their shapes, and choosing some by name.

A pattern is a name with * and ? for any characters; the beginning of a name may be left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple

from pydantic import Field


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
