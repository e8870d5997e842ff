"""Runs on XLA devices, which JAX imitates on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling takes longer than these runs do."""

SETTINGS = (
    *('train.until="20 steps"', "train.batch=8", 'checkpoint.every="5 steps"'),
    *('validate.every="10 steps"', "validate.windows=6", 'runtime.device="xla"'),
)
"""Beside those of the tiny run that all tests have."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled steps are kept, so that none is compiled twice."""
    return tmp_path_factory.mktemp("cache")


class Runner:
    """Trains with the program itself, in processes of its own."""

    def __init__(self, folder: Path, text: str, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.file = folder / "tiny.toml"
        self.file.write_text(text)

    def command(
        self, verb: str, *settings: str, name: str, options: Sequence[str] = ()
    ) -> list[str]:
        """What is run; of settings that are given twice, the last counts."""
        chosen = dict(one.split("=", 1) for one in (*SETTINGS, *settings))
        chosen["folder"] = f'"{self.folder / name}"'
        words = [f"{key}={value}" for key, value in chosen.items()]
        return [sys.executable, "-m", "gristmill", verb, str(self.file), *words, *options]

    def environment(self, devices: int) -> dict[str, str]:
        return {
            **os.environ,
            "XDG_CACHE_HOME": str(self.cache),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
        }

    def start(
        self, *settings: str, name: str, devices: int = 1, **more: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("train", *settings, name=name),
            env={**self.environment(devices), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_hosts(self, *settings: str, name: str) -> list[subprocess.Popen[str]]:
        """Two processes with two devices each, as if on two hosts."""
        with socket.socket() as one:
            one.bind(("localhost", 0))
            port = str(one.getsockname()[1])
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        place |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        return [
            self.start(
                *settings, name=name, devices=2, **place, RANK=str(rank), LOCAL_RANK=str(rank)
            )
            for rank in range(2)
        ]

    def train(self, *settings: str, name: str, devices: int = 1, fails: int = 0) -> str:
        """Train to the end; returns what was printed."""
        process = self.start(*settings, name=name, devices=devices)
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
def runner(tmp_path: Path, run_text: Callable[..., str], cache: Path) -> Runner:
    return Runner(tmp_path, run_text(), cache)
