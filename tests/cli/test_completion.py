"""Completion of command lines in shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.cli import completion
from gristmill.cli.completion import complete
from gristmill.cli.main import load_verb
from gristmill.cli.verbs import VERBS
from gristmill.config.load import preset_names


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with two runs, one of a dangerous name, and a run file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("stories", "$(touch hacked)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.toml").touch()
    (tmp_path / "books.toml").touch()


def words(*line: str) -> list[str]:
    return [word for word, _ in complete(line[:-1], line[-1])]


def test_verbs() -> None:
    assert words("") == list(VERBS)
    assert words("pr") == ["prepare"]
    assert words("nothing", "") == []


def test_options() -> None:
    assert words("train", "--f") == ["--fresh", "--from", "--fit"]
    assert "--no-append-eod" in words("prepare", "--no")
    assert words("tokens", "ins") == ["inspect"]
    assert "--page" in words("tokens", "inspect", "--")


def test_launch_submits_by_default() -> None:
    assert "status" in words("launch", "st")
    assert words("launch", "--dry") == words("launch", "submit", "--dry") == ["--dry-run"]


def test_values() -> None:
    assert sorted(words("new", "--preset", "")) == sorted(preset_names())
    assert words("prepare", "--format", "meg") == ["megatron", "megatron-cached", "megatron-lazy"]
    assert words("new", "--gpu", "h100-8") == ["h100-80gb"]
    assert words("launch", "--on", "s") == words("launch", "submit", "--on", "s") == ["slurm"]
    assert words("generate", "runs/st") == ["runs/stories"]
    assert words("train", "b") == ["books.toml"]
    assert words("train", "books.toml", "--processes", "") == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_known(verb: str) -> None:
    def compare(command: object, *path: str) -> None:
        for parameter in command.params:  # type: ignore[attr-defined]
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert {*parameter.opts} <= {*words(*path, "-")}
        for name, inner in (getattr(command, "commands", None) or {}).items():
            compare(inner, *path, name)

    compare(load_verb(verb), verb)


def ask(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-X", "importtime", "-m", "gristmill"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_second_answer_needs_neither_typer_nor_torch() -> None:
    line = {"_GRISTMILL_COMPLETE": "complete_bash", "COMP_WORDS": "gristmill train --fr"}
    for _ in range(2):
        done = ask(**line, COMP_CWORD="2")
        assert done.stdout.split() == ["--fresh", "--from"]
    imported = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines()}
    assert "gristmill.cli.completion" in imported
    assert not imported & {"typer", "torch", "pydantic", "numpy"}


def test_the_forms_of_shells(tmp_path: Path) -> None:
    line = {"_TYPER_COMPLETE_ARGS": "gristmill generate runs/"}
    zsh = ask(_GRISTMILL_COMPLETE="complete_zsh", **line)
    assert zsh.stdout == '_arguments \'*: :(("runs/stories":""))\'\n'
    fish = ask(_GRISTMILL_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args", **line)
    assert fish.stdout == "runs/stories\t\n"
    nothing = {**line, "_TYPER_COMPLETE_ARGS": "gristmill generate x"}
    assert ask(_GRISTMILL_COMPLETE="complete_zsh", **nothing).stdout == "_files\n"
    fish = ask(
        _GRISTMILL_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="is-args", **nothing
    )
    assert fish.returncode == 1


NO_DETECTION = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
"""typer asks which shell is its parent; tests may have none."""


def test_the_script_that_is_installed_works_in_bash(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    program = tmp_path / "gristmill"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gristmill "$@"\n')
    program.chmod(0o755)
    code = (
        f"import sys; sys.argv = ['{program}', '--show-completion', 'bash']\n"
        "from gristmill.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **NO_DETECTION}
    script = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    assert "_GRISTMILL_COMPLETE=complete_bash" in script
    asked = f"""
        {script}
        COMP_WORDS=(gristmill serve runs/s) COMP_CWORD=2
        _gristmill_completion {program}
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
    assert done.stdout.split() == ["runs/stories"] and not (tmp_path / "hacked").exists()


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    assert words("doctor", "--cl") == ["--cluster"]
    for content in ("", "[]", '{"version": "x"}', "{"):
        (tmp_path / "cache" / "gristmill" / "completion.json").write_text(content)
        assert words("doctor", "--cl") == ["--cluster"]


def test_help_that_shells_would_evaluate_is_made_plain() -> None:
    assert completion._sanitize('Run `rm` on "$HOME"; it\'s (done)') == "Run rm on HOME its (done)"
    assert len(completion._sanitize("word " * 100)) <= 61


def test_the_first_answer_needs_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once completion is installed; and it is installed for `gristmill` however that is called."""
    environment = {**os.environ, **NO_DETECTION, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "gristmill", "--install-completion", "bash"]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert (tmp_path / ".bash_completions" / "gristmill.sh").is_file()
    monkeypatch.setattr("gristmill.cli.main.load_verb", None)
    assert words("train", "--fre") == ["--fresh"]
    assert words("tokens", "ins") == ["inspect"]
