"""Every setting is documented, for people and for editors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gristmill.base.errors import UserError
from gristmill.config.documentation import FileSchema, docstrings
from gristmill.config.load import dump_run, load_text, setting_paths
from gristmill.config.schema import RunConfig

RUN = """\
name = "trial"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "10k steps"
train.batch = 12
train.time_limit = "3h30m"
sample.every = "100 steps"
track.wandb.project = "mill"
precision.compute = "fp16"
precision.loss_scale.window = 100
schedule.type = "warmup-stable-decay"
schedule.warmup = "2k steps"
"""


def tables(model: type[BaseModel] = RunConfig) -> set[type[BaseModel]]:
    """A settings class and every one that stands inside it."""
    found = {model}
    options: list[Any] = [info.annotation for info in model.model_fields.values()]
    while options:
        option = options.pop()
        options += get_args(option)
        if isinstance(option, type) and issubclass(option, BaseModel):
            found |= tables(option)
    return found


def objects(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [schema, *schema["$defs"].values()]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(
        json.dumps(RunConfig.model_json_schema(by_alias=True, schema_generator=FileSchema))
    )


def test_every_setting_and_table_has_a_docstring() -> None:
    bare = [
        f"{table.__name__}.{name}"
        for table in tables()
        for name, info in table.model_fields.items()
        if not docstrings(table).get(info.alias or name)
    ]
    assert bare == []
    assert [table.__name__ for table in tables() if not table.__doc__] == []
    assert len(tables()) >= 19


def test_descriptions_are_sentences() -> None:
    unfinished = [
        f"{table.__name__}.{key}: {text}"
        for table in tables()
        for key, text in docstrings(table).items()
        if not text.endswith((".", '"'))
    ]
    assert unfinished == []


def test_every_property_of_the_json_schema_has_a_description(schema: dict[str, Any]) -> None:
    def described(reference: str) -> bool:
        target = schema["$defs"].get(reference.removeprefix("#/$defs/"), {})
        return bool(target.get("description"))

    bare = [
        f"{part.get('title')}.{name}"
        for part in objects(schema)
        for name, value in part.get("properties", {}).items()
        if not (value.get("description") or described(value.get("$ref", "")))
    ]
    assert bare == []


def test_the_json_schema_forbids_unknown_keys(schema: dict[str, Any]) -> None:
    parts = [part for part in objects(schema) if part["type"] == "object"]
    assert len(parts) == len(tables())
    assert all(part["additionalProperties"] is False for part in parts)
    assert schema["required"] == ["name", "model", "data", "train"]


def test_every_reference_of_the_json_schema_leads_somewhere(schema: dict[str, Any]) -> None:
    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "$ref":
                    yield inner
                elif key == "mapping":
                    yield from inner.values()
                else:
                    yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = {reference.removeprefix("#/$defs/") for reference in references(schema)}
    assert found == set(schema["$defs"])


def test_the_json_schema_and_the_program_know_the_same_settings(schema: dict[str, Any]) -> None:
    def paths(part: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, value in part["properties"].items():
            options, inner = [value], []
            while options:
                option = options.pop()
                options += [*option.get("anyOf", ()), *option.get("oneOf", ())]
                options += [option["items"]] if isinstance(option.get("items"), dict) else []
                inner += [option["$ref"]] if "$ref" in option else []
            if not inner:
                yield (*path, name)
            for reference in inner:
                yield from paths(schema["$defs"][reference.split("/")[-1]], (*path, name))

    assert set(paths(schema)) == set(setting_paths())


def test_setting_paths_are_what_a_user_writes() -> None:
    paths = setting_paths()
    assert len(paths) == len(set(paths))
    assert {("name",), ("optim", "lr"), ("validate", "every"), ("schedule", "power")} < set(paths)
    assert ("precision", "loss_scale", "window") in paths
    assert not any(path[0] == "validation" for path in paths)


def test_every_setting_of_a_written_run_is_a_known_path() -> None:
    def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, value in table.items():
            if isinstance(value, dict):
                yield from leaves(value, (*path, key))
            else:
                yield (*path, key)

    written = tomllib.loads(dump_run(load_text(RUN, place="run.toml")))
    assert set(leaves(written)) <= set(setting_paths())


def test_the_json_schema_accepts_and_refuses_run_files(schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    good = tomllib.loads(dump_run(load_text(RUN, place="run.toml")))
    jsonschema.validate(good, schema)
    for wrong in ({"train": {**good["train"], "until": 5}}, {"nmae": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, **wrong}, schema)


def test_an_error_needs_no_source_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(owner: type) -> str:
        raise OSError("could not get source code")

    with pytest.raises(UserError, match="Samples per step"):
        load_text(RUN, ["train.batch=x"], place="run.toml")
    docstrings.cache_clear()
    monkeypatch.setattr("inspect.getsource", missing)
    with pytest.raises(UserError, match="valid integer") as caught:
        load_text(RUN, ["train.batch=x"], place="run.toml")
    assert "Samples per step" not in str(caught.value)
    docstrings.cache_clear()
