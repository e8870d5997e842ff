"""Scripts in `benchmarks/` find what they import of this program: most need a machine or a peer
that no test has."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

IMPORT_ALL = """
import importlib, pathlib, sys, traceback
sys.path.insert(0, folder)
scripts = sorted(path.stem for path in pathlib.Path(folder).glob("*.py"))
for script in scripts:
    try:
        importlib.import_module(script)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("gristmill", *scripts):
            pipe.send((script, traceback.format_exc()))
            break
    except BaseException:
        pipe.send((script, traceback.format_exc()))
        break
else:
    pipe.send((scripts, None))
"""


def test_every_script_can_be_imported() -> None:
    """In a process of its own, since some of them change how torch computes."""
    context = multiprocessing.get_context("forkserver")
    answers, pipe = context.Pipe(duplex=False)
    names = {"folder": str(BENCHMARKS), "pipe": pipe}
    process = context.Process(target=exec, args=(IMPORT_ALL, names))
    process.start()
    pipe.close()
    scripts, error = answers.recv()
    process.join()
    assert error is None, f"{scripts}: {error}"
    assert "gpu_speed" in scripts
