"""Exactly what a run needs to go on as if it had never stopped.

    model.safetensors       weights under their own names; shared ones once
    optimizer.safetensors   per-parameter state, named KIND/PARAMETER, such as exp_avg/norm.weight
    state.json              progress, identity of the run, loss scale, counters, best loss so far,
                            and what the last bits of its numbers depend on

Of a model that is divided, each process copies and writes the pieces that it owns, and reads the
pieces that it holds, however those who wrote them had divided it (`pieces.py`, `stored.py`). State
of the optimizer with the shape of its parameter is divided in the same way. Any other, such as a
count of steps, is whole in every process, and one writes it.

There is no random state: dropout and data order are functions of the seed and progress. Learning
rate and other settings are not here either: they come from the run file, so changing them takes
effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gristmill.base.boxes import Box, Piece
from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import read_json, storage_errors
from gristmill.base.units import Progress
from gristmill.checkpoint.layout import Best, Fingerprint
from gristmill.checkpoint.pieces import KINDS, TensorShare, file_name, piece_key
from gristmill.checkpoint.stored import StoredTensors, stored_tensors
from gristmill.checkpoint.tensorfile import dtype_name, write_tensors
from gristmill.config.schema import GONE, ModelConfig
from gristmill.models.weights import Weights
from gristmill.parallel.held import Held, held_whole

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
    optimizer: torch.optim.Optimizer
    identity: dict[str, Any]
    """What must not change between saving and resuming, by dotted name."""
    settings: dict[str, Any]
    """The model's settings and vocabulary: enough to build it again."""
    progress: Progress = field(default_factory=Progress)
    counters: Counters = field(default_factory=Counters)
    strategy: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    """How a step is divided, which decides the order of its sums: the sizes of the mesh by axis."""
    micro_batch: int | None = None
    """Samples that go through the model at once, which decides the same."""
    best: Best | None = None
    """The best validation loss so far, whether its checkpoint is still there or not."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """This process's share of every parameter; all of the model if not given."""
    padded: frozenset[str] = frozenset()
    """Parameters with a row for each token, which may be stored with more rows or fewer."""
    names: frozenset[str] = frozenset()
    """All parameters of the whole model, none of which may be missing from a checkpoint; those that
    any process holds if not given."""

    def __post_init__(self) -> None:
        self.held = self.held or held_whole(self.model)


@dataclass
class Contribution:
    """What one process writes of a kind of tensors, and what it knows of all that it holds."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Copies in host memory, by their key in the file."""
    shares: dict[str, TensorShare] = field(default_factory=dict)
    """By the name of the tensor."""

    def add(self, name: str, value: torch.Tensor, held: Held) -> None:
        """Copy what this process owns of a tensor that belongs to a parameter."""
        if value.shape == held.local.shape:
            shape, mine = held.shape, held.owned
            parts = [(piece.whole, value[piece.local.slices]) for piece in _pieces(held)]
        else:
            shape = tuple(value.shape)
            parts, mine = [(Box.whole(shape), value)], held.speaks
        boxes = [] if name not in self.shares else list(self.shares[name].boxes)
        for box, part in parts if mine else ():
            self.tensors[piece_key(name, box, shape)] = _host_copy(part)
            boxes.append(box)
        self.shares[name] = TensorShare(shape, dtype_name(value), tuple(boxes))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Snapshot:
    """A copy of a process's share of a state in host memory, which training can no longer
    change."""

    model: Contribution
    optimizer: Contribution
    state: dict[str, Any]
    names: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        return int(self.state["progress"]["steps"])

    @property
    def kinds(self) -> dict[str, Contribution]:
        return dict(zip(KINDS, (self.model, self.optimizer), strict=True))

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
    model, optimizer = Contribution(), Contribution()
    for held in state.held.values():
        model.add(held.name, held.local, held)
        for kind, value in state.optimizer.state.get(held.local, {}).items():
            optimizer.add(f"{kind}/{held.name}", value, held)
    return Snapshot(
        model=model,
        optimizer=optimizer,
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


def _pieces(held: Held) -> tuple[Piece, ...]:
    """The pieces of a parameter; one that is all here is one, of however many parts it is made."""
    in_place = all(piece.whole == piece.local for piece in held.pieces)
    whole = Box.whole(held.shape)
    complete = sum(piece.whole.size for piece in held.pieces) == whole.size
    return (Piece(whole, whole),) if in_place and complete else held.pieces


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
    _same_identity(values["identity"], state.identity, folder)
    weights, moments = stored_tensors(folder), stored_tensors(folder, "optimizer")
    load_held(state.held.values(), weights, padded=state.padded)
    _restore_optimizer(state, weights, moments)
    state.progress = Progress(**values["progress"])
    state.counters = Counters(**values["counters"])
    state.strategy = values["strategy"]
    state.best = Best(**values["best"]) if values.get("best") else None
    return values


def load_held(
    held: Collection[Held], weights: Weights, *, padded: frozenset[str] = frozenset()
) -> None:
    """Read this process's share of weights. Rows of `padded` parameters that these do not have stay
    as they are."""
    _same_shapes({one.name: one.shape for one in held}, weights, padded=padded)
    for one in held:
        _fill(one.local.detach(), one, weights, one.name)


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Copy weights into a whole model; rows that only pad the vocabulary become 0."""
    check_weights(model, weights)
    tables = vocabulary_tables(name for name, _ in model.named_parameters())
    for name, one in held_whole(model).items():
        target = one.local.detach()
        if name in tables:
            target[weights.shape(name)[0] :] = 0
        _fill(target, one, weights, name)


def check_weights(model: nn.Module, weights: Weights) -> None:
    """Refuse weights that are not those of a whole model, of which only shapes are looked at.
    Tables with a row for each token may have more rows or fewer, as long as the vocabulary is
    there."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    vocab: int = getattr(model, "vocab", 0)
    tables = vocabulary_tables(shapes) if vocab else frozenset()
    enough = frozenset(n for n in tables if n in weights and weights.shape(n)[0] >= vocab)
    _same_shapes(shapes, weights, padded=enough)


def vocabulary_tables(names: Iterable[str]) -> frozenset[str]:
    """Those of a model's parameters that have a row for each token, and rows of padding."""
    return frozenset(n for n in names if n.partition(".")[0] in ("embedding", "head", "values"))


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


def _restore_optimizer(state: TrainState, weights: StoredTensors, stored: StoredTensors) -> None:
    kinds: dict[str, list[str]] = {}
    for full_name in stored:
        kind, _, name = full_name.partition("/")
        kinds.setdefault(name, []).append(kind)
    for held in state.held.values():
        for kind in kinds.get(held.name, ()):
            full_name, device = f"{kind}/{held.name}", held.local.device
            if stored.shape(full_name) == weights.shape(held.name):
                dtype = stored.dtype(full_name)
                value = torch.zeros(held.local.shape, dtype=dtype, device=device)
                _fill(value, held, stored, full_name)
            else:
                value = stored[full_name].to(device)
            state.optimizer.state[held.local][kind] = value


def _fill(target: torch.Tensor, held: Held, stored: Weights, name: str) -> None:
    """Copy what is stored of this process's pieces of a tensor."""
    for piece in held.pieces:
        for part in stored.parts(name, piece.whole):
            target[local_box(piece, part.box).slices].copy_(part.tensor)


def local_box(piece: Piece, box: Box) -> Box:
    """Where a part of a piece, given as a part of the whole, lies in the smaller tensor."""
    return box.seen_from(piece.whole).moved(piece.local.begin)


# ------------------------------------------------------------------ identity


def _same_identity(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    gone = {f"model.{name}": value for name, value in GONE.items()}.items()
    saved = {name: value for name, value in saved.items() if (name, value) not in gone}
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
