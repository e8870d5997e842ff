"""The README tells the truth: commands run, links lead somewhere, tables are complete."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
RUNS = re.compile(r"<!-- runs -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def test_every_verb_of_the_tour_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gristmill: Callable[..., Any]
) -> None:
    """A shell runs what is more than commands of ours."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for block in RUNS.findall(README):
        lines = block.splitlines()
        ours = all(line.startswith("gristmill ") for line in lines)
        for done in (gristmill(*words(line)[1:]) for line in lines) if ours else [run(block)]:
            # `doctor` ends with 1 where the machine itself lacks something.
            allowed = (0, 1) if done.args[-1] == "doctor" else (0,)
            assert done.returncode in allowed, f"{done.args}\n{done.stdout}\n{done.stderr}"
    run_folder = tmp_path / "runs/text"
    assert (run_folder / "report.html").is_file()
    assert (run_folder / "checkpoints/step-00000030/MANIFEST").is_file()
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert list((run_folder / "evals").iterdir())


def test_the_run_folder_is_drawn_as_it_is(tmp_path: Path) -> None:
    from gristmill.track.folder import RunFolder

    page = (ROOT / "docs/guides/run-folder.md").read_text(encoding="utf-8")
    drawing = page.partition("runs/tour/\n")[2].partition("```")[0]
    folder = RunFolder(tmp_path)
    places = (
        *(folder.settings, folder.origin, folder.environment, folder.log, folder.metrics),
        *(folder.status, folder.tokenizer, folder.checkpoints, folder.evals, folder.samples),
        folder.report,
    )
    assert [place.name for place in places if f" {place.name}" not in drawing] == []


def test_the_tour_shows_all_verbs_it_should() -> None:
    shown = "".join(RUNS.findall(README))
    verbs = ("new", "prepare", "train", "evaluate", "generate", "export", "report")
    for verb in (*verbs, "config", "doctor"):
        assert f"gristmill {verb}" in shown


def test_every_package_is_among_the_rooms() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tree = page.partition("## Rooms")[2].partition("\n## ")[0]
    package = ROOT / "src/gristmill"
    names = [f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").is_file()]
    names += [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    assert [name for name in names if f"─ {name} " not in tree] == []


def test_every_promise_is_answered() -> None:
    page = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
    for number in range(1, 11):
        assert page.count(f"**P{number} ") == 1


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = ROOT / path if path else ROOT / page
        assert file.is_file(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page} links to {target}"


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def run(block: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "PATH": path}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        env={**os.environ, **offline},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def anchors(file: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}
