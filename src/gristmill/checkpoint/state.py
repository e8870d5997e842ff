"""Exactly what a run needs to go on as if it had never stopped.

    model.safetensors       weights under their own names; shared ones once
    optimizer.safetensors   its state, named KIND/PARAMETER, such as exp_avg/norm.weight
    strategy.safetensors    the same for a strategy that keeps tensors; most do not
    state.json              progress, identity of the run, loss scale, counters, best loss so far,
                            and what the last bits of its numbers depend on

Of a sharded model each process copies and writes the slices that it owns, and reads the slices that
it holds, however the model was sharded when they were written (`pieces.py`, `stored.py`). For each
kind of other state its owner says how it lies on the processes (`optim/spec.py`): like a parameter;
the same everywhere, and one process writes it; or one for each worker, stored as one tensor with a
row for each.

There is no random state: dropout and data order are functions of the seed and progress. Learning
rate and other settings are not here either: they come from the run file, so changing them takes
effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import read_json, storage_errors
from gristmill.base.tensor_slices import ShardSlice, TensorSlice
from gristmill.base.units import Progress
from gristmill.checkpoint.layout import Best, Fingerprint
from gristmill.checkpoint.pieces import (
    MODEL,
    OPTIMIZER,
    STRATEGY,
    TensorShare,
    file_name,
    piece_key,
)
from gristmill.checkpoint.tensor_reader import TensorReader, open_tensors
from gristmill.checkpoint.tensorfile import dtype_name, write_tensors
from gristmill.models.spec import CausalLM
from gristmill.models.weights import Weights
from gristmill.optim.spec import CheckpointState, Optimizer, Placement, StateEntry
from gristmill.parallel.sharding import ShardedParameter, whole_parameters

FORMAT = "gristmill-checkpoint"
VERSION = 1
IN_PIECES = 2
"""The version of a checkpoint that many processes wrote."""
STATE = "state.json"


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
    optimizer: Optimizer
    identity: dict[str, Any]
    """What must not change between saving and resuming, by dotted name."""
    settings: dict[str, Any]
    """The model's settings and vocabulary: enough to build it again."""
    identity_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a part of the identity was to checkpoints from before it existed."""
    identity_retired: Mapping[str, Any] = field(default_factory=dict)
    """Parts of older checkpoints' identity that no longer exist, with the value at which they did
    nothing."""
    progress: Progress = field(default_factory=Progress)
    counters: Counters = field(default_factory=Counters)
    strategy: dict[str, Any] = field(default_factory=dict)
    """What the strategy keeps as plain numbers."""
    strategy_tensors: CheckpointState | None = None
    """What it keeps as tensors."""
    rank: int = 0
    ranks: int = 1
    """Which of the processes this is."""
    writes_unowned: bool = True
    """Whether this process writes state that is the same everywhere and belongs to no parameter."""
    layout: dict[str, int] = field(default_factory=dict)
    """How a step is divided, which decides the order of its sums: the sizes of the mesh by axis."""
    micro_batch: int | None = None
    """Samples that go through the model at once, which decides the same."""
    best: Best | None = None
    """The best validation loss so far, whether its checkpoint is still there or not."""
    parameters: Mapping[str, ShardedParameter] = field(default_factory=dict)
    """This process's shard of every parameter; all of the model if not given."""
    padded: frozenset[str] = frozenset()
    """Parameters with a row for each token, which may be stored with more rows or fewer."""
    names: frozenset[str] = frozenset()
    """All parameters of the whole model, none of which may be missing from a checkpoint; those that
    any process holds if not given."""

    def __post_init__(self) -> None:
        self.parameters = self.parameters or whole_parameters(self.model)


@dataclass
class Contribution:
    """What one process writes of a kind of tensors, and what it knows of all that it holds."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Copies in host memory, by their key in the file."""
    shares: dict[str, TensorShare] = field(default_factory=dict)
    """By the name of the tensor."""

    def add_shard(self, name: str, value: torch.Tensor, parameter: ShardedParameter) -> None:
        """Copy what this process owns of a tensor that is sharded like a parameter."""
        assert value.shape == parameter.local.shape, f"{name} is not sharded like {parameter.name}"
        parts = [(piece.whole, value[piece.local.slices]) for piece in _pieces(parameter)]
        self._add(name, value, parameter.shape, parts if parameter.owned else [])

    def add_whole(self, name: str, value: torch.Tensor, *, mine: bool) -> None:
        """Copy a tensor that is the same everywhere, if this process is the one that writes it."""
        shape = tuple(value.shape)
        self._add(name, value, shape, [(TensorSlice.whole(shape), value)] if mine else [])

    def add_own(self, name: str, value: torch.Tensor, *, rank: int, ranks: int) -> None:
        """Copy a tensor that is different on every process: a row of one for all."""
        row = TensorSlice.whole((1, *value.shape)).moved([rank] + [0] * value.dim())
        self._add(name, value, (ranks, *value.shape), [(row, value[None])])

    def _add(
        self,
        name: str,
        value: torch.Tensor,
        shape: tuple[int, ...],
        parts: Sequence[tuple[TensorSlice, torch.Tensor]],
    ) -> None:
        boxes = [] if name not in self.shares else list(self.shares[name].boxes)
        for box, part in parts:
            self.tensors[piece_key(name, box, shape)] = _host_copy(part)
            boxes.append(box)
        self.shares[name] = TensorShare(shape, dtype_name(value), tuple(boxes))

    def add_state(self, source: CheckpointState, state: TrainState) -> None:
        """Copy what this process writes of the state of an optimizer or a strategy."""
        for kind, key, value in source.entries():
            name, parameter = f"{kind}/{key}", state.parameters.get(key)
            match source.placements[kind]:
                case Placement.SHARDED:
                    self.add_shard(name, value, state.parameters[key])
                case Placement.REPLICATED:
                    mine = state.writes_unowned
                    if parameter is not None:
                        mine = parameter.writes_replicated
                    self.add_whole(name, value, mine=mine)
                case Placement.PER_WORKER:
                    self.add_own(name, value, rank=state.rank, ranks=state.ranks)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Snapshot:
    """A copy of a process's share of a state in host memory, which training can no longer
    change."""

    kinds: dict[str, Contribution]
    """By the kind of tensors: those of the model, of the optimizer, of the strategy if any."""
    state: dict[str, Any]
    names: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        return int(self.state["progress"]["steps"])

    @property
    def bytes(self) -> int:
        """Size of this process's share on disk, headers not counted."""
        return sum(contribution.bytes for contribution in self.kinds.values())

    def write(self, folder: Path, *, rank: int = 0, ranks: int = 1) -> list[Fingerprint]:
        """Write this process's files; one that owns nothing of a divided kind writes none."""
        with storage_errors(folder):
            return [
                write_tensors(folder / file_name(kind, rank=rank, ranks=ranks), mine.tensors)
                for kind, mine in self.kinds.items()
                if mine.tensors or ranks == 1
            ]


def capture(state: TrainState) -> Snapshot:
    """Copy this process's share to host memory: the only part of saving that training waits
    for."""
    kinds = {kind: Contribution() for kind in (MODEL, OPTIMIZER)}
    for parameter in state.parameters.values():
        kinds[MODEL].add_shard(parameter.name, parameter.local, parameter)
    kinds[OPTIMIZER].add_state(state.optimizer, state)
    if state.strategy_tensors is not None:
        kinds[STRATEGY] = Contribution()
        kinds[STRATEGY].add_state(state.strategy_tensors, state)
    return Snapshot(
        kinds=kinds,
        state={
            "format": FORMAT,
            "version": VERSION,
            "progress": dataclasses.asdict(state.progress),
            "identity": state.identity,
            "settings": state.settings,
            "strategy": state.strategy,
            "counters": dataclasses.asdict(state.counters),
            "best": None if state.best is None else dataclasses.asdict(state.best),
            "layout": state.layout,
            "micro_batch": state.micro_batch,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        names=state.names,
    )


def _pieces(parameter: ShardedParameter) -> tuple[ShardSlice, ...]:
    """The slices of a parameter; one slice if all of it is here, in however many parts."""
    in_place = all(piece.whole == piece.local for piece in parameter.slices)
    whole = TensorSlice.whole(parameter.shape)
    complete = sum(piece.whole.size for piece in parameter.slices) == whole.size
    return (ShardSlice(whole, whole),) if in_place and complete else parameter.slices


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def read_state(folder: Path) -> dict[str, Any]:
    """The checked content of state.json."""
    values = read_json(folder / STATE)
    if values.get("format") != FORMAT or values.get("version") not in (VERSION, IN_PIECES):
        raise UserError(
            f"written in format {values.get('format')!r} version {values.get('version')!r}; "
            f"this program reads {FORMAT!r} versions {VERSION} and {IN_PIECES}",
            where=str(folder / STATE),
            exit=Exit.DATA,
        )
    return dict(values)


# ------------------------------------------------------------------ reading


def restore(state: TrainState, folder: Path) -> dict[str, Any]:
    """Put a checkpoint's content into a freshly built state; returns state.json's content."""
    values = read_state(folder)
    _same_identity(values["identity"], state, folder)
    load_parameters(state.parameters.values(), open_tensors(folder), padded=state.padded)
    _restore_entries(state.optimizer, open_tensors(folder, OPTIMIZER), state)
    if state.strategy_tensors is not None:
        _restore_entries(state.strategy_tensors, open_tensors(folder, STRATEGY), state)
    state.progress = Progress(**values["progress"])
    state.counters = Counters(**values["counters"])
    state.strategy = values["strategy"]
    state.best = Best(**values["best"]) if values.get("best") else None
    return values


def load_parameters(
    parameters: Collection[ShardedParameter],
    weights: Weights,
    *,
    padded: frozenset[str] = frozenset(),
) -> None:
    """Read this process's share of weights. Rows of `padded` parameters that these do not have stay
    as they are."""
    _same_shapes({one.name: one.shape for one in parameters}, weights, padded=padded)
    for one in parameters:
        _fill(one.local.detach(), one, weights, one.name)


def load_weights(model: CausalLM, weights: Weights) -> None:
    """Copy weights into a whole model; rows that only pad the vocabulary become 0."""
    check_weights(model, weights)
    tables = model.vocabulary_parameters()
    for name, one in whole_parameters(model).items():
        target = one.local.detach()
        if name in tables:
            target[weights.shape(name)[0] :] = 0
        _fill(target, one, weights, name)


def check_weights(model: CausalLM, weights: Weights) -> None:
    """Refuse weights that are not those of a whole model, of which only shapes are looked at.
    Tables with a row for each token may have more rows or fewer, as long as the vocabulary is
    there."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tables = model.vocabulary_parameters()
    enough = frozenset(n for n in tables if n in weights and weights.shape(n)[0] >= model.vocab)
    _same_shapes(shapes, weights, padded=enough)


def _same_shapes(
    wanted: Mapping[str, tuple[int, ...]], stored: Weights, *, padded: frozenset[str]
) -> None:
    """Refuse weights of another shape; `padded` ones may have another number of rows."""
    problems = []
    for name, shape in wanted.items():
        if name not in stored:
            problems.append(f"there is no {name}")
            continue
        found, free = stored.shape(name), 1 if name in padded else 0
        if len(found) != len(shape) or found[free:] != shape[free:]:
            problems.append(f"{name} has shape {found}, not {shape}")
    if problems:
        raise UserError([Problem(what, stored.where) for what in problems], exit=Exit.DATA)


def _restore_entries(source: CheckpointState, stored: TensorReader, state: TrainState) -> None:
    """Give an optimizer or a strategy the entries that it has a place for."""
    device = next(iter(state.parameters.values())).local.device
    for name in stored:
        kind, _, key = name.partition("/")
        if not source.expects(kind, key):
            continue
        match source.placements[kind]:
            case Placement.SHARDED:
                parameter = state.parameters[key]
                shape, dtype = parameter.local.shape, stored.dtype(name)
                value = torch.zeros(shape, dtype=dtype, device=parameter.local.device)
                _fill(value, parameter, stored, name)
            case Placement.REPLICATED:
                value = stored[name].to(device)
            case Placement.PER_WORKER:
                ranks = stored.shape(name)[0]
                if ranks != state.ranks:
                    raise UserError(
                        f"{name} was saved by {ranks} processes, each with its own, and now there "
                        f"are {state.ranks}",
                        where=stored.where,
                        remedy=f"resume with {ranks} processes",
                    )
                value = stored[name][state.rank].to(device)
        source.load_entry(StateEntry(kind, key, value))


def _fill(target: torch.Tensor, parameter: ShardedParameter, stored: Weights, name: str) -> None:
    """Copy what is stored of this process's pieces of a tensor."""
    for piece in parameter.slices:
        for part in stored.parts(name, piece.whole):
            target[local_box(piece, part.box).slices].copy_(part.tensor)


def local_box(piece: ShardSlice, box: TensorSlice) -> TensorSlice:
    """Where a part of a piece, given as a part of the whole, lies in the smaller tensor."""
    return box.seen_from(piece.whole).moved(piece.local.begin)


# ------------------------------------------------------------------ identity


def _same_identity(saved: dict[str, Any], state: TrainState, folder: Path) -> None:
    now, retired = state.identity, state.identity_retired.items()
    saved = {name: value for name, value in saved.items() if (name, value) not in retired}
    pairs = {
        name: (saved.get(name, state.identity_defaults.get(name)), now.get(name))
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
