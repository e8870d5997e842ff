"""Caches that make the next start quicker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.base import caches

SCRIPT = """
from gristmill.base.caches import use_compile_caches
use_compile_caches()
import os, sys, torch
print(sys.pycache_prefix, os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a package of that name, installed without bytecode."""
    package = tmp_path / "site/torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package.parent


def start(tmp_path: Path, site: Path, **variables: str) -> tuple[str, str]:
    """The cache of bytecode that a process uses, and that of torch.compile."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), **variables}
    kept.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**kept, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    prefix, compiled = done.stdout.split()
    return prefix, compiled


def test_packages_without_bytecode_get_it_in_the_cache(tmp_path: Path, site: Path) -> None:
    cache = tmp_path / "cache/gristmill"
    found = start(tmp_path, site, PYTHONDONTWRITEBYTECODE="1")
    assert found == (str(cache / "pycache"), str(cache / "inductor"))
    assert list(cache.glob("pycache/**/torch/__init__.*.pyc"))
    assert not (site / "torch/__pycache__").exists()


def test_where_python_keeps_bytecode_itself_nothing_changes(tmp_path: Path, site: Path) -> None:
    assert start(tmp_path, site, TORCHINDUCTOR_CACHE_DIR="/mine") == ("None", "/mine")
    assert (site / "torch/__pycache__").is_dir()
    # There now, and used from there.
    assert start(tmp_path, site, PYTHONDONTWRITEBYTECODE="1")[0] == "None"
    mine = str(tmp_path / "mine")
    assert start(tmp_path, site, PYTHONPYCACHEPREFIX=mine)[0] == mine


@pytest.mark.parametrize("damage", ["cut", "flipped", "of another program"])
def test_damaged_bytecode_is_compiled_anew(tmp_path: Path, site: Path, damage: str) -> None:
    (site / "torch/__init__.py").write_text("print('the source', end=' ')\n")

    def begin() -> str:
        words = [sys.executable, "-c", SCRIPT]
        kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
        paths = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
        paths |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(words, env=kept | paths, capture_output=True, text=True, check=True)
        return done.stdout

    said = begin()
    (file,) = (tmp_path / "cache/gristmill").glob("pycache/**/torch/__init__.*.pyc")
    good = file.read_bytes()
    at = good.index(b"the source")
    bad = {
        "cut": good[: len(good) // 2],
        "flipped": good[:at] + b"T" + good[at + 1 :],
        "of another program": good[:-4],
    }[damage]
    file.write_bytes(bad)
    assert begin() == said and "the source" in said
    assert file.read_bytes() == good


@pytest.mark.parametrize("home", ["unset", "a file", "not ours", "written by others", "full"])
def test_without_a_usable_home_everything_works_without_caches(
    tmp_path: Path, site: Path, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    if home == "unset":
        monkeypatch.setattr(Path, "home", classmethod(lambda cls: _no_home()))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    elif home == "a file":
        cache.write_text("")
    else:
        (cache / "gristmill/inductor").mkdir(parents=True)
    if home == "not ours":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif home == "written by others":
        (cache / "gristmill").chmod(0o777)
    elif home == "full":
        space = os.statvfs(tmp_path)
        full = os.statvfs_result([*space[:4], 0, *space[5:]])
        monkeypatch.setattr(os, "statvfs", lambda path: full)
    if home != "unset":
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert caches._own_folder("inductor") is None


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_folders_with_code_are_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        folder = caches._own_folder("inductor")
        assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
