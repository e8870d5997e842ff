"""The JSON Schema of run files, by which editors complete and check them.

It describes a file, not the settings that a file and a preset make together:

    "unset"           may stand wherever there is a default
    [model]           needs nothing where there is a preset, since that has it; otherwise a size,
                      weights to start from, or the model of another library
    [optim], …        without a `type` have the keys of any type, since the preset may name it
    null              is left out, since TOML has none

What only the rules between settings find, such as heads that do not divide the width, it accepts.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema, WithDefaultSchema

from gristmill.config.documentation import docstrings
from gristmill.config.load import preset_names
from gristmill.config.schema import RunConfig
from gristmill.config.settings import UNSET

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def run_file_schema() -> dict[str, Any]:
    """The schema of a whole run file."""
    made = RunConfig.model_json_schema(by_alias=True, schema_generator=_FileSchema)
    schema: dict[str, Any] = _for_files(made)
    sizes = schema["$defs"]["GPTConfig"].pop("required")
    ways = [{"required": sizes}, {"required": ["start"]}, {"required": ["hf"]}]
    preset = schema["properties"]["preset"]
    preset["anyOf"] = [{"enum": preset_names()}, {"const": UNSET}]
    schema["required"] = [key for key in schema["required"] if key != "model"]
    schema["anyOf"] = [
        {"required": ["preset"]},
        {"required": ["model"], "properties": {"model": {"anyOf": ways}}},
    ]
    return {"$schema": DRAFT, **schema, "title": "A run file of Gristmill"}


class _FileSchema(GenerateJsonSchema):
    """With the docstrings, and with `unset` for whatever has a default."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if isinstance(schema.get("default"), BaseModel) or "const" in made:
            return made
        default = {"default": made.pop("default")} if "default" in made else {}
        kinds = made["anyOf"] if set(made) == {"anyOf"} else [made]
        return {"anyOf": [*kinds, {"const": UNSET}], **default}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        table: type[BaseModel] = schema["cls"]
        for key, text in docstrings(table).items():
            made["properties"][key]["description"] = text
        return made


def _for_files(value: Any) -> Any:
    """Without what only programs need: null, defaults of whole tables, and marks that tell tables
    apart, which a file may leave to its preset."""
    if isinstance(value, list):
        return [_for_files(one) for one in value if one != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    made = {key: _for_files(one) for key, one in value.items() if key != "discriminator"}
    if "oneOf" in made:
        made["anyOf"] = made.pop("oneOf")
    if {"const": UNSET} in made.get("anyOf", ()):
        made = _or_unset(made)
    if "default" in made and (made["default"] is None or isinstance(made["default"], dict)):
        del made["default"]
    return made


def _or_unset(made: dict[str, Any]) -> dict[str, Any]:
    """A value or "unset" in one piece where that can be said, since editors list a key once for
    each of several. `minimum` and the like say nothing of text, and `pattern` of nothing else."""
    kinds = [kind for kind in made["anyOf"] if kind != {"const": UNSET}]
    rest = {key: value for key, value in made.items() if key != "anyOf"}
    if {"type": "string"} in kinds:  # any text is right, and this one too
        return {**rest, "anyOf": kinds} if len(kinds) > 1 else {**kinds[0], **rest}
    if len(kinds) > 1:
        return made
    kind = dict(kinds[0])
    if "enum" in kind or "const" in kind:
        values = kind.pop("enum", None) or [kind.pop("const")]
        kind.pop("type", None)
        return {**kind, **rest, "enum": [*values, UNSET]}
    match kind.get("type"):
        case "string":
            # Every text of run files that is not just any text has a pattern.
            return {**kind, **rest, "pattern": f"{kind['pattern']}|^{UNSET}$"}
        case "integer" | "number" | "boolean" | "array" as own:
            return {**kind, **rest, "type": [own, "string"], "pattern": f"^{UNSET}$"}
    return made
