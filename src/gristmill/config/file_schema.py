"""The JSON Schema of run files, with which editors complete and check them.

It describes the file alone, not the settings that result from a file and its preset:

    "unset"           is valid wherever there is a default
    [model]           needs no keys if there is a preset; otherwise it needs the sizes, weights to
                      start from, or the model of another library
    [optim], …        without `type` accept the keys of every type, since the preset may set it
    null              is omitted, since TOML has none

Rules between settings, such as a width that the heads must divide, are not part of the schema.
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
    settings = RunConfig.model_json_schema(by_alias=True, schema_generator=_FileSchema)
    schema: dict[str, Any] = _file_form(settings)
    sizes = schema["$defs"]["GPTConfig"].pop("required")
    alternatives = [{"required": sizes}, {"required": ["start"]}, {"required": ["hf"]}]
    preset = schema["properties"]["preset"]
    preset["anyOf"] = [{"enum": preset_names()}, {"const": UNSET}]
    schema["required"] = [key for key in schema["required"] if key != "model"]
    schema["anyOf"] = [
        {"required": ["preset"]},
        {"required": ["model"], "properties": {"model": {"anyOf": alternatives}}},
    ]
    return {"$schema": DRAFT, **schema, "title": "A run file of Gristmill"}


class _FileSchema(GenerateJsonSchema):
    """Adds docstrings, and accepts "unset" for every setting with a default."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        json_schema = super().default_schema(schema)
        if isinstance(schema.get("default"), BaseModel) or "const" in json_schema:
            return json_schema
        default = {"default": json_schema.pop("default")} if "default" in json_schema else {}
        kinds = json_schema["anyOf"] if set(json_schema) == {"anyOf"} else [json_schema]
        return {"anyOf": [*kinds, {"const": UNSET}], **default}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        table: type[BaseModel] = schema["cls"]
        for key, text in docstrings(table).items():
            json_schema["properties"][key]["description"] = text
        return json_schema


def _file_form(value: Any) -> Any:
    """Remove what does not apply to files: null, defaults of whole tables, and discriminators, as a
    preset may set the type of a table."""
    if isinstance(value, list):
        return [_file_form(item) for item in value if item != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    json_schema = {key: _file_form(item) for key, item in value.items() if key != "discriminator"}
    if "oneOf" in json_schema:
        json_schema["anyOf"] = json_schema.pop("oneOf")
    if {"const": UNSET} in json_schema.get("anyOf", ()):
        json_schema = _or_unset(json_schema)
    if "default" in json_schema and (
        json_schema["default"] is None or isinstance(json_schema["default"], dict)
    ):
        del json_schema["default"]
    return json_schema


def _or_unset(json_schema: dict[str, Any]) -> dict[str, Any]:
    """Merge a value and "unset" into one schema if possible, since editors list a key once for each
    alternative. `minimum` and the like do not apply to strings, and `pattern` only to strings."""
    kinds = [kind for kind in json_schema["anyOf"] if kind != {"const": UNSET}]
    rest = {key: value for key, value in json_schema.items() if key != "anyOf"}
    if {"type": "string"} in kinds:  # any string is valid, also "unset"
        return {**rest, "anyOf": kinds} if len(kinds) > 1 else {**kinds[0], **rest}
    if len(kinds) > 1:
        return json_schema
    kind = dict(kinds[0])
    if "enum" in kind or "const" in kind:
        values = kind.pop("enum", None) or [kind.pop("const")]
        kind.pop("type", None)
        return {**kind, **rest, "enum": [*values, UNSET]}
    match kind.get("type"):
        case "string":
            # Every restricted string of run files has a pattern.
            return {**kind, **rest, "pattern": f"{kind['pattern']}|^{UNSET}$"}
        case "integer" | "number" | "boolean" | "array" as value_type:
            return {**kind, **rest, "type": [value_type, "string"], "pattern": f"^{UNSET}$"}
    return json_schema
