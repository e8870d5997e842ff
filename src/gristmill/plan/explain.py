"""Out of memory, explained: where the memory of a process went, and the smallest change that fits.

Changes are tried in this order, and the first one that fits is the answer. None of them changes the
global batch or a seed, so the run computes the same:

    smaller micro-batches    the largest part of a process's batch that fits
    recomputation            of activation functions and norms, or of whole blocks; with the
                             micro-batch as it is, then with smaller ones
    sharding                 weights over the processes that now hold copies of them
    offload                  the optimizer's state to host memory

A plan that said that a run would fit, while its device ran out, is too low by at least the
difference. What it says about a change is raised by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import format_bytes
from gristmill.config.layouts import layout_problems
from gristmill.config.optim import AdamWConfig
from gristmill.config.parallel import Mesh, build_mesh
from gristmill.config.resolve import Portions, divisors, portions
from gristmill.config.rules import check
from gristmill.config.schema import RunConfig
from gristmill.config.settings import UNSET, NoEffect
from gristmill.plan.memory import MemoryPlan, plan_memory

MARGIN = 1.02
"""A run that ran out needs at least this many times of what there was."""
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class MeasuredMemory:
    """What a device said about its memory, in bytes; None where it cannot tell."""

    total: int
    """What the process can have at all."""
    allocated: int | None = None
    """In tensors now."""
    peak: int | None = None
    """The most so far."""
    reserved: int | None = None
    """What the allocator holds, used or not."""
    free: int | None = None

    @property
    def outside(self) -> int | None:
        """What is neither free nor the allocator's: other processes, and CUDA itself."""
        if self.free is None or self.reserved is None:
            return None
        return max(0, self.total - self.free - self.reserved)


@dataclass(frozen=True)
class Situation:
    """A run, as far as its memory goes."""

    config: RunConfig
    mesh: Mesh
    vocab: int
    device: str
    """Its kind, such as cuda."""
    stage: int | None = None
    """Of the pipeline; the one that needs most if not given."""

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return _portions(self).batch

    @property
    def micro_batch(self) -> int:
        """Samples that go through the model at once."""
        return _portions(self).micro_batch

    def plan(self) -> MemoryPlan:
        stages = {0, self.mesh.pp - 1} if self.stage is None else {self.stage}
        plans = [
            plan_memory(
                self.config,
                self.mesh,
                vocab=self.vocab,
                micro_batch=self.micro_batch,
                recompute=self.config.train.recompute,
                stage=stage,
                device=self.device,
            )
            for stage in stages
        ]
        return max(plans, key=lambda plan: plan.total)


def _portions(situation: Situation) -> Portions:
    found = portions(situation.config.train, parts=situation.mesh.data)
    assert isinstance(found, Portions), "the rules are checked when settings are loaded"
    return found


Settings = dict[tuple[str, str], Any]
"""Values by table and name; None takes a setting away."""


@dataclass(frozen=True)
class Change:
    """Settings that make a run fit."""

    settings: Settings
    config: RunConfig
    """The run with them."""
    plan: MemoryPlan
    needs: int
    """Bytes."""

    @property
    def words(self) -> list[str]:
        """The settings as a shell takes them."""
        return [_word(*path, value) for path, value in self.settings.items()]


def _word(table: str, name: str, value: Any) -> str:
    if value is None:
        return f"{table}.{name}={UNSET}"
    quoted = f'"{value}"' if isinstance(value, str) else str(value)
    word = f"{table}.{name}={quoted}"
    return f"'{word}'" if isinstance(value, str) else word


class TooLittleMemory(UserError):  # noqa: N818
    """A run ran out of memory, with what would fit."""

    change: Change | None = None
    retries: bool = False
    """Whether whoever started the run will begin again with the change."""


# ------------------------------------------------------------------ what would fit


def smallest_change(situation: Situation, *, capacity: int, factor: float = 1.0) -> Change | None:
    """The first change in the order above that fits into a number of bytes. Plans are raised by a
    factor."""
    known = _broken(situation.config)
    for settings in _changes(situation):
        config = _with(situation.config, settings)
        mesh = build_mesh(config.parallel, situation.mesh.processes)
        # Settings that the rules refuse are no remedy.
        if isinstance(mesh, Problem) or set(_broken(config, mesh)) - set(known):
            continue
        changed = replace(situation, config=config, mesh=mesh)
        plan = changed.plan()
        needs = int(factor * plan.total)
        if needs <= capacity:
            return Change(settings, config, plan, needs)
    return None


def _with(config: RunConfig, settings: Settings) -> RunConfig:
    """A run with other settings."""
    tables: dict[str, Any] = {}
    for (table, name), value in settings.items():
        one = tables.get(table, getattr(config, table))
        tables[table] = one.model_copy(update={name: value})
    return config.model_copy(update=tables)


def _broken(config: RunConfig, mesh: Mesh | None = None) -> list[Problem]:
    """What the rules refuse."""
    found = [one for one in check(config, written=()) if not isinstance(one, NoEffect)]
    if mesh is not None:
        found += layout_problems(config, processes=mesh.processes)
    return found


def _changes(situation: Situation) -> Iterator[Settings]:
    """Settings in the order in which they are tried."""
    config, mesh = situation.config, situation.mesh
    now = MODES.index(config.train.recompute)
    smaller = list(_smaller(situation))
    yield from smaller
    for mode in MODES[now + 1 :]:
        recompute: Settings = {("train", "recompute"): mode}
        yield recompute
        yield from ({**settings, **recompute} for settings in smaller)
    full: Settings = {} if now == len(MODES) - 1 else {("train", "recompute"): "full"}
    least: Settings = {**(smaller[-1] if smaller else {}), **full}
    if mesh.dp_replicate > 1 and not config.parallel.decentralized:
        shards = mesh.dp_replicate * mesh.dp_shard
        sharded: Settings = {
            ("parallel", "dp_replicate"): 1,
            ("parallel", "dp_shard"): shards,
        }
        yield sharded
        yield from ({**settings, **sharded} for settings in smaller)
        yield {**least, **sharded}
    if isinstance(config.optim, AdamWConfig) and situation.device == "cuda":
        offload: Settings = {("runtime", "offload"): "optimizer"}
        yield offload
        yield {**least, **offload}


def _smaller(situation: Situation) -> Iterator[Settings]:
    """Smaller micro-batches of the same global batch, the largest first."""
    batch, micro = situation.batch, situation.micro_batch
    for size in reversed(divisors(batch // situation.mesh.data)):
        if size < micro:
            settings: Settings = {("train", "batch"): batch, ("train", "micro_batch"): size}
            if situation.config.train.accumulate is not None:
                settings["train", "accumulate"] = None
            yield settings


# ------------------------------------------------------------------ in words


def memory_table(plan: MemoryPlan, measured: MeasuredMemory | None = None) -> str:
    """Where memory goes by kind, beside what the device said."""
    left = [(kind, format_bytes(size)) for kind, size in plan.parts.items() if size]
    left.append(("in all", format_bytes(plan.total)))
    right = [] if measured is None else _measured_rows(measured)
    rows = [("planned", "", "measured" if right else "", "")]
    for number in range(max(len(left), len(right))):
        one = left[number] if number < len(left) else ("", "")
        other = right[number] if number < len(right) else ("", "")
        rows.append((*one, *other))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"  {a:<{widths[0]}}  {b:>{widths[1]}}    {c:<{widths[2]}}  {d:>{widths[3]}}".rstrip()
        for a, b, c, d in rows
    ]
    return "\n".join(lines)


def _measured_rows(measured: MeasuredMemory) -> list[tuple[str, str]]:
    known = {
        "allocated": measured.allocated,
        "peak": measured.peak,
        "reserved": measured.reserved,
        "free": measured.free,
        "others and CUDA": measured.outside,
        "the device has": measured.total,
    }
    return [(name, format_bytes(size)) for name, size in known.items() if size is not None]


def explained(
    what: str, situation: Situation, measured: MeasuredMemory, *, source: str
) -> TooLittleMemory:
    """The error of a run that ran out of memory. `source`: what the command trains."""
    plan = situation.plan()
    capacity = available(measured)
    factor = max(1.0, MARGIN * capacity / plan.total)
    change = smallest_change(situation, capacity=capacity, factor=factor)
    table = memory_table(plan, measured)
    text = f"{what}\nwhere it goes, at the largest moment of a step ({plan.moment}):\n{table}"
    error = TooLittleMemory(text, remedy=_remedy(change, source))
    error.change = change
    return error


def available(measured: MeasuredMemory) -> int:
    """What the process can have, beside other processes."""
    if measured.free is None or measured.reserved is None:
        return measured.total
    return max(1, measured.free + measured.reserved)


def _remedy(change: Change | None, source: str) -> str:
    if change is None:
        return "no change of micro-batch, recomputation or sharding fits: choose a smaller model"
    words = " ".join(change.words)
    return f"this needs {format_bytes(change.needs)}: gristmill train {source} {words}"


def described_change(change: Change) -> str:
    """What was chosen, in a line."""
    kept = {path: value for path, value in change.settings.items() if path not in _FOLLOWING}
    names = [f"{table}.{name} = {value}" for (table, name), value in kept.items()]
    return f"{', '.join(names)} needs {format_bytes(change.needs)}"


_FOLLOWING = {("train", "batch"), ("train", "accumulate")}
"""Settings that only say that the batch stays."""
