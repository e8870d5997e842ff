"""Runs on XLA devices, which JAX imitates on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling takes longer than these runs do."""

RUN = """
name = "tiny"
folder = "{folder}"
[model]
layers = 2
heads = 2
width = 16
context = 24
{model}
[data]
paths = "{tokens}"
split = "90,10"
[train]
until = "20 steps"
batch = 8
[validate]
every = "10 steps"
windows = 6
[checkpoint]
every = "5 steps"
[runtime]
device = "xla"
threads = 1
"""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled steps are kept, so that none is compiled twice."""
    return tmp_path_factory.mktemp("cache")


class Runner:
    """Trains with the program itself, in processes of its own."""

    def __init__(self, folder: Path, tokens: Path, cache: Path) -> None:
        self.folder, self.tokens, self.cache = folder, tokens, cache

    def write(self, model: str) -> Path:
        """The run file of a model."""
        file = self.folder / f"{'modern' if model else 'gpt2'}.toml"
        file.write_text(RUN.format(folder=self.folder / "run", tokens=self.tokens, model=model))
        return file

    def environment(self, devices: int) -> dict[str, str]:
        return {
            **os.environ,
            "XDG_CACHE_HOME": str(self.cache),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
        }

    def start(
        self, file: Path, *settings: str, name: str, devices: int = 1, **more: str
    ) -> subprocess.Popen[str]:
        words = ["train", str(file), *settings, f'folder="{self.folder / name}"']
        return subprocess.Popen(
            [sys.executable, "-m", "gristmill", *words],
            env={**self.environment(devices), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, file: Path, *settings: str, name: str, devices: int = 1, fails: int = 0) -> str:
        """Train to the end; returns what was printed."""
        process = self.start(file, *settings, name=name, devices=devices)
        said, _ = process.communicate(timeout=1200)
        assert process.returncode == fails, said
        return said

    def losses(self, name: str) -> dict[tuple[str, int], float]:
        """The losses of training and validation, by kind and step."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        kinds = ("step", "validation")
        return {(one["kind"], one["step"]): one["loss"] for one in records if one["kind"] in kinds}


@pytest.fixture
def runner(tmp_path: Path, tokens: Path, cache: Path) -> Runner:
    return Runner(tmp_path, tokens, cache)
