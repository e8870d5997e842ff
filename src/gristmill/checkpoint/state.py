"""Exactly what a run needs to go on as if it had never stopped.

    model.safetensors       weights under their own names; shared ones once
    optimizer.safetensors   per-parameter state, named KIND/PARAMETER, such as exp_avg/norm.weight
    state.json              progress, identity of the run, loss scale, counters

There is no random state: dropout and data order are functions of the seed and progress. Learning
rate and other settings are not here either: they come from the run file, so changing them takes
effect.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import read_json, share_file, storage_errors, write_json
from gristmill.base.units import Progress
from gristmill.config.schema import ModelConfig

FORMAT = "gristmill-checkpoint"
VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class Counters:
    """What happened so far."""

    skipped: int = 0
    """Steps that left the weights as they were."""
    nan: int = 0
    """Steps whose loss was not finite."""
    seconds: float = 0.0
    """Wall-clock time spent training."""


@dataclass
class TrainState:
    """The living state of a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    identity: dict[str, Any]
    """What must not change between saving and resuming, by dotted name."""
    settings: dict[str, Any]
    """The model's settings and vocabulary: enough to build it again."""
    progress: Progress = field(default_factory=Progress)
    counters: Counters = field(default_factory=Counters)
    strategy: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state in host memory, which training can no longer change."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["progress"]["steps"])

    @property
    def bytes(self) -> int:
        """Size on disk, headers not counted."""
        tensors = (*self.model.values(), *self.optimizer.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def write(self, folder: Path) -> None:
        with storage_errors(folder):
            try:
                save_file(self.model, folder / MODEL)
                save_file(self.optimizer, folder / OPTIMIZER)
            except Exception as error:
                raise _as_os_error(error) from error
            share_file(folder / MODEL)
            share_file(folder / OPTIMIZER)
            write_json(folder / STATE, self.state)


def _as_os_error(error: Exception) -> Exception:
    """safetensors reports a full disk as its own error, with the system's number in the text."""
    if "os error 28" in str(error) or "No space left" in str(error):
        return OSError(28, "No space left on device")
    return error


def capture(state: TrainState) -> Snapshot:
    """Copy everything to host memory: the only part of saving that training waits for."""
    names: dict[torch.Tensor, str] = {p: name for name, p in state.model.named_parameters()}
    optimizer = {
        f"{kind}/{names[parameter]}": _host_copy(value)
        for parameter, kinds in state.optimizer.state.items()
        for kind, value in kinds.items()
    }
    return Snapshot(
        model={name: _host_copy(p) for name, p in state.model.named_parameters()},
        optimizer=optimizer,
        state={
            "format": FORMAT,
            "version": VERSION,
            "progress": dataclasses.asdict(state.progress),
            "identity": state.identity,
            "settings": state.settings,
            "strategy": state.strategy,
            "counters": dataclasses.asdict(state.counters),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
    )


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def read_state(folder: Path) -> dict[str, Any]:
    """The checked content of state.json."""
    values = read_json(folder / STATE)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise UserError(
            f"written in format {values.get('format')!r} version {values.get('version')!r}; "
            f"this program reads {FORMAT!r} version {VERSION}",
            where=str(folder / STATE),
            exit=Exit.DATA,
        )
    return dict(values)


def restore(state: TrainState, folder: Path) -> dict[str, Any]:
    """Put a checkpoint's content into a freshly built state; returns state.json's content."""
    values = read_state(folder)
    _same_identity(values["identity"], state.identity, folder)
    load_weights(state.model, folder)
    parameters = dict(state.model.named_parameters())
    for full_name, tensor in load_file(folder / OPTIMIZER).items():
        kind, _, name = full_name.partition("/")
        parameter = parameters[name]
        state.optimizer.state[parameter][kind] = tensor.to(parameter.device)
    state.progress = Progress(**values["progress"])
    state.counters = Counters(**values["counters"])
    state.strategy = values["strategy"]
    return values


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy a checkpoint's weights into a model of the same shape."""
    weights = load_file(folder / MODEL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])


def _same_identity(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    pairs = {
        name: (saved.get(name, _before_it_existed(name)), now.get(name))
        for name in sorted({*saved, *now})
    }
    problems = [
        Problem(f"was {before!r} and is now {after!r}", where=name)
        for name, (before, after) in pairs.items()
        if before != after
    ]
    if problems:
        remedy = (
            "undo these changes to go on with the run; or give the new run another name, with "
            f"model.start = {str(folder.parent.parent)!r} to begin from these weights; or use "
            "--fresh, which moves the old run aside"
        )
        raise UserError(
            [
                Problem("the run in this folder cannot go on with these settings", str(folder)),
                *problems[:-1],
                Problem(problems[-1].what, problems[-1].where, remedy),
            ]
        )


def _before_it_existed(name: str) -> Any:
    """What a model setting meant to a checkpoint that does not name it: its default."""
    table, _, field = name.partition(".")
    known = ModelConfig.model_fields.get(field) if table == "model" else None
    return None if known is None or known.is_required() else known.default
