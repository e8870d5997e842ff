"""A run file that `new` writes on a GPU: the device is known without torch, and the run trains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gristmill.cli.main import app
from gristmill.plan.machine import find_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_gpu_is_the_one_that_torch_sees() -> None:
    machine = find_machine()
    assert machine.is_gpu and machine.count == torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in machine.described
    total = torch.cuda.get_device_properties(0).total_memory
    assert machine.hardware.memory == pytest.approx(total, rel=0.05)


def test_what_new_writes_trains_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.text.sources.python_docs import python_documents

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number, document in enumerate(python_documents()):
        (tmp_path / "text" / f"{number}.txt").write_text(document.text)
    # The largest that this text can hold, so that the step is not all launches.
    planned = json.loads(run("new", "text", "--preset", "modern-mini", "--tokens", "4M", "--json"))
    prepare, train = (shlex.split(command)[1:] for command in planned["commands"])
    run(*prepare)
    said = run(*train[:2], "sample=unset")
    speeds = [float(speed) * 1e3 for speed in re.findall(r"\| ([\d.]+)k tok/s", said)]
    assert "done at step" in said and speeds
    print(f"planned {planned['tokens_per_second']:.4g} tokens/s, seen {speeds[-1]:.4g}")
