"""The pages hang together: every one is in the navigation, and the generated ones are complete."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from gristmill.base.errors import Exit
from gristmill.config.invalid import setting_paths
from gristmill.track.records import Record

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = load("generate")


def settings() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def in_navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from [value] if isinstance(value, str) else in_navigation(value)


def test_every_page_is_in_the_navigation() -> None:
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = list(in_navigation(settings()["nav"]))
    assert set(listed) == written | set(GENERATE.PAGES)
    assert len(listed) == len(set(listed))


def test_generated_pages_are_not_kept() -> None:
    assert [page for page in GENERATE.PAGES if (DOCS / page).exists()] == []


def test_nothing_is_fetched_from_elsewhere() -> None:
    values = settings()
    assert values["theme"]["font"] is False
    assert "extra_javascript" not in values
    assert [file for file in values["extra_css"] if not (DOCS / file).is_file()] == []


def test_every_setting_is_in_the_reference() -> None:
    sections = re.split(r"^## ", GENERATE.settings_page(), flags=re.MULTILINE)[1:]
    pages = {section.partition("\n")[0].strip("`[]"): section for section in sections}
    for *table, key in setting_paths():
        section = pages[".".join(table) if table else "The top of the file"]
        assert f"| `{key}` |" in section


def test_every_record_is_in_the_tables() -> None:
    tables = GENERATE.metrics_tables()
    for record in get_args(Record):
        assert f'"kind": "{record.kind}"' in tables
        for field in dataclasses.fields(record):
            assert f"| `{field.name}` |" in tables


def test_every_command_is_in_the_reference() -> None:
    page = GENERATE.cli_page()
    for verb in ("demo", "prepare", "tokens inspect", "tokenizer train", "train", "doctor"):
        assert f"\n## {verb}\n" in page
    assert "| `--vocab-size`, `-n` | `32768` |" in page
    explained = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert explained >= {int(status) for status in Exit}


def test_the_tables_of_the_generated_pages_are_well_formed() -> None:
    texts = (*(make() for make in GENERATE.PAGES.values()), GENERATE.metrics_tables())
    for block in (block for text in texts for block in text.split("\n\n")):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) <= 1, block


def test_every_decision_is_listed_and_has_its_parts() -> None:
    index = (DOCS / "decisions/index.md").read_text(encoding="utf-8")
    records = sorted((DOCS / "decisions").glob("0*.md"))
    assert [record.name[:4] for record in records] == [
        f"{n:04d}" for n in range(1, len(records) + 1)
    ]
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert f"]({record.name})" in index
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequences",
        ]


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference/settings.html").is_file()
    guide = (tmp_path / "guides/tracking-and-reports.html").read_text(encoding="utf-8")
    assert "tokens_per_second" in guide
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', guide)
    assert loaded == []
    assert not list(tmp_path.rglob("*.py"))


def test_what_the_page_on_the_architecture_names_is_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` `(\w+)` \|", text, re.MULTILINE)
    assert len(rows) == 25, "five names for each of five flows"
    for path, name in rows:
        code = (ROOT / "src/gristmill" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b", code, re.MULTILINE), (path, name)
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / "src/gristmill" / path).is_file(), path


def test_the_index_for_programs_lists_every_page() -> None:
    index = GENERATE.page_index(settings())
    assert index.startswith("# Gristmill\n\n> Text in")
    for page in in_navigation(settings()["nav"]):
        link = f"({page.removesuffix('.md')}.html): "
        (line,) = [line for line in index.splitlines() if link in line]
        assert line.partition("): ")[2], f"{page} says nothing of itself"


def test_the_schema_is_one_of_run_files() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(GENERATE.schema_file())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) >= {"model", "data", "train", "optim", "precision"}
