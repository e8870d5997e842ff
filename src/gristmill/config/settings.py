"""What all tables of settings have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from gristmill.base.errors import Problem

Path_ = tuple[str, ...]
"""Where a setting is: its table, and its name there."""

Broken = tuple[Path_, Problem]
"""A rule that settings break: the path of the setting to change, and what is wrong."""


class Settings(BaseModel):
    """What all tables have in common: frozen, strict, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
