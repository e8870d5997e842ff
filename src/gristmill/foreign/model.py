"""A model in files of another program, under our names and in our layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gristmill.base.errors import DataError, Problem
from gristmill.config.model import GPTConfig
from gristmill.foreign.torch_file import LazyTensor


@dataclass(frozen=True)
class ImportedModel:
    """What an import has found."""

    program: str
    """The program that wrote it."""
    origin: Path
    """The file or folder that holds the weights."""
    config: GPTConfig
    tensors: Mapping[str, LazyTensor]
    """Under our names; all rows of the vocabulary that the file has, padding included."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


def model_config(
    settings: Mapping[str, object], names: Mapping[str, str], *, where: Path
) -> GPTConfig:
    """Our settings, from theirs; `names` has what they call them, for messages."""
    try:
        config = GPTConfig.model_validate(dict(settings))
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            ours = ".".join(map(str, problem["loc"]))
            message = problem["msg"][0].lower() + problem["msg"][1:]
            shown = (
                repr(problem["input"]) if isinstance(problem["input"], int | float | str) else "it"
            )
            problems.append(Problem(f"{names.get(ours, ours)}: {shown}: {message}", str(where)))
        raise DataError(problems) from error
    uneven = (config.head_width is None and config.width % config.heads) or (
        config.heads % config.groups
    )
    if uneven or (config.positions == "rotary" and config.rotated % 2):
        what = (
            f"no model has these sizes: width {config.width}, {config.heads} heads, "
            f"{config.groups} key and value heads"
        )
        raise DataError(what, where=where)
    return config
