"""Scripts in `benchmarks/` find what they import of this program: most need a machine or a peer
that no test has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

IMPORT_ALL = """
import importlib, pathlib
scripts = sorted(path.stem for path in pathlib.Path().glob("*.py"))
for script in scripts:
    print(script, flush=True)
    try:
        importlib.import_module(script)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("gristmill", *scripts):
            raise
"""


def test_every_script_can_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout.split()[-1:]}: {done.stderr}"
    assert "gpu_speed" in done.stdout.split()
