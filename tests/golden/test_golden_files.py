"""Settings and presets as they were when someone last changed them on purpose.

`presets/gpt2-small.txt` is complete. The files of other presets and of recipes have the lines that
differ from it, so that a new setting changes two files and not thirty.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.units import Duration
from gristmill.cli.main import app
from gristmill.cli.verbs import FIRST_STEPS, VERBS
from gristmill.config.invalid import setting_paths
from gristmill.config.load import load_run, load_text, preset_names
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.plan.arithmetic import count_parameters

RUN = """\
name = "golden"
data.paths = "tokens/books"
train.until = "1k steps"
train.batch = 8
"""

Compare = Callable[[str, str], None]
COMPLETE = "gpt2-small"
RECIPES = Path(__file__).parents[2] / "recipes"


def flat(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else key)
    else:
        yield f"{path} = {str(value) if isinstance(value, Duration) else value!r}"


def test_the_list_of_settings(golden: Compare) -> None:
    golden("settings.txt", "".join(f"{'.'.join(path)}\n" for path in setting_paths()))


def resolved(config: RunConfig) -> str:
    """A run as sorted `path = value` lines, derived numbers included."""
    numbers = resolve(config, vocab=50257)
    derived = {
        **{field.name: getattr(numbers, field.name) for field in dataclasses.fields(numbers)},
        "parameters": count_parameters(config.model, rows=numbers.padded_vocab),
    }
    lines = [
        *flat(config.model_dump(mode="json", by_alias=True), ""),
        *(line for name, value in derived.items() for line in flat(value, f"resolved.{name}")),
    ]
    return "\n".join(sorted(lines)) + "\n"


def of_preset(name: str) -> str:
    return resolved(load_text(RUN, (f"preset={name}",), place="run.toml"))


def differing(text: str) -> str:
    """The lines that are not those of the complete file."""
    usual = set(of_preset(COMPLETE).splitlines())
    return "".join(f"{line}\n" for line in text.splitlines() if line not in usual)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_resolved(name: str, golden: Compare) -> None:
    text = of_preset(name)
    golden(f"presets/{name}.txt", text if name == COMPLETE else differing(text))


@pytest.mark.parametrize("name", [path.stem for path in RECIPES.glob("*.toml")])
def test_a_recipe_resolved(name: str, golden: Compare) -> None:
    golden(f"recipes/{name}.txt", differing(resolved(load_run(RECIPES / f"{name}.toml"))))


def test_the_first_steps(golden: Compare) -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0 and result.stderr == ""
    golden("first-steps.txt", result.stdout)


def test_the_first_steps_name_verbs_that_there_are() -> None:
    named = re.findall(r"gristmill ([a-z]+)", FIRST_STEPS)
    assert len(named) >= 8 and set(named) <= set(VERBS)


def test_there_is_one_file_for_every_preset() -> None:
    files = {path.stem for path in (Path(__file__).parent / "presets").glob("*.txt")}
    assert files == set(preset_names())


def test_a_difference_is_told_with_the_way_to_accept_it(
    golden: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRISTMILL_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError) as caught:
        golden("settings.txt", "name\nmore\n")
    message = str(caught.value)
    assert "+ more" in message and "- train.until" in message
    assert "GRISTMILL_UPDATE_GOLDEN=1 pytest tests/golden" in message
