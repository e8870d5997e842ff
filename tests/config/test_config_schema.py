"""Every setting is documented, for people and for editors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gristmill.base.errors import UserError
from gristmill.config.documentation import docstrings
from gristmill.config.file_schema import DRAFT, run_file_schema
from gristmill.config.invalid import setting_paths
from gristmill.config.load import dump_run, load_preset, load_text, preset_names
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
    return json.loads(json.dumps(run_file_schema()))


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
    assert schema["required"] == ["name", "data", "train"]


def test_every_reference_of_the_json_schema_leads_somewhere(schema: dict[str, Any]) -> None:
    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "$ref":
                    yield inner
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


@pytest.fixture(scope="module")
def valid(schema: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """Whether an editor would accept a run file."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid


Valid = Callable[[dict[str, Any]], bool]
SHORT = tomllib.loads(RUN)
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_editors_accept_complete_files_and_refuse_wrong_ones(valid: Valid) -> None:
    good = tomllib.loads(dump_run(load_text(RUN, place="run.toml")))
    assert valid(good)
    assert not valid({**good, "train": {**good["train"], "until": 5}})
    assert not valid({**good, "nmae": "x"})


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_editors_accept_recipes_and_refuse_a_wrong_key_in_them(file: Path, valid: Valid) -> None:
    recipe = tomllib.loads(file.read_text(encoding="utf-8"))
    assert valid(recipe)
    for name, table in recipe.items():
        if isinstance(table, dict):
            assert not valid({**recipe, name: {**table, "bacth": 8}}), name


@pytest.mark.parametrize("name", preset_names())
def test_editors_accept_presets_by_name_and_in_full(name: str, valid: Valid) -> None:
    tables = {key: table for key, table in load_preset(name).items() if key != "train"}
    train = {**SHORT["train"], **load_preset(name).get("train", {})}
    rest = {"name": "x", "data": {"paths": "tokens/x"}, "train": train}
    assert valid({**rest, **tables})
    assert valid({**rest, "preset": name})


def test_editors_know_what_a_file_must_say(valid: Valid) -> None:
    rest = {"name": "x", "data": {"paths": "tokens/x"}, "train": {"until": "1 step"}}
    sizes = {"layers": 1, "heads": 1, "width": 8, "context": 8}
    assert not valid(rest)
    assert not valid({**rest, "model": {"layers": 1}})
    for model in (sizes, {"start": "runs/other"}, {"hf": "org/name"}):
        assert valid({**rest, "model": model})
    assert not valid({**rest, "preset": "gpt2-smal"})
    # A preset may say which optimizer a rate is for; a type that is named decides its keys.
    assert valid({**rest, "preset": "modern-nano", "optim": {"lr": 0.1}})
    assert not valid({**rest, "preset": "modern-nano", "optim": {"type": "sgd", "head_lr": 0.1}})


@pytest.mark.parametrize(
    ("setting", "right", "wrong"),
    [
        (("train", "until"), ["1 step", "2.5B tokens", "1_000 samples"], ["3h", "1e3 steps", 5]),
        (("train", "time_limit"), ["3h30m", "90s", "1d", "unset"], ["3 hours", "10 steps", 3600]),
        (("checkpoint", "every"), ["15m", "500 steps"], ["often", "15", 15]),
        (("checkpoint", "timeout"), ["30s"], ["30"]),
    ],
)
def test_editors_know_durations(
    setting: tuple[str, str], right: list[Any], wrong: list[Any], valid: Valid
) -> None:
    table, key = setting
    for value in (*right, *wrong):
        changed = {**SHORT, table: {**SHORT.get(table, {}), key: value}}
        assert valid(changed) is (value in right), value


def test_editors_know_unset_in_every_kind_of_value(valid: Valid, schema: dict[str, Any]) -> None:
    kinds = {
        ("train", "batch"): ["unset", 8],
        ("train", "sampled_softmax"): ["unset", 64],
        ("precision", "compute"): ["unset", "bf16"],
        ("runtime", "compile"): ["unset", True, "blocks"],
        ("runtime", "kernels"): ["unset", False],
        ("runtime", "offload"): ["unset", "optimizer"],
        ("precision", "fp8"): ["unset", ["head"]],
        ("checkpoint", "every"): ["unset", "15m"],
        ("schedule", "warmup"): ["unset", 0.1, "2k steps"],
        ("data", "validation"): ["unset", "tokens/x", ["tokens/x"], {"tokens/x": 2}],
    }
    for (table, key), right in kinds.items():
        for value in (*right, -1, "Unset" if key != "validation" else [3]):
            changed = {**SHORT, table: {**SHORT.get(table, {}), key: value}}
            assert valid(changed) is (value in right), (table, key, value)
    # An editor lists a key once for each of several alternatives.
    several = [
        key
        for key, value in schema["$defs"]["TrainConfig"]["properties"].items()
        if len(value.get("anyOf", ())) > 1
    ]
    assert several == ["ramp", "guard"]


def test_the_json_schema_names_its_draft_and_has_no_null(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == DRAFT
    assert '"null"' not in json.dumps(schema)
    assert ": null" not in json.dumps(schema)


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
