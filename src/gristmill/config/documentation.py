"""What the code says about settings: their docstrings, and the JSON Schema of run files.

The docstrings below the attributes of a class, which Python itself forgets.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema, WithDefaultSchema

from gristmill.config.settings import UNSET, Settings


def attribute_docstrings(owner: type) -> dict[str, str]:
    """By attribute, from the source of the class; those of its bases are not among them. None if
    the source is not there, as in an installation of bytecode alone."""
    try:
        source = inspect.getsource(owner)
    except OSError:
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in pairwise(definition.body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


@cache
def docstrings(table: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings below the fields of a table, by their keys in a run file."""
    owners = [owner for owner in reversed(table.__mro__) if issubclass(owner, Settings)]
    found = {name: text for one in owners for name, text in attribute_docstrings(one).items()}
    fields = table.model_fields
    return {fields[name].alias or name: text for name, text in found.items() if name in fields}


class FileSchema(GenerateJsonSchema):
    """The JSON Schema of files, in which whatever has a default may be `unset` too."""

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
