"""Checkpoints that many processes write and any other number reads.

Most tests imagine the processes: what each would hold is worked out, and they write and read one
after the other. A few have real ones.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from gristmill.base.errors import Exit, UserError
from gristmill.base.tensor_slices import ShardSlice, row_slices, split_slices, whole_slice
from gristmill.base.units import Progress
from gristmill.checkpoint.layout import CheckpointFolder, step_of, verify
from gristmill.checkpoint.pieces import PIECES
from gristmill.checkpoint.state import Snapshot, TrainState, capture, restore
from gristmill.checkpoint.state_file import read_state
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.checkpoint.writer import CheckpointWriter, commit_pieces
from gristmill.config.schema import CheckpointConfig
from gristmill.distributed.control import ControlGroup
from gristmill.optim.spec import ParameterOptimizer, Placement, StateEntry
from gristmill.strategies.sharding import ShardedParameter

VOCAB, BLANK = 50, -1.0


@dataclass(frozen=True)
class World:
    """A number of processes, and how they divide a model."""

    copies: int = 1
    parts: int = 1
    """Processes that share layers."""
    shards: int = 1
    """Processes that share rows of what each of these has."""

    @property
    def size(self) -> int:
        return self.copies * self.parts * self.shards

    @property
    def rows(self) -> int:
        """Rows of the table, padded so that they can be divided."""
        multiple = 4 * self.parts
        return -(-VOCAB // multiple) * multiple


WORLDS = {
    1: World(),
    2: World(shards=2),
    3: World(parts=3),
    4: World(parts=2, shards=2),
    8: World(copies=2, parts=2, shards=2),
}

SPLITS = {"embedding.weight": 0, "qkv.weight": 0, "out.weight": 1}
STACKS = {"qkv.weight": (12, 6, 6)}
PADDED = frozenset({"embedding.weight"})


def numbers(name: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose every element says where in which tensor it is."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) + 1000.0 * sum(map(ord, name))).reshape(tuple(shape))


class Moments(ParameterOptimizer):
    """State of every placement."""

    placements: ClassVar[Mapping[str, Placement]] = {
        "exp_avg": Placement.SHARDED,
        "step": Placement.REPLICATED,
        "second_moment": Placement.REPLICATED,
        "factor": Placement.REPLICATED,
        "own": Placement.PER_RANK,
    }

    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        raise AssertionError("nothing is stepped here")


class Imagined:
    """The whole model as a world sees it, and what each process holds of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shapes: dict[str, tuple[int, ...]] = {
            "embedding.weight": (world.rows, 5),
            "qkv.weight": (24, 5),
            "out.weight": (5, 12),
            "norm.weight": (5,),
            "gate": (1,),
            "scale": (),
        }

    def whole(self, name: str) -> torch.Tensor:
        return numbers(name, self.shapes[name.rpartition("/")[2]])

    def held(self, rank: int) -> dict[str, ShardedParameter]:
        found = [self._held(name, rank) for name in self.shapes]
        return {one.name: one for one in found}

    def _held(self, name: str, rank: int) -> ShardedParameter:
        world, shape = self.world, self.shapes[name]
        rest, shard = divmod(rank, world.shards)
        copy, part = divmod(rest, world.parts)
        pieces, local, owned = whole_slice(shape), list(shape), copy == 0
        if name in SPLITS:
            dim = SPLITS[name]
            stack = STACKS.get(name, (shape[dim],))
            pieces = split_slices(shape, dim=dim, parts=stack, rank=part, ranks=world.parts)
            local[dim] //= world.parts
        else:
            owned = owned and part == 0
        if shape:
            pieces = row_slices(pieces, local, rank=shard, ranks=world.shards)
            local[0] = max((piece.local.end[0] for piece in pieces), default=0)
        else:
            owned = owned and shard == 0
        return ShardedParameter(name, shape, nn.Parameter(torch.full(local, BLANK)), pieces, owned)

    def blank(self, rank: int, *, padded: frozenset[str] = PADDED) -> TrainState:
        held = self.held(rank)
        optimizer = Moments({name: one.local for name, one in held.items()}, [])
        ranks = {"rank": rank, "ranks": self.world.size}
        return TrainState(nn.Module(), optimizer, {}, {}, parameters=held, padded=padded, **ranks)

    def filled(self, rank: int, *, step: int = 1) -> TrainState:
        """What a process holds in the middle of training."""
        state = self.blank(rank)
        state.progress = Progress(step, step, step)
        for one in state.parameters.values():
            _put(one.local.detach(), self.whole(one.name), one.slices)
            moment = torch.full(one.local.shape, BLANK)
            _put(moment, self.whole(f"exp_avg/{one.name}"), one.slices)
            assert isinstance(state.optimizer, Moments)
            state.optimizer.state[one.local] = {
                "exp_avg": moment,
                "step": torch.tensor(float(step)),
                "second_moment": numbers(f"second_moment/{one.name}", (7,)),
            }
        return state


def _put(target: torch.Tensor, whole: torch.Tensor, pieces: Sequence[ShardSlice]) -> None:
    for piece in pieces:
        target[piece.local.slices] = whole[piece.whole.slices]


def save(folder: CheckpointFolder, imagined: Imagined, *, step: int = 1) -> Path:
    """A checkpoint by all processes of a world."""
    return save_states(
        folder, [imagined.filled(rank, step=step) for rank in range(imagined.world.size)]
    )


def save_states(folder: CheckpointFolder, states: Sequence[TrainState]) -> Path:
    """What a writer does, by one process after the other."""
    snapshots = [capture(state) for state in states]
    staging = folder.begin(snapshots[0].step)
    reports = [
        one.write(staging, rank=rank, ranks=len(states)) for rank, one in enumerate(snapshots)
    ]
    return commit_pieces(folder, staging, snapshot=snapshots[0], reports=reports)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


# ------------------------------------------------------------------ from any number to any other


@pytest.mark.parametrize("writers", WORLDS)
def test_any_number_of_processes_reads_what_any_other_wrote(
    folder: CheckpointFolder, writers: int
) -> None:
    wrote = Imagined(WORLDS[writers])
    path = save(folder, wrote, step=6)
    assert verify(path) == []
    for readers in WORLDS.values():
        reads = Imagined(readers)
        for rank in range(readers.size):
            state = reads.blank(rank)
            restore(state, path)
            assert state.progress.steps == 6
            for one in state.parameters.values():
                assert_read(one, state.optimizer.state[one.local], wrote)


def assert_read(held: ShardedParameter, state: dict[str, torch.Tensor], wrote: Imagined) -> None:
    """What was stored is there; rows that were not are padding, and all of their numbers 0."""
    rows = wrote.shapes[held.name][:1]
    count = 0
    for piece in held.slices:
        for at in torch.cartesian_prod(*map(torch.arange, piece.whole.shape)) if rows else [()]:
            offset = tuple(map(int, at.reshape(-1))) if rows else ()
            there = tuple(b + o for b, o in zip(piece.whole.begin, offset, strict=True))
            here = tuple(b + o for b, o in zip(piece.local.begin, offset, strict=True))
            stored = not rows or there[0] < rows[0]
            moment = wrote.whole(f"exp_avg/{held.name}")[there] if stored else 0.0
            assert held.local[here] == (wrote.whole(held.name)[there] if stored else 0.0)
            assert state["exp_avg"][here] == moment
            count += 1
    assert count == held.local.numel() == state["exp_avg"].numel()
    assert state["step"] == 6 and state["step"].shape == ()
    assert torch.equal(state["second_moment"], numbers(f"second_moment/{held.name}", (7,)))


@pytest.mark.parametrize("writers", WORLDS)
def test_whole_tensors_are_read_one_at_a_time(folder: CheckpointFolder, writers: int) -> None:
    wrote = Imagined(WORLDS[writers])
    path = save(folder, wrote)
    weights, moments = open_tensors(path), open_tensors(path, "optimizer")
    assert sorted(weights.shapes) == sorted(wrote.shapes)
    assert len(moments.shapes) == 3 * len(weights.shapes)
    for name in weights.shapes:
        tensor, moment = weights.read_exact(name), moments.read_exact(f"exp_avg/{name}")
        assert torch.equal(tensor, wrote.whole(name))
        assert torch.equal(moment, wrote.whole(f"exp_avg/{name}"))
        tensor.zero_()
        assert torch.equal(weights.read_exact(name), wrote.whole(name))  # what is read is a copy


def test_one_process_writes_whole_files(folder: CheckpointFolder) -> None:
    path = save(folder, Imagined(WORLDS[1]))
    names = ["MANIFEST", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(file.name for file in path.iterdir()) == names
    assert load_file(path / "model.safetensors").keys() == Imagined(WORLDS[1]).shapes.keys()
    assert "step/norm.weight" in load_file(path / "optimizer.safetensors")
    assert read_state(path)["version"] == 1


def test_many_processes_write_each_element_once(folder: CheckpointFolder) -> None:
    imagined = Imagined(WORLDS[8])
    path = save(folder, imagined)
    files = sorted(file.name for file in path.glob("model*"))
    # The processes with the second copy of the model own nothing.
    assert files == [f"model-{n:05d}-of-00008.safetensors" for n in (1, 2, 3, 4)]
    keys = [key for file in files for key in load_file(path / file)]
    assert "qkv.weight[18:21,0:5]" in keys and "scale" in keys and "gate" in keys
    values = [value for file in files for value in load_file(path / file).values()]
    sizes = [torch.Size(shape).numel() for shape in imagined.shapes.values()]
    assert sum(value.numel() for value in values) == sum(sizes)
    state = read_state(path)
    assert (state["version"], state["processes"]) == (2, 8)


def test_a_process_opens_only_the_files_that_have_its_part(folder: CheckpointFolder) -> None:
    path = save(folder, Imagined(WORLDS[4]))
    weights = open_tensors(path)
    first = Imagined(WORLDS[4]).held(0)["embedding.weight"]
    assert len(list(weights.parts("embedding.weight", first.slices[0].whole))) == 1
    assert list(weights._files) == ["model-00001-of-00004.safetensors"]


def test_a_parameter_in_two_places_is_written_by_one(folder: CheckpointFolder) -> None:
    """The tied head at the end of a pipeline is the embedding at its beginning."""
    first, last = Imagined(WORLDS[1]).filled(0), Imagined(WORLDS[1]).filled(0)
    tied = last.parameters["embedding.weight"]
    last.parameters = {"embedding.weight": replace(tied, owned=False)}
    last.optimizer = Moments({"embedding.weight": tied.local}, [])
    path = save_states(folder, [first, last])
    assert len(list(path.glob("model*"))) == 1
    tied.local.detach().zero_()
    restore(last, path)
    assert torch.equal(tied.local, first.parameters["embedding.weight"].local)


# ------------------------------------------------------------------ where state lies


class Factors:
    """State of a strategy: a factor for a module, and something of each worker's own."""

    placements: ClassVar[Mapping[str, Placement]] = {
        "factor": Placement.REPLICATED,
        "own": Placement.PER_RANK,
    }

    def __init__(self, rank: int) -> None:
        self.values = {
            ("factor", "blocks.0"): numbers("factor", (5, 5)),
            ("own", "buffer"): torch.tensor([float(rank), 7.0]),
        }

    def entries(self) -> Iterator[StateEntry]:
        return (StateEntry(*names, value) for names, value in self.values.items())

    def expects(self, kind: str, key: str) -> bool:
        return (kind, key) in self.values

    def load_entry(self, entry: StateEntry) -> None:
        self.values[entry.kind, entry.key] = entry.value


def with_factors(imagined: Imagined, rank: int) -> TrainState:
    """A factor that happens to have the shape of the shard, as a square one of a square matrix."""
    state = imagined.filled(rank)
    assert isinstance(state.optimizer, Moments)
    square = state.parameters["qkv.weight"]
    state.optimizer.state[square.local]["factor"] = numbers("factor", tuple(square.local.shape))
    state.strategy_tensors = Factors(rank)
    state.writes_unowned = rank == 0
    return state


@pytest.mark.parametrize("writers", [1, 2])
def test_state_lies_where_its_owner_says(folder: CheckpointFolder, writers: int) -> None:
    """A replicated tensor with the shape of this process's shard is not taken for sharded."""
    imagined = Imagined(WORLDS[writers])
    states = [with_factors(imagined, rank) for rank in range(writers)]
    path = save_states(folder, states)
    assert verify(path) == []
    for rank in range(writers):
        again = imagined.blank(rank)
        assert isinstance(again.optimizer, Moments)
        factors = Factors(99)
        factors.values[("factor", "blocks.0")].zero_()
        again.strategy_tensors = factors
        restore(again, path)
        parameter = again.parameters["qkv.weight"].local
        wanted = numbers("factor", tuple(parameter.shape))
        assert torch.equal(again.optimizer.state[parameter]["factor"], wanted)
        assert torch.equal(factors.values["factor", "blocks.0"], numbers("factor", (5, 5)))
        assert factors.values["own", "buffer"].tolist() == [float(rank), 7.0]


def test_what_each_worker_has_of_its_own_needs_as_many_workers(folder: CheckpointFolder) -> None:
    imagined = Imagined(WORLDS[2])
    path = save_states(folder, [with_factors(imagined, rank) for rank in range(2)])
    alone = Imagined(WORLDS[1]).blank(0)
    alone.strategy_tensors = Factors(0)
    with pytest.raises(UserError, match="saved by 2 processes, each with its own") as error:
        restore(alone, path)
    assert "resume with 2 processes" in str(error.value)


def test_checkpoints_without_a_strategys_tensors_are_read(folder: CheckpointFolder) -> None:
    path = save(folder, Imagined(WORLDS[2]))
    state = Imagined(WORLDS[1]).blank(0)
    state.strategy_tensors = Factors(3)
    restore(state, path)
    assert state.strategy_tensors.values["own", "buffer"].tolist() == [3.0, 7.0]


# ------------------------------------------------------------------ shapes that do not fit


def test_other_shapes_are_refused_all_at_once(folder: CheckpointFolder) -> None:
    path = save(folder, Imagined(WORLDS[4]))
    other = Imagined(WORLDS[1])
    other.shapes |= {"out.weight": (6, 12), "norm.weight": (5, 1), "more": (2,)}
    with pytest.raises(UserError) as error:
        restore(other.blank(0, padded=frozenset()), path)
    assert [problem.what for problem in error.value.problems] == [
        "embedding.weight has shape (56, 5), not (52, 5)",
        "out.weight has shape (5, 12), not (6, 12)",
        "norm.weight has shape (5,), not (5, 1)",
        "there is no more",
    ]
    assert error.value.exit is Exit.DATA


# ------------------------------------------------------------------ incomplete and damaged


def changed(imagined: Imagined, rank: int, name: str, **values: Any) -> list[TrainState]:
    """All states of a world, of which one process sees one parameter in another way."""
    states = [imagined.filled(rank) for rank in range(imagined.world.size)]
    held = states[rank].parameters
    states[rank].parameters = {**held, name: replace(held[name], **values)}
    return states


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("out.weight", {"owned": False}, "out.weight: its pieces hold 48 of 60 elements"),
        ("norm.weight", {"owned": True}, r"norm.weight: TensorSlice\(.*\) is in two pieces"),
        ("norm.weight", {"shape": (6,)}, "ranks disagree on model norm.weight"),
    ],
    ids=["gap", "overlap", "disagreement"],
)
def test_what_is_not_whole_is_not_committed(
    folder: CheckpointFolder, name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        save_states(folder, changed(Imagined(WORLDS[4]), 3, name, **values))
    assert folder.committed() == []


def test_a_parameter_that_no_rank_holds_is_missed(folder: CheckpointFolder) -> None:
    states = [Imagined(WORLDS[2]).filled(rank) for rank in range(2)]
    for state in states:
        state.names = frozenset({*state.parameters, "lost"})
    with pytest.raises(AssertionError, match="no rank holds \\['lost'\\]"):
        save_states(folder, states)
    for state in states:
        state.names = frozenset(state.parameters)
    assert verify(save_states(folder, states)) == []


def test_what_rank_0_does_not_see_is_not_committed(folder: CheckpointFolder) -> None:
    snapshots = [capture(Imagined(WORLDS[2]).filled(rank)) for rank in range(2)]
    staging, elsewhere = folder.begin(1), folder.root / "elsewhere"
    elsewhere.mkdir()
    reports = [
        one.write(where, rank=rank, ranks=2)
        for rank, (one, where) in enumerate(zip(snapshots, (staging, elsewhere), strict=True))
    ]
    with pytest.raises(UserError, match=r"00002-of-00002.safetensors: is missing") as error:
        commit_pieces(folder, staging, snapshot=snapshots[0], reports=reports)
    assert "a file system that all processes share" in str(error.value)
    assert folder.committed() == []


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", PIECES])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_or_missing_piece_is_found(
    folder: CheckpointFolder, name: str, damage: Callable[[Path], None]
) -> None:
    whole, damaged = (save(folder, Imagined(WORLDS[3]), step=step) for step in (1, 2))
    damage(damaged / name)
    found = folder.newest_intact()
    assert found.path == whole
    ((path, problems),) = found.damaged
    assert path == damaged and [problem.where for problem in problems] == [str(path / name)]


# ------------------------------------------------------------------ real processes


def writer_of(root: Path, said: list[str]) -> CheckpointWriter:
    return CheckpointWriter(
        CheckpointFolder(root),
        CheckpointConfig(keep=2),
        progress_at=lambda step: Progress(step, step, step),
        say=said.append,
        warn=said.append,
        control=ControlGroup(dist.new_group(backend="gloo")),
    )


def save_three_times(root: Path) -> dict[str, Any]:
    """The second time, one process may write no large files."""
    said: list[str] = []
    writer, rank = writer_of(root, said), dist.get_rank()
    imagined, failures = Imagined(WORLDS[3]), []
    for step in (1, 2, 3):
        large = resource.getrlimit(resource.RLIMIT_FSIZE)
        if (step, rank) == (2, 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, large[1]))
        writer.save(capture(imagined.filled(rank, step=step)))
        writer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, large)
        failures.append(str(writer.failure or ""))
        assert rank or not list(root.glob(".*"))  # rank 0 tidies up
    return {"said": said, "failures": failures, "defect": defect_heard(root)}


def defect_heard(root: Path) -> str:
    """Two processes take a parameter for theirs; only rank 0 finds out."""
    writer, rank = writer_of(root, []), dist.get_rank()
    state = Imagined(WORLDS[3]).filled(rank, step=9)
    held = state.parameters["norm.weight"]
    state.parameters = {**state.parameters, "norm.weight": replace(held, owned=rank < 2)}
    writer.save(capture(state))
    with pytest.raises((AssertionError, UserError)) as error:
        writer.wait()
    return f"{type(error.value).__name__}: {error.value}"


def resume_on_two(root: Path) -> dict[str, Any]:
    """The newest is damaged where one process looks, and the one before it is taken by both."""
    control, folder = ControlGroup(dist.group.WORLD), CheckpointFolder(root)
    folder.clean(control)
    found = folder.newest_intact(control)
    assert found.path is not None
    state = Imagined(WORLDS[2]).blank(control.rank)
    restore(state, found.path)
    aside = [folder.set_aside(path, control).name for path, _ in found.damaged]
    control.barrier()
    return {
        "step": state.progress.steps,
        "problems": [str(problem) for _, problems in found.damaged for problem in problems],
        "aside": aside,
        "left": [path.name for path in folder.committed()],
        "row": state.parameters["out.weight"].local[0].tolist(),
    }


def test_ranks_save_together_and_others_resume(
    crowd: Callable[..., list[Any]], folder: CheckpointFolder
) -> None:
    folder.root.mkdir()
    answers = crowd(3, save_three_times, folder.root)
    said, failures = answers[0]["said"], answers[0]["failures"]
    assert [line.split(" (")[0] for line in (said[0], said[2])] == [
        "saved checkpoint step-00000001",
        "saved checkpoint step-00000003",
    ]
    assert "checkpoint at step 2 was not saved" in said[1] and "rank 1 on " in said[1]
    assert "the disk is full" in said[1] and "rank 2" not in said[1]
    assert [bool(failure) for failure in failures] == [False, True, False]
    assert answers[0]["defect"].startswith("AssertionError: this checkpoint would not be whole")
    for answer in answers[1:]:
        assert answer["said"] == [] and answer["failures"] == failures
        assert answer["defect"].startswith(
            "UserError: rank 0 failed: AssertionError: this checkpoint"
        )
    assert [step_of(path) for path in folder.committed()] == [1, 3]

    assert [path.name[:-9] for path in folder.root.glob(".*")] == [".writing-step-00000009"]
    flip(folder.path(3) / "optimizer-00002-of-00003.safetensors")
    answers = crowd(2, resume_on_two, folder.root)
    whole = Imagined(WORLDS[3]).whole("out.weight")
    for rank, answer in enumerate(answers):
        assert answer["step"] == 1 and answer["left"] == ["step-00000001"]
        assert answer["aside"] == ["damaged-step-00000003"]
        (problem,) = answer["problems"]
        assert "optimizer-00002-of-00003.safetensors: has changed bytes" in problem
        assert answer["row"] == whole[3 * rank].tolist()
    assert not list(folder.root.glob(".*"))


def save_until_killed(root: Path) -> None:
    """One process is killed when it has written and the others wait for its word."""
    said: list[str] = []
    writer, rank = writer_of(root, said), dist.get_rank()
    imagined = Imagined(WORLDS[2])
    writer.save(capture(imagined.filled(rank)))
    writer.finish()
    real = Snapshot.write

    def deadly(self: Snapshot, folder: Path, **place: int) -> dict[str, Any]:
        real(self, folder, **place)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    if rank == 1:
        Snapshot.write = deadly  # type: ignore[method-assign]
    writer.save(capture(imagined.filled(rank, step=2)))
    try:
        writer.finish()
    except RuntimeError as error:
        (root / "heard.txt").write_text(f"{type(error).__name__}: {error}")


def test_a_process_killed_while_saving_leaves_what_was_there(
    crowd: Callable[..., list[Any]], folder: CheckpointFolder
) -> None:
    folder.root.mkdir()
    with pytest.raises(AssertionError, match="rank 1: ended without a word"):
        crowd(2, save_until_killed, folder.root)
    assert (folder.root / "heard.txt").read_text()
    assert folder.newest_intact().path == folder.path(1) and len(folder.committed()) == 1
    (left,) = folder.root.glob(".*")
    assert left.name.startswith(".writing-step-00000002.")
    folder.clean()
    assert list(folder.root.glob(".*")) == []
