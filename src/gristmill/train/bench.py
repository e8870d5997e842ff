"""Where the time of a step goes: the real step of a run file, measured; nothing stays on disk.

    warm-up        the first step compiles; none of them is counted
    measured       timed by the meter, as in a run, without the profiler
    profiled       a few more steps under torch.profiler, for the shares

Everything is assembled as for training and runs in the one loop, with no hooks, and with the run
folder in a temporary place. The profiler slows the host down, so what it finds is fitted to the
measured step: on a GPU kernels take as long as ever, and what they leave of the step is the time
the device was idle; on the CPU all times shrink in proportion. A batch that grows is measured at
its full size.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.profiler import ProfilerActivity, profile, record_function

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import Duration, Unit
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.resolve import Portions, portions
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig, RuntimeConfig, TrackConfig
from gristmill.data.dataset import path_list
from gristmill.data.loader import READ_AHEAD, Batch
from gristmill.optim.schedule import build_schedule
from gristmill.parallel.world import MatrixRate, matrix_rate, memory_explained
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.tokens.store import open_tokens
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import Record, StepRecord
from gristmill.track.sinks import JsonlSink, Sink
from gristmill.train.assemble import Assembly, assemble, build_loader, build_meter
from gristmill.train.hooks import Hooks
from gristmill.train.loop import train
from gristmill.train.meter import Meter
from gristmill.train.moment import Moment
from gristmill.train.random_tokens import GPT2_VOCABULARY, write_random_tokens
from gristmill.train.stop import StopRequest
from gristmill.train.trace import Part, Stage, Trace, Work, read_trace
from gristmill.train.tracker import Tracker

PROFILED = 3
"""Steps under the profiler."""
_LARGEST = 10


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
    compiled: Literal["model", "blocks"] | None
    """The whole model as one graph, or one block for all; None if nothing is compiled."""
    random_tokens: bool


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
    """The most bytes held, where that is known."""
    tflops: float
    """10^12 operations a second, in PaLM's counting."""
    tflops_causal: float
    mfu: float | None
    """Share of the device's peak; None if that is not known."""
    mfu_causal: float | None


@dataclass(frozen=True)
class Row:
    """A line of a table: some of a step's time."""

    stage: str
    part: str
    milliseconds: float
    share: float
    """Of the whole step."""


@dataclass(frozen=True)
class Kernel:
    """All work of one name in a step."""

    name: str
    part: str
    count: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Bench:
    """All that was found about the steps of a run."""

    subject: Subject
    speed: Speed
    stages: tuple[Row, ...]
    """They add up to the step; on a GPU one of them is the time the device was idle."""
    parts: tuple[Row, ...]
    host: tuple[Row, ...]
    """On a GPU: what the host does meanwhile."""
    kernels: tuple[Kernel, ...]
    """The ten largest, on the CPU operators."""
    matrix: MatrixRate


IDLE = "idle"


def measure_run(
    config: RunConfig, *, steps: int = 30, warm_up: int = 10, random_tokens: bool = False
) -> Bench:
    """Run steps of a run file and say where their time goes; nothing stays on disk."""
    total = warm_up + steps + PROFILED + 1
    check_mesh(config, processes=1)
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as name:
        folder = Path(name)
        config = _prepared(config, total)
        if random_tokens:
            config = _with_random_tokens(config, folder / "random", steps=total)
        else:
            _require_tokens(config)
        parts = assemble(config, RunFolder(folder / "run"))
        with memory_explained('set train.micro_batch lower, or train.recompute = "full"'):
            return _measure(parts, warm_up=warm_up, steps=steps, random_tokens=random_tokens)


# ------------------------------------------------------------------ what is run


def _prepared(config: RunConfig, steps: int) -> RunConfig:
    """The same run with a record for every step, at its full batch, for at least so many steps."""
    train, data = config.train, config.data.model_copy(update={"cache": None})
    train = train.model_copy(update={"ramp": None})
    config = config.model_copy(update={"train": train, "data": data, "track": TrackConfig()})
    until = train.until
    if until.unit is Unit.STEPS and until.amount < steps:
        train = train.model_copy(update={"until": Duration(steps, Unit.STEPS)})
    return config.model_copy(update={"train": train})


def _with_random_tokens(config: RunConfig, prefix: Path, *, steps: int) -> RunConfig:
    data, given = config.data, config.data.tokenizer
    vocabulary = config.model.vocab or (open_tokenizer(given).size if given else GPT2_VOCABULARY)
    sequence = data.sequence or config.model.context
    write_random_tokens(prefix, vocabulary=vocabulary, tokens=max(1_000_000, 64 * sequence))
    divided = portions(config.train)
    assert isinstance(divided, Portions), "the rules are checked when settings are loaded"
    changes = {
        "paths": str(prefix),
        "split": "1,0",
        **dict.fromkeys(("validation", "tokenizer", "blend"), None),
        # The order of a whole run over so few tokens would be many thousands of epochs long.
        "samples": (steps + READ_AHEAD) * divided.batch if data.order == "megatron" else None,
    }
    return config.model_copy(update={"data": data.model_copy(update=changes)})


def _require_tokens(config: RunConfig) -> None:
    problems: list[Problem] = []
    exit = None
    for path in path_list(config.data.paths):
        try:
            open_tokens(path)
        except UserError as error:
            exit = error.exit
            problems += [
                Problem(one.what, one.where, f"{one.remedy or 'prepare them'}; {_WITHOUT}")
                for one in error.problems
            ]
    if exit is not None:
        raise UserError(problems, exit=exit)


_WITHOUT = "--random-tokens measures without data"


class _Memory:
    """Keeps the records of steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


class _MarkedHooks(Hooks):
    """Shows the profiler how long records take."""

    def after_step(self, moment: Moment) -> None:
        with record_function("gristmill::records"):
            super().after_step(moment)


def _marked(batches: Iterator[Sequence[Batch]]) -> Iterator[Sequence[Batch]]:
    """Shows the profiler how long a step waits for its batch."""
    while True:
        with record_function("gristmill::data"):
            micro_batches = next(batches)
        yield micro_batches


# ------------------------------------------------------------------ measuring


def _measure(parts: Assembly, *, warm_up: int, steps: int, random_tokens: bool) -> Bench:
    seen = _Memory()
    parts.folder.path.mkdir()
    # A run writes its records to a file, so this does too.
    sinks: list[Sink] = [seen, JsonlSink(parts.folder.metrics)]
    tracker = Tracker(sinks, clock=lambda: parts.state.progress)
    meter = build_meter(parts, tracker)
    batches = build_loader(parts).starting_at(parts.state.progress)
    run = _runner(parts, meter=meter, tracker=tracker, batches=_marked(batches))
    try:
        run(warm_up)
        run(steps)
        tokens = parts.numbers.tokens_per_step
        speed = _speed(seen.steps, meter, warm_up=warm_up, tokens=tokens)
        trace = _profile(run, parts)
    finally:
        batches.close()
        tracker.close()
    step = speed.milliseconds / 1000
    fitted = fit_to_step(trace, step=step, on_gpu=_on_gpu(parts)) if trace else _NOTHING
    return Bench(
        subject=_subject(parts, random_tokens=random_tokens),
        speed=speed,
        stages=fitted.stages,
        parts=fitted.parts,
        host=fitted.host,
        kernels=fitted.kernels,
        matrix=matrix_rate(parts.world.device),
    )


def _runner(
    parts: Assembly, *, meter: Meter, tracker: Tracker, batches: Iterator[Sequence[Batch]]
) -> Callable[[int], None]:
    """A function that runs so many steps more, with nothing done along the way."""
    numbers = parts.numbers
    writer = CheckpointWriter(
        CheckpointFolder(parts.folder.checkpoints),
        parts.config.checkpoint,
        progress_at=numbers.progress_at,
        say=tracker.say,
    )
    hooks = _MarkedHooks(
        [],
        meter=meter,
        tracker=tracker,
        stop=StopRequest(),
        writer=writer,
        batch_at=numbers.ramp.batch_at,
    )
    schedule = build_schedule(parts.config, numbers)

    def run(steps: int) -> None:
        meter.restart_clock()
        train(
            parts.state,
            batches=batches,
            strategy=parts.strategy,
            schedule=schedule,
            hooks=hooks,
            until=Duration(parts.state.progress.steps + steps, Unit.STEPS),
        )

    return run


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


def _profile(run: Callable[[int], None], parts: Assembly) -> Trace | None:
    """A trace of a few steps; None on devices whose work the profiler does not see."""
    if parts.world.device.type == "mps":
        return None
    activities = [ProfilerActivity.CPU]
    if _on_gpu(parts):
        activities.append(ProfilerActivity.CUDA)
        # The profiler sets itself up in the first step that it sees.
        with profile(activities=activities, acc_events=True):
            run(1)
    with profile(activities=activities, acc_events=True) as profiler:
        run(PROFILED)
    file = parts.folder.path / "trace.json"
    profiler.export_chrome_trace(str(file))
    return read_trace(json.loads(file.read_text())["traceEvents"], on_gpu=_on_gpu(parts))


def _on_gpu(parts: Assembly) -> bool:
    return parts.world.device.type == "cuda"


def _subject(parts: Assembly, *, random_tokens: bool) -> Subject:
    config, numbers = parts.config, parts.numbers
    return Subject(
        name=config.name,
        parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
        batch=numbers.batch,
        micro_batch=numbers.micro_batch,
        sequence=numbers.sequence,
        vocabulary=numbers.vocab,
        device=parts.world.name,
        precision=config.precision.described,
        compiled=_compiled(config.runtime, parts.world.device.type),
        random_tokens=random_tokens,
    )


def _compiled(runtime: RuntimeConfig, device: str) -> Literal["model", "blocks"] | None:
    if not runtime.compiles(device):
        return None
    return "blocks" if runtime.compile == "blocks" else "model"


# ------------------------------------------------------------------ from a trace to tables


@dataclass(frozen=True)
class Tables:
    """A trace in the form of tables of an average step."""

    stages: tuple[Row, ...] = ()
    parts: tuple[Row, ...] = ()
    host: tuple[Row, ...] = ()
    kernels: tuple[Kernel, ...] = ()


_NOTHING = Tables()
_WITH_PARTS = (Stage.FORWARD, Stage.BACKWARD, Stage.UPDATE)


def fit_to_step(trace: Trace, *, step: float, on_gpu: bool, profiled: int = PROFILED) -> Tables:
    """Tables of one step that takes `step` seconds, from a trace of several under the profiler."""
    factor = 1.0 if on_gpu else step * profiled / trace.seconds
    scale = 1000 * factor / profiled
    # Kernels measured under the profiler may need a little more than the step without it.
    whole = max(1000 * step, scale * trace.busy) if on_gpu else 1000 * step
    times = _by(trace.work, lambda one: one.stage) if on_gpu else trace.host

    def row(stage: str, milliseconds: float, part: str = "") -> Row:
        return Row(stage, part, milliseconds, milliseconds / whole)

    stages = [
        row(stage, scale * times.get(stage, 0.0))
        for stage in Stage
        if times.get(stage, 0.0) > 0 or stage in _WITH_PARTS
    ]
    if on_gpu:
        stages.append(row(IDLE, whole - scale * trace.busy))
    inner = _by(trace.work, lambda one: (one.stage, one.part))
    parts = [
        row(stage, scale * inner[stage, part], part)
        for stage in _WITH_PARTS
        for part in Part
        if inner.get((stage, part), 0.0) > 0
    ]
    host = [row(stage, 1000 * spent / profiled) for stage, spent in trace.host.items()]
    return Tables(
        tuple(stages),
        tuple(parts),
        tuple(host) if on_gpu else (),
        tuple(_largest(trace.work, scale=scale, whole=whole, steps=profiled)),
    )


def _by(work: Sequence[Work], key: Callable[[Work], Any]) -> dict[Any, float]:
    sums: dict[Any, float] = defaultdict(float)
    for one in work:
        sums[key(one)] += one.seconds
    return dict(sums)


def _largest(work: Sequence[Work], *, scale: float, whole: float, steps: int) -> Iterator[Kernel]:
    sums = _by(work, lambda one: (one.name, one.part))
    for (name, part), seconds in sorted(sums.items(), key=lambda item: -item[1])[:_LARGEST]:
        count = sum(one.name == name and one.part == part for one in work) / steps
        yield Kernel(name, part, count, scale * seconds, scale * seconds / whole)
