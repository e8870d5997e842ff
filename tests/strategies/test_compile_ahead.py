"""Graphs that are compiled by processes of their own before a run needs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.distributed.device import Device
from gristmill.distributed.world import World
from gristmill.strategies import compiling as ahead
from gristmill.strategies.compiling import (
    CompileAhead,
    CompileClock,
    CompileTask,
    compile_ahead,
    parts_of,
)
from gristmill.train.build import build_strategy
from gristmill.train.compile_part import compile_part

VOCAB = 300
RUN = """
name = "ahead"
preset = "modern-nano"
data.paths = "tokens/text"
train = { until = "10 steps", batch = 2 }
runtime = { compile = "blocks", device = "cpu", kernels = false }
precision.compute = "fp32"
model = { layers = 4, context = 16, width = 32, heads = 2, value_embeddings = 2 }
"""

Calls = set[tuple[Any, ...]]


def config_of(*settings: str) -> RunConfig:
    return load_text(RUN, settings, place="ahead.toml")


def tasks_of(config: RunConfig) -> list[CompileTask]:
    return [
        CompileTask(config, VOCAB, 2, 16, False, part) for part in parts_of(config, vocab=VOCAB)
    ]


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is called of everything that is compiled, and the form of what it is called with."""
    calls: Calls = set()

    def form(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return (*value.shape, value.stride(), value.dtype, value.requires_grad)
        return value if isinstance(value, int | float | str | None) else type(value)

    def record(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        module = getattr(function, "__self__", None)
        inside = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
        name = function.__qualname__

        def call(*args: Any, **kwargs: Any) -> Any:
            shapes = [form(one) for one in inside] if name.startswith("Block") else []
            calls.add((name, *shapes, *map(form, tree_leaves((args, kwargs)))))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", record)
    return calls


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.recompute=full",),
        ("model.window=8",),
        ("preset=gpt2-nano", "model.value_embeddings=unset", "model.dropout=0.1"),
    ],
)
def test_the_parts_are_called_as_in_a_step(
    settings: tuple[str, ...], compiled_calls: Calls
) -> None:
    config, world = config_of(*settings), World(Device(torch.device("cpu")))
    numbers = resolve(config, vocab=VOCAB)
    strategy = build_strategy(config, vocab=VOCAB, world=world, resolved=numbers)
    tokens = torch.randint(VOCAB, (2, 17))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, 32.0)
    strategy.update(strategy.accumulate([batch], Progress()))
    in_a_step = set(compiled_calls)
    compiled_calls.clear()
    for task in tasks_of(config):
        compile_part(CompileTask.load(task.dump()), world)
    assert compiled_calls == in_a_step
    assert len({name for name, *_ in in_a_step}) >= 3


def test_parts() -> None:
    """With value embeddings at both ends, there are two kinds of blocks."""
    assert parts_of(config_of(), vocab=VOCAB) == ["0", "1", "update", "beside", "kernels"]
    alike = config_of("model.value_embeddings=0", "preset=gpt2-nano")
    assert parts_of(alike, vocab=VOCAB) == ["0", "beside", "kernels"]


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], text=True)


@pytest.mark.parametrize("failing", [False, True])
def test_waits_and_remembers_what_worked(
    failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    # It ends some time after somebody has begun to wait, however slow this machine is.
    waiting = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    codes = {"0": f"{waiting}time.sleep(0.2)", "1": f"raise SystemExit({int(failing)})"}
    monkeypatch.setattr(ahead, "_start", lambda task, environment: python(codes[task.part]))
    begun = list[bool]()

    def begins() -> None:
        begun.append(True)
        gate.touch()

    with CompileClock(begins=begins) as clock:
        tasks = tasks_of(config_of("optim.type=adamw"))[:2]
        CompileAhead(tasks, done=tmp_path / "ahead/key").wait()
    assert clock.seconds >= 0.2 and begun == [True]
    assert (tmp_path / "ahead/key").exists() is not failing


def test_gives_up_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[str]]()

    def start(task: CompileTask, environment: dict[str, str]) -> subprocess.Popen[str]:
        started.append(python("import time; time.sleep(600)"))
        return started[-1]

    monkeypatch.setattr(ahead, "_start", start)
    monkeypatch.setattr(ahead, "LIMIT", 0.1)
    CompileAhead(tasks_of(config_of()), done=tmp_path / "key").wait()
    assert len(started) == 5 and all(process.returncode for process in started)
    assert not (tmp_path / "key").exists()


def test_a_process_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(task: CompileTask, environment: dict[str, str]) -> subprocess.Popen[str]:
        if task.part == "0":
            raise BlockingIOError("no more processes")
        return python("")

    monkeypatch.setattr(ahead, "_start", start)
    CompileAhead(tasks_of(config_of()), done=tmp_path / "key").wait()
    assert not (tmp_path / "key").exists()


class TestWhen:
    """Cold starts of plain runs on one GPU with enough cores."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = list[str]()

        def start(task: CompileTask, environment: dict[str, str]) -> subprocess.Popen[str]:
            self.started.append(task.part)
            return python("")

        monkeypatch.setattr(ahead, "_start", start)
        monkeypatch.setattr(ahead, "usable_cores", lambda: 16)
        monkeypatch.setattr(Device, "total_memory", lambda self: 10**9)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def begin(
        self, *settings: str, device: str = "cuda", name: str = "H200"
    ) -> CompileAhead | None:
        config = config_of(*settings)
        chosen = Device(torch.device(device))
        chosen.__dict__["name"] = name
        numbers = resolve(config, vocab=VOCAB)
        return compile_ahead(config, vocab=VOCAB, world=World(chosen), resolved=numbers)

    def test_once_for_each_form_of_a_run(self) -> None:
        first = self.begin()
        assert first is not None and self.started == ["0", "1", "update", "beside", "kernels"]
        first.wait()
        assert self.begin() is None
        assert self.begin('train.until="20 steps"') is None
        for other in ("train.batch=4", "model.width=64", "optim.steps=4", "runtime.kernels=true"):
            again = self.begin(other)
            assert again is not None, other
            again.wait()
        another = self.begin(name="A100")
        assert another is not None
        another.wait()

    @pytest.mark.parametrize(
        "settings", [("data.documents=masked",), ("data.mask_end_of_text=true",)]
    )
    def test_not_for_other_batches(self, settings: tuple[str, ...]) -> None:
        assert self.begin(*settings) is None

    def test_not_on_small_machines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.begin(device="cpu") is None
        monkeypatch.setattr(ahead, "usable_cores", lambda: 4)
        assert self.begin() is None
        monkeypatch.setattr(ahead, "usable_cores", lambda: 16)
        monkeypatch.setattr(Device, "total_memory", lambda self: 10**5)
        assert self.begin() is None
        assert self.started == []
