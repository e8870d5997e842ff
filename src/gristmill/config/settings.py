"""What all tables of settings have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from gristmill.base.errors import Problem

Path_ = tuple[str, ...]
"""Where a setting is: its table, and its name there."""

Written = Collection[Path_]
"""Settings that the user wrote, as opposed to a preset's."""

UNSET = "unset"
"""Written in the place of a value: takes away what lower layers say, so that the default counts."""


@dataclass(frozen=True)
class NoEffect(Problem):
    """A setting that would do nothing: refused if the user wrote it, dropped if a preset did."""


def no_effect(setting: str, why: str, remedy: str = "remove it") -> NoEffect:
    """The problem of a setting, by its path, that would do nothing."""
    return NoEffect(f"has no effect {why}", setting, remedy)


class Settings(BaseModel):
    """What all tables have in common: frozen, strict, no unknown keys. The docstrings below their
    fields are read when they are asked for (`documentation.py`), not at every start."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )
