"""What is written in several places is the same in all of them: versions and dependencies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
"""What conda-forge calls a package."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version() -> None:
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert f'version: "{version}"' in read("conda/recipe.yaml")
    assert f"\n## [{version}]" in read("CHANGELOG.md")


def test_the_recipe_for_conda_needs_what_the_package_needs() -> None:
    yaml = pytest.importorskip("yaml")
    recipe: dict[str, Any] = yaml.safe_load(read("conda/recipe.yaml"))
    needed = {_named(one) for one in PROJECT["dependencies"]}
    listed = set(recipe["requirements"]["run"])
    assert listed == needed | {f"python {PROJECT['requires-python']}"}


def _named(dependency: str) -> str:
    name, minimum = re.fullmatch(r"([\w-]+)(>=.+)", dependency).groups()  # type: ignore[union-attr]
    return f"{CONDA.get(name, name)} {minimum}"


def test_the_lock_file_is_of_these_dependencies() -> None:
    locked = set(re.findall(r"^([\w.-]+)==", read("requirements.lock"), re.MULTILINE))
    assert {re.split(r"[>=<\[]", one)[0] for one in PROJECT["dependencies"]} <= locked
    (torch,) = re.findall(r"^torch==(\S+)", read("requirements.lock"), re.MULTILINE)
    assert f"torch=={torch}" in read("constraints.txt")


def test_workflows_and_templates_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) > 6
    for file in files:
        assert yaml.safe_load(file.read_text(encoding="utf-8")), file
