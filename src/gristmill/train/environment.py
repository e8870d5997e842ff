"""The environment of a run: versions, machine, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gristmill.base.units import timestamp
from gristmill.distributed.world import World
from gristmill.plan.expectation import Expectation

_PACKAGES = ("numpy", "safetensors", "tokenizers", "pydantic", "triton")


def describe_environment(
    world: World,
    *,
    parameters: int,
    flops_per_token: float,
    planned: Expectation | None = None,
    checked_tasks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of environment.json. `checked_tasks`: the tasks that all text behind the weights
    was decontaminated against, if known."""
    return {
        "gristmill": version("gristmill"),
        "commit": code_commit(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": platform.node(),
        "device": world.device.name,
        "device_type": world.device.kind,
        "threads": torch.get_num_threads(),
        "parameters": parameters,
        "flops_per_token": flops_per_token,
        "planned": None if planned is None else planned.as_json(),
        "checked_tasks": None if checked_tasks is None else dict(checked_tasks),
        "started": timestamp(),
    }


def version(package: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_commit() -> str | None:
    """The git commit this code runs from, with a + if the working tree is dirty."""
    here = Path(__file__).resolve().parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    try:
        command = ("git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*")
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
