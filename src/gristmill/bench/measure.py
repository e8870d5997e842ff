"""Where the time of a step goes: the real step of a run file, measured; nothing stays on disk.

Everything is assembled as for training and runs in the same loop, without hooks. Warm-up steps are
not counted: the first one compiles. Then steps are timed as in a run, and a few more run under
torch.profiler. The profiler slows the host down, so its times are fitted to the measured step: on a
GPU kernels take as long as ever, and what they leave of the step is idle time; on the CPU all times
shrink in proportion. A batch that grows is measured at its full size.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from tokenizers import models
from torch.profiler import ProfilerActivity, profile, record_function

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.files import storage_errors
from gristmill.base.process import ProcessInfo
from gristmill.base.units import Duration, Unit
from gristmill.bench.trace import OpClass, StepPhase, Trace, read_trace
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.resolve import Portions, Resolved, portions
from gristmill.config.schema import RunConfig
from gristmill.config.track import TrackConfig
from gristmill.data.dataset import path_list
from gristmill.data.loader import READ_AHEAD
from gristmill.distributed.device import Device, MatrixRate, memory_explained
from gristmill.distributed.world import World
from gristmill.optim.schedule import build_schedule
from gristmill.strategies.compiling import choose_graphs, uses_cuda_graphs
from gristmill.strategies.strategy import CompiledStep
from gristmill.text.tokenizers.library import TOKENIZER_FILE
from gristmill.text.tokenizers.tokenizer import END_OF_TEXT, open_tokenizer
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens, open_tokens
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import StepRecord
from gristmill.track.sinks import JsonlSink
from gristmill.train.assemble import BuiltRun, assemble, build_health, build_loader, build_meter
from gristmill.train.build import device_mesh, open_run_world
from gristmill.train.hooks import Hooks
from gristmill.train.loop import train
from gristmill.train.meter import Meter, StepEvent
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker

PROFILED = 3
"""Steps under the profiler."""
_LARGEST = 10
IDLE = "idle"


@dataclass(frozen=True)
class Subject:
    """What was measured."""

    name: str
    parameters: int
    batch: int
    micro_batch: int
    sequence: int
    vocabulary: int
    device: str
    precision: str
    compiled: Literal["step", "model", "blocks"] | None
    """The whole step or model as one graph, or one block for all; None if nothing is compiled."""
    random_tokens: bool
    cuda_graphs: bool = False


@dataclass(frozen=True)
class Speed:
    """How fast steps were, without the profiler."""

    steps: int
    first_step: float
    """Seconds of the first step, compilation included."""
    milliseconds: float
    """The median step."""
    fastest: float
    slowest: float
    tokens_per_second: float
    data_wait: float
    """Milliseconds that the median step waited for its batch."""
    memory: int | None
    """The most bytes allocated, where that is known."""
    tflops: float
    """10^12 operations a second, as PaLM counts them."""
    tflops_causal: float
    mfu: float | None
    """Share of the device's peak; None if that is not known."""
    mfu_causal: float | None


@dataclass(frozen=True)
class TimeRow:
    """A line of a table: some of a step's time."""

    stage: str
    part: str
    milliseconds: float
    share: float
    """Which part of the whole step that is, from 0 to 1."""


@dataclass(frozen=True)
class KernelTime:
    """All operations of one name in a step."""

    name: str
    part: str
    count: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class StepTables:
    """The time of an average step; empty where the profiler does not see the device's work."""

    stages: tuple[TimeRow, ...] = ()
    """By phase. They add up to the step; on a GPU one of them is the time the device was idle."""
    parts: tuple[TimeRow, ...] = ()
    """By phase and class of operation."""
    host: tuple[TimeRow, ...] = ()
    """On a GPU: what the host does meanwhile."""
    kernels: tuple[KernelTime, ...] = ()
    """The ten largest; on the CPU, operators."""


@dataclass(frozen=True, kw_only=True)
class BenchResult(StepTables):
    """Everything found about the steps of a run; the fields are the keys of the JSON file."""

    subject: Subject
    speed: Speed
    matrix: MatrixRate
    compiled_step: CompiledStep | None = None
    """If the whole step is one compiled function, as on XLA devices."""


def measure_run(
    config: RunConfig, *, steps: int = 30, warm_up: int = 10, random_tokens: bool = False
) -> BenchResult:
    """Run steps of a run file and find where their time goes; nothing stays on disk."""
    total = warm_up + steps + PROFILED + 1
    place = ProcessInfo()
    mesh = device_mesh(config, place)
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as name:
        folder = Path(name)
        config = _prepared(config, total)
        if random_tokens:
            config = _with_random_tokens(config, folder / "random", steps=total)
        else:
            _require_tokens(config)
        world = open_run_world(config, mesh, place)
        parts = assemble(config, RunFolder(folder / "run"), world)
        with memory_explained('set train.micro_batch lower, or train.recompute = "full"'):
            return _measure(parts, warm_up=warm_up, steps=steps, random_tokens=random_tokens)


def _prepared(config: RunConfig, steps: int) -> RunConfig:
    """The same run with a record of every step, at its full batch, for at least `steps` steps; of
    a worker with weights of its own, the steps without exchanges: there is no other."""
    until = config.train.until
    if until.unit is Unit.STEPS:
        until = Duration(max(until.amount, steps), Unit.STEPS)
    changes = {
        "train": config.train.model_copy(update={"ramp": None, "until": until}),
        "data": config.data.model_copy(update={"cache": None}),
        "track": TrackConfig(),
        "parallel": config.parallel.model_copy(
            update={"gossip": None, "local": None, "exchange": None, "elastic": False}
        ),
    }
    return config.model_copy(update=changes)


def _with_random_tokens(config: RunConfig, prefix: Path, *, steps: int) -> RunConfig:
    data, given = config.data, config.data.tokenizer
    vocabulary = config.model.vocab or GPT2_VOCABULARY
    if given and not config.model.vocab:
        vocabulary = open_tokenizer(given, merges=data.merges).size
    sequence = data.sequence or config.model.context
    write_random_tokens(prefix, vocabulary=vocabulary, tokens=max(1_000_000, 64 * sequence))
    divided = portions(config.train)
    assert isinstance(divided, Portions), "the rules are checked when settings are loaded"
    changes = {
        "paths": str(prefix),
        "split": "1,0",
        "kind": "tokens",
        **dict.fromkeys(("validation", "tokenizer", "merges", "blend", "template"), None),
        **dict.fromkeys(("stage", "max_epochs"), None),
        # The order of a whole run over so few tokens would be many thousands of epochs long.
        "samples": (steps + READ_AHEAD) * divided.batch if data.by_rows else None,
    }
    validation = config.validation.model_copy(update={"sets": None})
    return config.model_copy(
        update={"data": data.model_copy(update=changes), "validation": validation}
    )


def _require_tokens(config: RunConfig) -> None:
    problems: list[Problem] = []
    if config.data.kind == "chat":
        return  # read and refused by themselves
    for path in path_list(config.data.paths):
        try:
            open_tokens(path)
        except UserError as error:
            problems += error.problems
    if problems:
        way_out = "; --random-tokens measures without data"
        raise DataError(
            replace(problem, remedy=(problem.remedy or "prepare them") + way_out)
            for problem in problems
        )


class _ProfiledHooks(Hooks):
    """Shows the profiler how long records take."""

    def after_step(self, event: StepEvent) -> None:
        with record_function("gristmill::records"):
            super().after_step(event)


def _measure(parts: BuiltRun, *, warm_up: int, steps: int, random_tokens: bool) -> BenchResult:
    resolved, folder, device = parts.resolved, parts.folder, parts.world.device
    folder.path.mkdir()
    tracker = Tracker([JsonlSink(folder.metrics)], clock=lambda: parts.state.progress)
    meter = build_meter(parts, tracker, build_health(parts, tracker))
    writer = CheckpointWriter(
        CheckpointFolder(folder.checkpoints),
        parts.config.checkpoint,
        progress_at=resolved.progress_at,
        say=tracker.say,
        warn=tracker.say,
    )
    hooks = _ProfiledHooks(
        [],
        meter=meter,
        tracker=tracker,
        stop=StopRequest(),
        writer=writer,
        resolved=resolved,
        control=parts.control,
    )
    schedule = build_schedule(parts.config, resolved)
    batches = build_loader(parts).starting_at(parts.state.progress)
    # An endless iterator that shows the profiler how long a step waits for its batch.
    profiled_batches = iter(record_function("gristmill::data")(batches.__next__), None)

    def run(count: int) -> None:
        meter.restart_clock()
        train(
            parts.state,
            batches=profiled_batches,
            strategy=parts.strategy,
            schedule=schedule,
            hooks=hooks,
            until=Duration(parts.state.progress.steps + count, Unit.STEPS),
        )

    try:
        run(warm_up)
        run(steps)
        records = [
            record for record in read_metrics(folder.metrics) if isinstance(record, StepRecord)
        ]
        speed = _speed(records, meter, warm_up=warm_up, tokens=resolved.tokens_per_step)
        tables = _profile(run, folder, device, step=speed.milliseconds / 1000)
    finally:
        batches.close()
        tracker.close()
    compiled, cuda_graphs = _compiled(parts.config, parts.world, resolved)
    subject = Subject(
        name=parts.config.name,
        parameters=sum(parameter.numel() for parameter in parts.meta_model.parameters()),
        batch=resolved.batch,
        micro_batch=resolved.micro_batch,
        sequence=resolved.sequence,
        vocabulary=resolved.vocab,
        device=device.name,
        precision=parts.config.precision.described,
        compiled=compiled,
        random_tokens=random_tokens,
        cuda_graphs=cuda_graphs,
    )
    return BenchResult(
        **vars(tables),
        subject=subject,
        speed=speed,
        matrix=device.matrix_rate(),
        compiled_step=parts.strategy.compiled,
    )


def _speed(records: Sequence[StepRecord], meter: Meter, *, warm_up: int, tokens: int) -> Speed:
    counted = records[warm_up:]
    seconds = [record.step_seconds for record in counted]
    middle = statistics.median(seconds)
    rate = tokens / middle
    palm, causal = rate * meter.cost.palm, rate * meter.cost.causal
    return Speed(
        steps=len(counted),
        first_step=records[0].step_seconds,
        milliseconds=1000 * middle,
        fastest=1000 * min(seconds),
        slowest=1000 * max(seconds),
        tokens_per_second=rate,
        data_wait=1000 * statistics.median(record.data_wait for record in counted),
        memory=counted[-1].memory_bytes,
        tflops=palm / 1e12,
        tflops_causal=causal / 1e12,
        mfu=palm / meter.peak if meter.peak else None,
        mfu_causal=causal / meter.peak if meter.peak else None,
    )


def _compiled(
    config: RunConfig, world: World, resolved: Resolved
) -> tuple[Literal["step", "model", "blocks"] | None, bool]:
    """What is compiled in one graph, and whether it is launched as CUDA graphs."""
    if world.device.kind == "xla":
        return "step", False
    graphs = choose_graphs(config, world, resolved)
    cuda_graphs = uses_cuda_graphs(config, world, resolved, graphs)
    return "model" if graphs == "whole" else graphs, cuda_graphs


def _profile(
    run: Callable[[int], None], folder: RunFolder, device: Device, *, step: float
) -> StepTables:
    if device.kind in ("mps", "xla"):
        return StepTables()
    on_gpu = device.kind == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        # The profiler sets itself up in the first step that it sees.
        with profile(activities=activities, acc_events=True):
            run(1)
    with profile(activities=activities, acc_events=True) as profiler:
        run(PROFILED)
    file = folder.path / "trace.json"
    profiler.export_chrome_trace(str(file))
    trace = read_trace(json.loads(file.read_text())["traceEvents"], on_gpu=on_gpu)
    return step_tables(trace, step=step, on_gpu=on_gpu)


def step_tables(trace: Trace, *, step: float, on_gpu: bool, profiled: int = PROFILED) -> StepTables:
    """Tables of one step that takes `step` seconds, from a trace of several under the profiler."""
    scale, whole = 1000 * step / trace.seconds, 1000 * step
    if on_gpu:
        scale = 1000 / profiled
        # Kernels measured under the profiler may need a little more than the step without it.
        whole = max(whole, scale * trace.busy)

    def row(stage: str, milliseconds: float, part: str = "") -> TimeRow:
        return TimeRow(stage, part, milliseconds, milliseconds / whole)

    by_class: dict[tuple[StepPhase, OpClass], float] = defaultdict(float)
    by_name: dict[tuple[str, OpClass], float] = defaultdict(float)
    counts = Counter((op.name, op.kind) for op in trace.ops)
    times: dict[StepPhase, float] = defaultdict(float, {} if on_gpu else trace.host)
    for op in trace.ops:
        by_class[op.phase, op.kind] += scale * op.seconds
        by_name[op.name, op.kind] += scale * op.seconds
        times[op.phase] += op.seconds if on_gpu else 0
    inner = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.UPDATE)
    stages = [
        row(phase, scale * times[phase])
        for phase in StepPhase
        if times[phase] > 0 or phase in inner
    ]
    if on_gpu:
        stages.append(row(IDLE, whole - scale * trace.busy))
    return StepTables(
        stages=tuple(stages),
        parts=tuple(
            row(phase, by_class[phase, kind], kind)
            for phase in inner
            for kind in OpClass
            if by_class[phase, kind] > 0
        ),
        host=tuple(
            row(phase, 1000 * seconds / profiled) for phase, seconds in trace.host.items() if on_gpu
        ),
        kernels=tuple(
            KernelTime(*key, counts[key] / profiled, by_name[key], by_name[key] / whole)
            for key in sorted(by_name, key=lambda key: -by_name[key])[:_LARGEST]
        ),
    )


# ------------------------------------------------------------------ random tokens
#
#     PREFIX.bin, PREFIX.json     documents of random ids
#     PREFIX.tokenizer/           a tokenizer with that many made-up words
#
# It is an ordinary token set, read by the ordinary loader: a step's time does not depend on its
# ids.

GPT2_VOCABULARY = 50257
DOCUMENT = 1000
"""Tokens in one document."""


def write_random_tokens(prefix: Path, *, vocabulary: int, tokens: int = 2_000_000) -> Path:
    """Write a token set of random ids below `vocabulary`, with its tokenizer; returns `prefix`."""
    if vocabulary < 2:
        what = f"random tokens need two ids or more, a word and the end of a text, not {vocabulary}"
        raise UserError(what, where="model.vocab", remedy="raise it, or leave it out")
    folder = Path(f"{prefix}.tokenizer")
    with storage_errors(folder):
        folder.mkdir(parents=True)
        words = {f"word{number}": number for number in range(vocabulary - 1)}
        words[END_OF_TEXT] = vocabulary - 1
        made_up = tokenizers.Tokenizer(models.WordLevel(words, unk_token="word0"))
        made_up.save(str(folder / TOKENIZER_FILE))
    tokenizer = open_tokenizer(folder)
    end = tokenizer.end_of_text
    writer = create_tokens(
        NewSet(prefix, vocab_size=tokenizer.size, end_of_text=end, tokenizer=tokenizer.spec)
    )
    ids = np.random.default_rng(0).integers(0, end, tokens)
    ids[DOCUMENT - 1 :: DOCUMENT] = end
    writer.append(ids, starts=np.arange(0, tokens, DOCUMENT))
    writer.finish()
    return prefix
