"""Caches that make the next start quicker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from gristmill.base.caches import use_compile_caches
use_compile_caches()
import os, sys, torch
print(sys.pycache_prefix, os.environ["TORCHINDUCTOR_CACHE_DIR"])
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
