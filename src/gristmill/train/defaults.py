"""Defaults that depend on the device: chosen when a run starts, and recorded in its run.toml.

    precision.compute    auto        bf16 if all devices support it, else fp32
    train.micro_batch    not given   the whole batch of a process, or what fits (see `memory.py`)

A resumed run keeps the recorded values on any device.
"""

from __future__ import annotations

import tomllib
from typing import Any

from gristmill.config.parallel import Mesh
from gristmill.config.resolve import (
    FP8_NARROWEST,
    Portions,
    leaves_micro_batch,
    portions,
    with_formats,
)
from gristmill.config.schema import RunConfig, TrainConfig
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World
from gristmill.track.folder import RunFolder


def with_device_defaults(
    config: RunConfig, folder: RunFolder, world: World, control: ControlGroup
) -> RunConfig:
    """The config with recorded or device-dependent defaults, the same on all ranks. A micro-batch
    size that depends on memory is chosen later."""
    recorded = control.on_rank0(lambda: _recorded(folder))
    config = _with_recorded(config, recorded, world.layout)
    has_bf16 = all(control.all_gather(world.device.has_bf16))
    return with_formats(config, has_bf16=has_bf16, on_gpu=world.device.kind == "cuda")


def describe_changes(asked: RunConfig, config: RunConfig) -> list[str]:
    """Messages about settings of the run file that the run changes."""
    dropped = [part for part in asked.precision.fp8 if part not in config.precision.fp8]
    if not dropped:
        return []
    return [
        f"{' and '.join(dropped)} stay in bf16: in models narrower than {FP8_NARROWEST} casts to "
        "fp8 cost more time than fp8 products save"
    ]


def with_recorded_defaults(config: RunConfig, folder: RunFolder, mesh: Mesh) -> RunConfig:
    """The config with the defaults recorded at the first start, if there was one."""
    return _with_recorded(config, _recorded(folder), mesh)


def _with_recorded(config: RunConfig, recorded: dict[str, Any], mesh: Mesh) -> RunConfig:
    if config.precision.compute == "auto" and (compute := recorded.get("precision.compute")):
        precision = config.precision.model_copy(update={"compute": compute})
        config = config.model_copy(update={"precision": precision})
    if leaves_micro_batch(config.train) and (micro_batch := recorded.get("train.micro_batch")):
        train = config.train.model_copy(update={"micro_batch": micro_batch})
        if _divides(train, mesh):
            config = config.model_copy(update={"train": train})
    return config


def _divides(train: TrainConfig, mesh: Mesh) -> bool:
    return isinstance(portions(train, parts=mesh.data), Portions)


def _recorded(folder: RunFolder) -> dict[str, Any]:
    """The device-dependent settings in the run.toml of a run folder."""
    if not folder.holds_run():
        return {}
    try:
        tables = tomllib.loads(folder.settings.read_text(encoding="utf-8"))
    except ValueError:  # damaged; it will be rewritten
        return {}
    paths = (("precision", "compute"), ("train", "micro_batch"))
    values = {".".join(path): tables.get(path[0], {}).get(path[1]) for path in paths}
    return {name: value for name, value in values.items() if value not in (None, "auto")}
