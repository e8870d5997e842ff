"""The records of a run: what is written down of each step, validation, sample and event.

Each kind of record is a class, with a docstring under every field; the tables of the tracking guide
are made from them. `track/metrics.py` writes them to a file and reads them back, `track/sinks.py`
passes them on to everything else.

All records carry the same stamp of steps, samples and tokens, so that any two of them can be
compared, and plotted over any of the three. They are flat, because plots and services such as
wandb take one number per name; only a breakdown, such as the loss of each source, is a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

SAVED_CHECKPOINT = "saved checkpoint"
"""How the text of the event begins that reports a new checkpoint."""

Breakdown = dict[str, dict[str, Any]]
"""From the name of a source or validation set to its numbers by name. A record without a breakdown
is written without the key."""
BREAKDOWNS = ("sources", "sets")
"""The fields that hold a breakdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressStamp:
    """When something was recorded: the fields that all records share."""

    step: int
    """Steps done so far, this one included."""
    samples: int
    """Samples consumed so far."""
    tokens: int
    """Tokens consumed so far."""
    time: float
    """Wall clock, in seconds since 1970-01-01 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(ProgressStamp):
    """One training step."""

    kind: ClassVar[str] = "step"

    loss: float
    """Mean cross-entropy per counted token of this step's batch, in nats; if workers have weights
    of their own, of the first worker's part of it."""
    lr: float
    """Learning rate of this step's update."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    tokens_per_second: float | None
    """Tokens per second, over all processes; like all rates null for a step that compiled."""
    step_seconds: float
    """How long this step took."""
    tflops: float | None
    """10^12 model FLOPs per second per device, counting attention in full (as PaLM does)."""
    tflops_causal: float | None
    """The same, counting only the half of the attention that a causal mask leaves."""
    mfu: float | None = None
    """`tflops` as a fraction of the device's peak; null if the peak is not known."""
    mfu_causal: float | None = None
    """`tflops_causal` as a fraction of the device's peak; null if the peak is not known."""
    memory_bytes: int | None = None
    """Most memory held on the device so far; null where the device does not tell."""
    loss_scale: float | None = None
    """Factor on the loss in float16; null in other precisions."""
    next_lr: float | None = None
    """Learning rate of the next step; null unless track.log_format is "megatron", which prints
    it."""
    next_loss_scale: float | None = None
    """Loss scale of the next step; null unless in float16."""
    skipped: int = 0
    """Steps so far that made no update."""
    nan: int = 0
    """Steps so far whose loss or gradient was not finite."""
    data_wait: float = 0.0
    """Seconds of this step in which data was waited for."""
    sync_wait: float | None = None
    """Seconds of this step that the first process waited for the others; null if there are none. On
    a GPU only what does not hide behind the backward pass."""
    sent_bytes: int | None = None
    """Bytes that the first process has sent to other workers so far; null unless workers have
    weights of their own."""
    mixing: float | None = None
    """How far workers move towards the average of their group; null likewise."""
    sources: Breakdown | None = None
    """Of each source of the training text: `loss`, the mean of its tokens in this batch, null if it
    has none there, and `tokens`, how many were read of it so far. Missing with a single source, on
    XLA devices, and where track.sources is off."""

    @property
    def compute(self) -> float:
        """Seconds of this step in which nothing was waited for."""
        return max(0.0, self.step_seconds - self.data_wait - (self.sync_wait or 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord(ProgressStamp):
    """One measurement on held-out text."""

    kind: ClassVar[str] = "validation"

    loss: float
    """Mean cross-entropy per counted token, in nats."""
    perplexity: float
    """e to the power of the loss."""
    windows: int
    """How many windows of text were measured."""
    seconds: float
    """How long that took."""
    best: bool
    """Whether this is the lowest loss of the run so far."""
    consensus_distance: float | None = None
    """Root mean square distance of the workers to their average, relative to its norm; null unless
    workers have weights of their own."""
    bits_per_byte: float | None = None
    """The loss in bits, per byte of text; null if the text has no bytes."""
    train_loss: float | None = None
    """The same loss on windows of the training text; null unless validate.train_windows asks for
    it."""
    sets: Breakdown | None = None
    """Of each further set in [[validate.set]]: its `loss`, `perplexity` and `windows`, and
    `bits_per_byte`. Missing if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord(ProgressStamp):
    """One score on a downstream task."""

    kind: ClassVar[str] = "evaluation"

    name: str
    """The task."""
    metric: str
    """What was measured, such as acc."""
    value: float
    """The score."""
    stderr: float | None
    """Its standard error; null if it is not known."""
    items: int
    """How many questions were asked."""
    seconds: float
    """How long the whole task took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord(ProgressStamp):
    """One text that the model wrote."""

    kind: ClassVar[str] = "sample"

    prompt: str
    """What the model was given."""
    text: str
    """What it wrote after that, the prompt not repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord(ProgressStamp):
    """Something worth telling: a resume, a checkpoint, a warning."""

    kind: ClassVar[str] = "event"

    level: Literal["info", "warning", "error"]
    """How much it matters."""
    text: str
    """What happened, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemRecord(ProgressStamp):
    """How busy one host was in the seconds before, over all programs on it. Of its GPUs only those
    that the run may use are counted; what a machine does not tell is null."""

    kind: ClassVar[str] = "system"

    host: str
    """The host's name."""
    cpu_use: float | None = None
    """Share of all CPU cores that was busy, from 0 to 1."""
    ram_bytes: int | None = None
    """Memory in use."""
    disk_read: float | None = None
    """Bytes per second read from all disks."""
    disk_write: float | None = None
    """Bytes per second written to all disks."""
    disk_free: int | None = None
    """Free bytes of the file system that the run folder is on."""
    net_sent: float | None = None
    """Bytes per second sent over all network interfaces but loopback."""
    net_received: float | None = None
    """Bytes per second received over them."""
    gpus: int = 0
    """How many GPUs the following are about."""
    gpu_use: float | None = None
    """Share of the time in which a kernel ran, from 0 to 1: the mean over the GPUs."""
    gpu_memory_bytes: int | None = None
    """Memory in use on the fullest GPU."""
    gpu_watts: float | None = None
    """Power of all GPUs together."""
    gpu_celsius: float | None = None
    """Temperature of the hottest GPU."""
    gpu_mhz: float | None = None
    """Clock of the multiprocessors of the slowest GPU."""
    gpu_throttled: str | None = None
    """What holds the clock of a GPU down: "thermal" (heat), "power" (its power limit or supply), or
    "thermal, power"; null if nothing does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerRecord(ProgressStamp):
    """A process that is much slower than the others, or no longer is."""

    kind: ClassVar[str] = "straggler"

    rank: int
    """The process."""
    host: str
    """Where it runs."""
    phase: str
    """What it is slow at: data, compute, optimizer, or link (its connection to rank 0)."""
    ratio: float
    """Its time as a multiple of the median over all processes; 1.31 is 31 % slower."""
    seconds: float
    """How much longer than the median it is busy in each step; of a link, how long an answer
    takes."""
    cause: str | None = None
    """Why, as far as the measurements tell."""
    over: bool = False
    """Whether this tells that it keeps up again."""


Record = (
    StepRecord
    | ValidationRecord
    | EvaluationRecord
    | SampleRecord
    | EventRecord
    | SystemRecord
    | StragglerRecord
)
