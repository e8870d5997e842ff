"""File names that are not UTF-8, as from a disk of another system: each command works, or says in
one line what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, require_utf8, write_json
from gristmill.config.load import load_text

Gristmill = Callable[..., subprocess.CompletedProcess[str]]
NAME = os.fsdecode(b"caf\xe9")
SHOWN = "caf\\udce9"
RUN = """
name = "tiny"
folder = "run"
model = { layers = 1, heads = 2, width = 16, context = 16 }
data = { paths = "set", split = "90,10" }
train = { until = "2 steps", batch = 4 }
optim.lr = 1e-3
checkpoint.every = "2 steps"
runtime = { device = "cpu", threads = 1 }
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        Path(NAME).mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    Path(NAME, f"{NAME}.txt").write_text("some text to prepare, and a little more of it\n" * 50)


def clear_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error, without its remedy."""
    assert done.returncode not in (0, 1, Exit.INTERNAL), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    return errors[0]


def test_text_and_token_files_may_have_any_name(gristmill: Gristmill) -> None:
    prepare = ("prepare", NAME, "-t", "bytes")
    assert gristmill(*prepare, "-o", "set").returncode == 0
    done = gristmill(*prepare, "-o", f"out/{NAME}", "--parts", "2", "--engine", "local", "--json")
    assert done.returncode == 0, done.stderr
    assert NAME in json.dumps(json.loads(done.stdout), ensure_ascii=False)
    for ending in (".bin", ".starts"):
        assert Path(f"out/{NAME}{ending}").read_bytes() == Path(f"set{ending}").read_bytes()
    assert gristmill("tokens", "inspect", f"out/{NAME}").returncode == 0
    assert SHOWN in clear_error(gristmill("tokens", "inspect", f"no-{NAME}"))
    done = gristmill("tokens", "merge", "set", f"out/{NAME}", "-o", f"both-{NAME}")
    assert done.returncode == 0, done.stderr


def test_a_run_file_may_have_any_name_and_a_run_folder_not(gristmill: Gristmill) -> None:
    assert gristmill("prepare", NAME, "-t", "bytes", "-o", "set").returncode == 0
    file = f"{NAME}.toml"
    Path(file).write_text(RUN)
    done = gristmill("train", file)
    assert done.returncode == 0, done.stderr
    assert SHOWN in Path("run/origin.txt").read_text()
    done = gristmill("evaluate", "run", "--text", f"{NAME}/{NAME}.txt")
    assert done.returncode == 0, done.stderr
    done = gristmill("report", "run", "-o", f"{NAME}.html")
    assert done.returncode == 0, done.stderr
    for words in (f"folder={NAME}", f"data.paths={NAME}"):
        assert "is not UTF-8 text" in clear_error(gristmill("train", file, words))
    shutil.copytree("run", f"run-{NAME}")
    for command in (
        ("report", f"run-{NAME}"),
        ("evaluate", f"run-{NAME}"),
        ("generate", f"run-{NAME}", "some"),
        ("export", f"run-{NAME}", "exported"),
        ("export", "run", f"exported-{NAME}"),
        ("launch", "status", f"run-{NAME}"),
    ):
        said = clear_error(gristmill(*command))
        assert "this path is not UTF-8 text" in said and SHOWN in said, command


def test_a_record_of_such_a_name_gives_it_back(tmp_path: Path) -> None:
    write_json(tmp_path / "record", {"name": NAME})
    assert (tmp_path / "record").read_bytes().decode() == f'{{\n  "name": "{SHOWN}"\n}}\n'
    assert read_json(tmp_path / "record") == {"name": NAME}


def test_settings_are_utf8() -> None:
    with pytest.raises(UserError, match="is not UTF-8 text, and all settings are"):
        load_text(RUN, [f"folder={NAME}"], place="run.toml")
    with pytest.raises(UserError, match="this path is not UTF-8 text"):
        require_utf8(Path(NAME))
    assert require_utf8(Path("café")) == Path("café")
