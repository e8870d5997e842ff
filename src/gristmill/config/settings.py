"""What all tables of settings have in common."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import WithDefaultSchema

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


class FileSchema(GenerateJsonSchema):
    """The JSON Schema of files, in which whatever has a default may be `unset` too."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if isinstance(schema.get("default"), BaseModel) or "const" in made:
            return made
        default = {"default": made.pop("default")} if "default" in made else {}
        kinds = made["anyOf"] if set(made) == {"anyOf"} else [made]
        return {"anyOf": [*kinds, {"const": UNSET}], **default}


class Settings(BaseModel):
    """What all tables have in common: frozen, strict, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
