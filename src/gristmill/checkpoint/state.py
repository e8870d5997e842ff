"""Exactly what a run needs to resume as if it had never stopped.

    model.safetensors       weights under their own names; shared ones once; of a run that trains
                            adapters, those only
    optimizer.safetensors   its state, named KIND/PARAMETER, such as exp_avg/norm.weight
    strategy.safetensors    the same for a strategy that keeps tensors; most do not
    state.json              everything else (see `state_file.py`)

Of a sharded model each rank writes the slices that it owns and reads the slices that it holds,
whatever the layout was when they were written (`pieces.py`, `tensor_reader.py`). For each kind of
other state its owner declares the placement on the ranks (`optim/spec.py`): sharded like a
parameter; replicated, and written by one rank; assigned to a few ranks, one of which writes it; or
one per rank, stored as a tensor with a row for each.

In a decentralized run, whose workers have weights of their own, model.safetensors holds the average
of all workers, and everything else is there once for each worker: worker-3/exp_avg/norm.weight.
Their own weights are kept by the strategy. The same workers go on exactly where they stopped; any
others start from the average, each with the optimizer state of one of the old ones.

Before a checkpoint is used, the names, shapes and formats of its tensors are compared with those of
the model and the optimizer, and all numbers must be finite. Each rank checks what it loads.

There is no random state: dropout and data order are functions of the seed and progress. Learning
rate and other settings are not here either: they come from the run file, so changing them takes
effect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.files import storage_errors
from gristmill.base.tensor_slices import TensorSlice, whole_slice
from gristmill.base.units import Progress
from gristmill.checkpoint.host import HOST, HostMemory, required_bytes
from gristmill.checkpoint.layout import Best
from gristmill.checkpoint.loading import (
    FiniteCheck,
    check_dtypes,
    check_shapes,
    fill_shard,
    load_parameters,
)
from gristmill.checkpoint.pieces import (
    MODEL,
    OPTIMIZER,
    STRATEGY,
    TensorReport,
    file_name,
    piece_key,
)
from gristmill.checkpoint.state_file import FORMAT, VERSION, Counters, read_state
from gristmill.checkpoint.tensorfile import DTYPE_NAMES, TensorReader, open_tensors, write_tensors
from gristmill.optim.spec import CheckpointState, Optimizer, Placement, StateEntry
from gristmill.strategies.sharding import ShardedParameter, whole_parameters


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
    """Values of identity keys that older checkpoints do not have."""
    identity_retired: Mapping[str, Any] = field(default_factory=dict)
    """Identity keys of older checkpoints that no longer exist, with the value that had no
    effect."""
    identity_until: Mapping[str, Callable[[Any, Any, int], bool]] = field(default_factory=dict)
    """Identity keys that may differ in what is ahead: whether two values, either of which may be
    None, agree on the samples that are done."""
    progress: Progress = field(default_factory=Progress)
    counters: Counters = field(default_factory=Counters)
    strategy: dict[str, Any] = field(default_factory=dict)
    """What the strategy keeps as plain numbers."""
    strategy_tensors: CheckpointState | None = None
    """What it keeps as tensors."""
    health: dict[str, Any] = field(default_factory=dict)
    """What judges the steps of the run, as plain numbers; when it is saved, by worker if there are
    any."""
    workers: tuple[int, ...] = ()
    """The workers, if they have weights of their own."""
    worker: int = 0
    """The worker of this rank."""
    rank: int = 0
    ranks: int = 1
    writes_unowned: bool = True
    """Whether this rank writes replicated state that belongs to no parameter."""
    layout: dict[str, int] = field(default_factory=dict)
    """The mesh sizes by axis. Like `micro_batch`, they decide the order of a step's sums."""
    micro_batch: int | None = None
    best: Best | None = None
    """The best validation loss so far, whether its checkpoint still exists or not."""
    base: dict[str, Any] | None = None
    """The model that adapters belong to, if the run trains those only (see `adapter_base.py`)."""
    parameters: Mapping[str, ShardedParameter] = field(default_factory=dict)
    """This rank's shard of every parameter that is saved; all of the model if not given."""
    padded: frozenset[str] = frozenset()
    """Parameters with a row for each token, which may be stored with more rows or fewer."""
    names: frozenset[str] = frozenset()
    """All parameters of the whole model that are saved, none of which may be missing from a
    checkpoint; those that any rank holds if not given."""

    def __post_init__(self) -> None:
        self.parameters = self.parameters or whole_parameters(self.model)

    def writes_average(self, name: str) -> bool:
        """Whether this rank's worker writes a parameter of the average; the work is shared."""
        if not self.workers:
            return True
        return self.workers[crc32(name.encode()) % len(self.workers)] == self.worker


def worker_prefix(worker: int) -> str:
    """How the names of a worker's tensors begin."""
    return f"worker-{worker}/"


@dataclass
class Contribution:
    """What one rank writes of a kind of tensors, and what it reports of all that it holds."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By their key in the file; in a snapshot, copies in host memory."""
    reports: dict[str, TensorReport] = field(default_factory=dict)
    """By the name of the tensor."""

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        pieces: Iterable[tuple[TensorSlice, torch.Tensor]],
    ) -> None:
        """Add the pieces of a tensor that this rank writes."""
        bounds = []
        for region, piece in pieces:
            self.tensors[piece_key(name, region, shape)] = piece.detach()
            bounds.append((region.begin, region.end))
        self.reports[name] = (DTYPE_NAMES[dtype], shape, bounds)

    def add_sharded(
        self,
        name: str,
        value: torch.Tensor,
        parameter: ShardedParameter,
        *,
        writes: bool = True,
    ) -> None:
        """Add what this rank owns of a tensor that is sharded like a parameter, if it writes that
        at all."""
        assert value.shape == parameter.local.shape, f"{name} is not sharded like {parameter.name}"
        owned = parameter.owned and writes
        slices, shape = parameter.slices if owned else (), parameter.shape
        in_place = all(shard.whole == shard.local for shard in slices)
        if in_place and sum(shard.whole.size for shard in slices) == math.prod(shape):
            slices = whole_slice(shape)  # all of it is here: one piece, not several
        pieces = [(shard.whole, value[shard.local.slices]) for shard in slices]
        self.add(name, shape, value.dtype, pieces)

    def add_state(self, source: CheckpointState, state: TrainState) -> None:
        """Add what this rank writes of the state of an optimizer or a strategy."""
        prefix = worker_prefix(state.worker) if state.workers else ""
        for kind, key, value in source.entries():
            name, parameter = f"{prefix}{kind}/{key}", state.parameters.get(key)
            match source.placements[kind]:
                case Placement.SHARDED:
                    self.add_sharded(name, value, state.parameters[key])
                    continue
                case Placement.REPLICATED | Placement.SCALAR:
                    shape, region = tuple(value.shape), TensorSlice.whole(value.shape)
                    writes = state.writes_unowned
                    if parameter is not None:
                        writes = parameter.writes_replicated
                case Placement.ASSIGNED:
                    shape, region = tuple(value.shape), TensorSlice.whole(value.shape)
                    writes = True
                case Placement.PER_RANK:
                    shape, writes = (state.ranks, *value.shape), True
                    region = TensorSlice.whole(shape).narrow(0, state.rank, state.rank + 1)
                    value = value[None]
            self.add(name, shape, value.dtype, [(region, value)] if writes else [])


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of this rank's part of a state, which training can no longer change."""

    kinds: dict[str, Contribution]
    """By the kind of tensors: those of the model, the optimizer, and the strategy if any."""
    state: dict[str, Any]
    names: frozenset[str] = frozenset()

    @property
    def step(self) -> int:
        return int(self.state["progress"]["steps"])

    @property
    def bytes(self) -> int:
        """Size of this rank's files, headers not counted."""
        return sum(
            tensor.nbytes for mine in self.kinds.values() for tensor in mine.tensors.values()
        )

    def write(self, folder: Path, *, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
        """Write this rank's files, and report as JSON what is in them. A rank that owns nothing of
        a kind writes no file of it."""
        contents = {
            folder / file_name(kind, rank=rank, ranks=ranks): mine.tensors
            for kind, mine in self.kinds.items()
            if mine.tensors or ranks == 1
        }
        with storage_errors(folder), ThreadPoolExecutor(len(contents) or 1) as pool:
            files = list(pool.map(write_tensors, contents, contents.values()))
        tensors = {kind: mine.reports for kind, mine in self.kinds.items()}
        return {"files": [dataclasses.astuple(file) for file in files], "tensors": tensors}


def named_tensors(kinds: Mapping[str, Contribution]) -> dict[str, torch.Tensor]:
    """The tensors of all kinds, named KIND/KEY."""
    return {
        f"{kind}/{key}": tensor
        for kind, mine in kinds.items()
        for key, tensor in mine.tensors.items()
    }


def contributions(state: TrainState) -> dict[str, Contribution]:
    """What this rank writes of a state, by kind, where it lies now."""
    kinds = {kind: Contribution() for kind in (MODEL, OPTIMIZER)}
    for parameter in state.parameters.values():
        name, writes = parameter.name, state.writes_average(parameter.name)
        kinds[MODEL].add_sharded(name, parameter.local, parameter, writes=writes)
    kinds[OPTIMIZER].add_state(state.optimizer, state)
    if state.strategy_tensors is not None:
        kinds[STRATEGY] = Contribution()
        kinds[STRATEGY].add_state(state.strategy_tensors, state)
    return kinds


def state_bytes(state: TrainState) -> int:
    """The host memory that a copy of this rank's part takes."""
    return required_bytes(named_tensors(contributions(state)))


def capture(state: TrainState, host: HostMemory = HOST) -> Snapshot:
    """Copy this rank's part of a state to host memory. Training waits for this step of saving
    only."""
    kinds = contributions(state)
    copies = host.copy(named_tensors(kinds))
    for kind, mine in kinds.items():
        mine.tensors = {key: copies[f"{kind}/{key}"] for key in mine.tensors}
    return Snapshot(
        kinds=kinds,
        state={
            "format": FORMAT,
            "version": VERSION,
            "progress": dataclasses.asdict(state.progress),
            "identity": state.identity,
            "settings": state.settings,
            "strategy": state.strategy,
            "health": state.health,
            "counters": dataclasses.asdict(state.counters),
            "best": None if state.best is None else dataclasses.asdict(state.best),
            "layout": state.layout,
            "workers": list(state.workers) or None,
            "base": state.base,
            "micro_batch": state.micro_batch,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        names=state.names,
    )


# ------------------------------------------------------------------ reading


def restore(state: TrainState, folder: Path, *, other_run: bool = False) -> dict[str, Any]:
    """Put a checkpoint's content into a freshly built state; returns state.json's content. A
    `DataError` means that the content cannot be used. Another checkpoint can still be restored
    after it: everything that was loaded until then is overwritten. `other_run`: the run that goes
    on from here is another one, so only what the tensors depend on must be the same."""
    values = read_state(folder)
    _check_identity(values, state, folder, other_run=other_run)
    weights = open_tensors(folder)
    check_dtypes(
        {parameter.name: parameter.local.dtype for parameter in state.parameters.values()}, weights
    )
    load_parameters(state.parameters.values(), weights, padded=state.padded)
    saved = values.get("workers")
    prefix = "" if not saved else worker_prefix(_counterpart(state, saved))
    progress = Progress(**values["progress"])
    stored = open_tensors(folder, OPTIMIZER).below(prefix)
    _check_optimizer(state, stored, stepped=progress.steps > 0)
    _restore_entries(state.optimizer, stored, state)
    # Those of other workers do not fit together.
    if state.strategy_tensors is not None and (saved or []) == list(state.workers):
        _restore_entries(
            state.strategy_tensors, open_tensors(folder, STRATEGY).below(prefix), state
        )
    state.progress = progress
    state.counters = Counters(**values["counters"])
    state.strategy, state.health = values["strategy"], values.get("health", {})
    if saved or state.workers:
        # What other workers have seen says nothing about this one's steps.
        same = (saved or []) == list(state.workers)
        state.health = state.health.get(str(state.worker), {}) if same else {}
    state.best = Best(**values["best"]) if values.get("best") else None
    return values


def _counterpart(state: TrainState, saved: Sequence[int]) -> int:
    """Which of the saved workers this rank's worker continues."""
    if list(saved) == list(state.workers):
        return state.worker
    return saved[state.workers.index(state.worker) % len(saved)] if state.workers else saved[0]


def _check_optimizer(state: TrainState, stored: TensorReader, *, stepped: bool) -> None:
    """Refuse optimizer state that does not fit the parameters. The kernels check nothing: a tensor
    of another shape lets them write outside of their memory."""
    optimizer, parameters = state.optimizer, state.parameters
    for name, kinds in optimizer.stepped_kinds().items():
        missing = [f"{kind}/{name}" for kind in kinds if f"{kind}/{name}" not in stored.shapes]
        # No parameter has any state before the first step.
        if missing and (stepped or len(missing) < len(kinds)):
            raise DataError([Problem(f"there is no {entry}", stored.where) for entry in missing])
    shapes, dtypes, padded = {}, {}, set()
    for name in stored.shapes:
        kind, _, key = name.partition("/")
        if key not in parameters or not optimizer.expects(kind, key):
            continue
        dtypes[name] = parameters[key].local.dtype
        match optimizer.placements[kind]:
            case Placement.SHARDED:
                shapes[name] = parameters[key].shape
                padded |= {name} if key in state.padded else set()
            case Placement.SCALAR:
                shapes[name] = ()
    check_shapes(shapes, stored, padded=frozenset(padded))
    check_dtypes(dtypes, stored)


def _restore_entries(source: CheckpointState, stored: TensorReader, state: TrainState) -> None:
    """Load the entries that an optimizer or a strategy expects, once all of them are found to be
    finite."""
    device = next(iter(state.parameters.values())).local.device
    entries, loaded = [], FiniteCheck()
    for name in stored.shapes:
        kind, _, key = name.partition("/")
        if not source.expects(kind, key):
            continue
        match source.placements[kind]:
            case Placement.SHARDED:
                parameter = state.parameters[key]
                shape, dtype = parameter.local.shape, stored.dtype(name)
                value = torch.zeros(shape, dtype=dtype, device=parameter.local.device)
                fill_shard(value, parameter, stored, name)
            case Placement.REPLICATED | Placement.SCALAR | Placement.ASSIGNED:
                value = stored.read_exact(name).to(device)
            case Placement.PER_RANK:
                ranks = stored.shapes[name][:1]
                if ranks != (state.ranks,):
                    was = "".join(map(str, ranks))
                    raise UserError(
                        f"{name} was saved by {was} processes, each with its own, and now there "
                        f"are {state.ranks}",
                        where=stored.where,
                        remedy=f"resume with {was} processes",
                    )
                value = stored.read_exact(name)[state.rank].to(device)
        loaded.add(name, value)
        entries.append(StateEntry(kind, key, value))
    loaded.require(stored.where)
    for entry in entries:
        source.load_entry(entry)


# ------------------------------------------------------------------ identity


def identity_changes(
    saved: dict[str, Any],
    state: TrainState,
    *,
    samples: int,
    now: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """What should have stayed the same since so many samples were done; `now` is the identity of
    the state if not given."""
    now, retired = state.identity if now is None else now, state.identity_retired.items()
    saved = {name: value for name, value in saved.items() if (name, value) not in retired}
    problems = []
    for name in sorted({*saved, *now}):
        before, after = saved.get(name, state.identity_defaults.get(name)), now.get(name)
        if name in state.identity_until:
            if not state.identity_until[name](before, after, samples):
                what = f"the {samples} samples that are done were chosen otherwise"
                problems.append(Problem(what, where=name))
        elif before != after:
            problems.append(Problem(f"was {before!r} and is now {after!r}", where=name))
    return problems


def _check_identity(
    values: dict[str, Any], state: TrainState, folder: Path, *, other_run: bool
) -> None:
    samples = values["progress"]["samples"]
    problems = identity_changes(values["identity"], state, samples=samples)
    what = "the run in this folder cannot be resumed with these settings"
    remedy = (
        "undo these changes to resume the run; or give the new run another name, with "
        f"model.start = {str(folder.parent.parent)!r} to start from these weights; or use "
        "--fresh, which moves the old run aside"
    )
    if other_run:
        problems = [
            problem for problem in problems if str(problem.where).startswith(("model.", "optim."))
        ]
        what = "the run cannot begin from this checkpoint, which is of another model or optimizer"
        remedy = "undo these changes, or set model.start instead of checkpoint.load"
    if problems:
        last = dataclasses.replace(problems[-1], remedy=remedy)
        raise UserError([Problem(what, str(folder)), *problems[:-1], last])
