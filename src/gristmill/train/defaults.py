"""What a run file leaves to the device, decided when a run begins and kept in its run.toml.

    precision.compute    auto        bf16 if all devices compute with it, else fp32
    train.micro_batch    not given   the whole batch of a process, or what fits (see `memory`)

A run that resumes goes on with what its folder says, on whatever device: it is the same run.
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


def decided(config: RunConfig, folder: RunFolder, world: World, control: ControlGroup) -> RunConfig:
    """The run with the settings that it leaves to the device, but for a micro-batch that depends
    on memory. All processes decide alike."""
    kept = control.on_rank0(lambda: _kept(folder))
    config = _with_kept(config, kept, world.layout)
    has_bf16 = all(control.all_gather(world.device.has_bf16))
    return with_formats(config, has_bf16=has_bf16, on_gpu=world.device.kind == "cuda")


def changes(asked: RunConfig, config: RunConfig) -> list[str]:
    """What the run does otherwise than its run file says, in words."""
    dropped = [part for part in asked.precision.fp8 if part not in config.precision.fp8]
    if not dropped:
        return []
    return [
        f"{' and '.join(dropped)} stay in bf16: in models narrower than {FP8_NARROWEST} casts to "
        "fp8 take longer than its products save"
    ]


def as_it_began(config: RunConfig, folder: RunFolder, mesh: Mesh) -> RunConfig:
    """The run with what it decided when it began, if it did."""
    return _with_kept(config, _kept(folder), mesh)


def _with_kept(config: RunConfig, kept: dict[str, Any], mesh: Mesh) -> RunConfig:
    if config.precision.compute == "auto" and (compute := kept.get("precision.compute")):
        precision = config.precision.model_copy(update={"compute": compute})
        config = config.model_copy(update={"precision": precision})
    if leaves_micro_batch(config.train) and (micro := kept.get("train.micro_batch")):
        train = config.train.model_copy(update={"micro_batch": micro})
        if _divides(train, mesh):
            config = config.model_copy(update={"train": train})
    return config


def _divides(train: TrainConfig, mesh: Mesh) -> bool:
    return isinstance(portions(train, parts=mesh.data), Portions)


def _kept(folder: RunFolder) -> dict[str, Any]:
    """What a run that was begun here decided."""
    if not folder.holds_run():
        return {}
    try:
        tables = tomllib.loads(folder.settings.read_text(encoding="utf-8"))
    except ValueError:  # damaged; it is written anew
        return {}
    paths = (("precision", "compute"), ("train", "micro_batch"))
    found = {".".join(path): tables.get(path[0], {}).get(path[1]) for path in paths}
    return {name: value for name, value in found.items() if value not in (None, "auto")}
