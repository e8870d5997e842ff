"""Every setting of a run: a TOML table is a class, the docstring under a field is its help text.

Settings are frozen; numbers that follow from them are in `config/resolve.py`. A setting that is
`None` is left out of a written run file, which so never holds a setting that does not act.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, PrivateAttr, Tag, TypeAdapter

from gristmill.config.hf import HFConfig
from gristmill.config.launch import LaunchConfig
from gristmill.config.mixture import EpochLimits, StageConfig
from gristmill.config.model import Ability, GPTConfig, ModelConfig
from gristmill.config.optim import AdamWConfig, AnyOptimizerConfig, CosineSchedule, ScheduleConfig
from gristmill.config.parallel import ParallelConfig
from gristmill.config.settings import (
    Count,
    Interval,
    SaveInterval,
    Settings,
    Span,
    Timeout,
    TokenPaths,
    WallTime,
)
from gristmill.config.track import AlertConfig, TrackConfig


class DataConfig(Settings):
    """The training data, and the order in which it is read."""

    kind: Literal["tokens", "chat"] = "tokens"
    """tokens: token files; the loss is over all tokens. chat: conversations as JSON lines; the loss
    is over the answers only. Several are packed into a sample, and attention stays inside each."""
    paths: TokenPaths
    """Token files to train on: the prefix given to `gristmill prepare -o`, a list of such prefixes,
    or a table from prefix to weight, such as { "tokens/web" = 0.9, "tokens/books" = 0.1 }. With
    kind = "chat", files, folders or globs of JSON lines in the same forms."""
    blend: Literal["proportion", "exhaustive"] | None = None
    """How several sets are mixed; proportion if not given. proportion: by weight, or by size in a
    list. exhaustive: every sample of every set once per epoch, without weights."""
    stage: Annotated[tuple[StageConfig, ...], Field(strict=False)] | None = None
    """Stages of the run, each with the shares that the sources in `paths` have then; the same
    mixture over the whole run if not given."""
    max_epochs: EpochLimits | None = None
    """Largest number of epochs of a source: a number for all, or a table such as { code = 4 }. When
    a source is used up, its share goes to the others. No limit if not given."""
    validation: TokenPaths | None = None
    """Token files to validate on, in the same forms; part of `paths` is held out if not given."""
    split: str | None = None
    """Proportions of `paths` for training, validation and, optionally, an unread test set, such as
    "969,30,1" or "969:30:1"; "99,1" if neither this nor `validation` is given."""
    tokenizer: str | None = None
    """Tokenizer folder or file; if not given, found beside the token files, or with kind = "chat"
    that of the weights that the run starts from."""
    merges: str | None = None
    """The file of merges of a BPE whose vocabulary is the file `tokenizer`, whatever the files are
    called; not for other tokenizers."""
    template: str | None = None
    """For kind chat: how a conversation becomes text. "plain", "chatml", or a file in Jinja. If not
    given, or "auto": the template of the model that the run starts from if it has one, else chatml
    if the tokenizer has its control tokens, else plain."""
    sequence: Count | None = None
    """Tokens per sample; the model's context if not given."""
    order: Literal["shuffled", "random", "sequential", "megatron", "megatron-deepspeed"] = (
        "shuffled"
    )
    """shuffled: each epoch cuts the text into windows at a new offset and visits them in random
    order. random: every window starts at a random place. sequential: windows in order, repeated.
    megatron: exactly Megatron-LM's order: shuffled documents, cut into shuffled samples.
    megatron-deepspeed: the same by the rules of BigScience's Megatron-DeepSpeed, which splits and
    treats the last epoch a little differently."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Decides the order; train.seed if not given. Megatron's default is 1234."""
    samples: Count | None = None
    """For Megatron's orders: the number of samples that decides their epochs; those of the whole
    run if not given. Give the old number to extend a run into another epoch."""
    documents: Literal["joined", "masked"] = "joined"
    """joined: attention reaches across the documents of a sample. masked: attention stays inside a
    document and positions restart with each, where the token files say that documents begin."""
    reset_attention: bool = False
    """As Megatron's reset-attention-mask: attention does not reach across an end-of-text id."""
    reset_positions: bool = False
    """As Megatron's reset-position-ids: positions restart after each end-of-text id."""
    mask_end_of_text: bool = False
    """As Megatron's eod-mask-loss: predictions from an end-of-text id do not count in the loss."""
    in_memory: bool = False
    """Read the token files into memory at the start; they are memory-mapped otherwise."""
    verify: bool = True
    """Compare all token files with the checksums in their manifests at every start: small sets
    before the first step, large ones in the background. Damage ends the run."""
    cache: str | None = None
    """Folder for sample indices, which runs may share; inside the run's folder if not given."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The paths of all sources, without their weights."""
        return (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)

    @property
    def by_rows(self) -> bool:
        """Whether the order is one of Megatron's, which split sets by rows."""
        return self.order in ("megatron", "megatron-deepspeed")


class LossScaleConfig(Settings):
    """Dynamic loss scaling for fp16, with Megatron's rules."""

    initial: Annotated[float, Field(gt=0)] = 2.0**32
    """First scale; it is halved on overflow until gradients fit."""
    minimum: Annotated[float, Field(gt=0)] = 1.0
    """The scale never falls below this."""
    window: Count = 1000
    """Steps without overflow before the scale is doubled."""
    hysteresis: Count = 2
    """Overflows that are tolerated before the scale is halved; refilled when it is doubled."""


Fp8Part = Literal["head", "mlp", "attention"]


class PrecisionConfig(Settings):
    """Number formats."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Format of matrix products and activations; weights and optimizer state stay in fp32. auto:
    bf16 on GPUs and TPUs with native support, else fp32. A resumed run keeps its format."""
    reduce: Literal["fp32", "bf16", "fp16"] | None = None
    """Format in which data-parallel processes send and sum gradients; fp32 if not given. They are
    still accumulated over micro-batches in fp32. Only with several processes."""
    tf32: bool = True
    """Let matrix products in fp32 on NVIDIA GPUs use TF32: faster, about three digits."""
    fp8: Annotated[tuple[Fp8Part, ...], Field(strict=False)] = ()
    """Parts of the model that train with matrix products in fp8; only where compute is bf16, on
    NVIDIA GPUs since Ada and Hopper. "mlp" and "attention" are the linear layers of all blocks:
    faster from a width of about 1024 on, and not used in narrower models. "head" is the last layer
    with its loss: faster if the model is small for its vocabulary. Inputs then have 4 significant
    bits and gradients 3, so the training loss and all gradients are a little noisy; validation
    stays in bf16. On the CPU, which is slow at this, there are "mlp" and "attention" for tests."""
    loss_scale: LossScaleConfig | None = None
    """Rules of the loss scale; only with compute = "fp16"."""

    @property
    def described(self) -> str:
        """The formats in words, such as "bf16, head in fp8"."""
        return self.compute + (f", {' and '.join(self.fp8)} in fp8" if self.fp8 else "")

    @property
    def fp8_of_blocks(self) -> tuple[str, ...]:
        """The parts of blocks that are in fp8."""
        return tuple(part for part in self.fp8 if part != "head")


class RuntimeConfig(Settings):
    """Device, compilation and kernels."""

    device: Literal["auto", "cpu", "cuda", "mps", "xla"] = "auto"
    """Where to train; auto takes CUDA, then MPS, then the CPU. xla: TPUs, or whatever JAX finds,
    with the step compiled as a whole; one process drives all devices of its host."""
    threads: Count | None = None
    """CPU threads; all cores if not given. Results are bit-identical only for the same number."""
    compile: Literal[True, False, "blocks"] | None = None
    """Compile the model, and the step of Muon, with torch.compile. true makes one graph of the
    whole model; "blocks" compiles one block for all, which takes a time that does not grow with
    depth, but fuses nothing across blocks. If not given, only runs on CUDA are compiled, short ones
    by blocks. With several processes it is always by blocks. On XLA devices, where a step is always
    compiled, "blocks" makes a loop of the blocks that are alike."""
    cuda_graphs: bool | None = None
    """Record which kernels a pass launches and launch them all at once from then on. The GPU no
    longer waits for the host, which matters to small models; activations keep their memory between
    steps. Needs one compiled micro-batch per step in one process. On for small models if not
    given."""
    kernels: bool = True
    """Use the kernels in Triton that come with this program, on CUDA; plain operations if not."""
    xla_attention: Literal["auto", "plain", "blocked", "cudnn", "splash"] = "auto"
    """How attention is computed on XLA devices. plain: all scores at once. blocked: those of some
    positions at a time, and again in the backward pass, so that memory does not grow with the
    square of data.sequence. cudnn: the kernels of cuDNN, on NVIDIA GPUs in bf16. splash: JAX's
    kernel for TPUs. The last two take no masks (packed documents, windows) and no dropout. auto:
    the kernel of the device where it can be used, else blocked; plain on the CPU."""
    offload: Literal["optimizer"] | None = None
    """Keep the optimizer's state in host memory and step there: saves 8 bytes of GPU memory for
    each parameter held, costs time in every step. With AdamW only."""
    deterministic: bool = False
    """Use only kernels whose result never varies, as on the CPU in any case. On a GPU a resumed run
    is then bit-identical too, at some cost in speed."""

    def devices_of(self, processes: int) -> int | None:
        """The devices that so many processes drive; None if only JAX can count them."""
        return None if self.device == "xla" else processes

    def compiles(self, device: str) -> bool:
        """Whether anything is compiled on a device of this kind."""
        return device == "cuda" if self.compile is None else bool(self.compile)


class RampConfig(Settings):
    """A batch that grows in steps up to the full one, train.batch."""

    start: Count
    """Samples per step at the beginning."""
    by: Count
    """Samples by which the batch grows each time; must divide train.batch - start."""
    over: Span
    """When the full batch is reached: a duration, or a fraction of train.until. All smaller batches
    last equally long in the unit of this setting."""
    lr_power: Annotated[float, Field(ge=0)] = 0.0
    """Multiply a step's learning rate by (its batch / full batch) to this power, such as 0.5."""


class GuardConfig(Settings):
    """What to do about spikes: steps whose loss or gradient norm is far above its recent values."""

    action: Literal["skip", "rollback"] = "skip"
    """skip: such a step does not change the weights. rollback: after `patience` such steps in a row
    the run goes back to the newest checkpoint from before them, and skips their batches."""
    threshold: Annotated[float, Field(gt=0)] = 6.0
    """How far above the median of the recent values is too far, in robust standard deviations
    (1.4826 times the median absolute deviation)."""
    window: Annotated[int, Field(ge=16)] = 128
    """How many recent steps to compare with; at least 16. The first steps are not judged."""
    patience: Count | None = None
    """For rollback: how many such steps in a row; 3 if not given."""
    rollbacks: Count | None = None
    """For rollback: stop with an error when this many in a row did not help; 10 if not given."""


class TrainConfig(Settings):
    """Training length, batch size, and options of the training step."""

    until: Interval
    """Training length: "10k steps", "1M samples" or "20B tokens"."""
    batch: Count | None = None
    """Samples per step, over all micro-batches."""
    micro_batch: Count | None = None
    """Samples that go through the model at once. If neither this nor accumulate is given: the whole
    batch of a process, or the largest part of it that its device has memory for. A resumed run
    keeps its size."""
    accumulate: Count | None = None
    """Micro-batches per full step. Give two of batch, micro_batch and accumulate, or batch or
    micro_batch alone; the rest follows."""
    ramp: RampConfig | None = None
    """Begin with a smaller batch; every step has the full one if not given."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; larger ones are scaled down. 0 never scales."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Decides initial weights, data order, dropout and samples."""
    sampled_softmax: Annotated[int, Field(ge=64, multiple_of=64)] | None = None
    """Sampled softmax: training steps compute the loss over this many tokens of the vocabulary. The
    batch is taken in slices of as many tokens; each slice has its targets and others drawn at
    random, which stand for the rest. Saves most of the head's work if the vocabulary is much
    larger. Validation, tensor parallelism and XLA devices always use the whole vocabulary."""
    mtp: Annotated[float, Field(ge=0)] = 0.0
    """Multi-token prediction: the weight of the loss of the token after the next one, which the
    same logits predict, at the start; it falls linearly to 0 at two thirds of the run. Losses in
    the log are those of the next token. Not with context parallelism or on XLA devices."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of keeping them, which saves memory. full:
    only block inputs are kept; costs about a third more time. selective: results of matrix products
    and attention are kept too."""
    recompute_every: Count | None = None
    """Only in every n-th block; in all if not given."""
    time_limit: WallTime | None = None
    """Save and stop in time to end before this much wall-clock time, such as "3h30m". In a job
    that `gristmill launch` has submitted to PBS or MPI, it counts from the start of the job."""
    exit_every: Interval | None = None
    """Save and stop at every multiple of this, such as "1000 steps"; the same command resumes the
    run. Only the end stops it if not given."""
    bad_steps: Count = 50
    """Stop when this many steps in a row had a non-finite loss or gradient, or were skipped by the
    guard."""
    guard: GuardConfig | None = None
    """Protect the run from spikes, such as by guard.action = "skip"; off if not given. In any case
    steps with a non-finite loss or gradient are skipped, and checkpoints from before a spike are
    kept until the loss has recovered."""


class ValidationSetConfig(Settings):
    """Further text to validate on, such as that of one domain, with a loss of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Name of its loss in the records: letters, digits, dash and underscore."""
    data: TokenPaths
    """Token files in the forms of data.paths; all of them is validation text."""
    windows: Count | None = None
    """How many windows, spread evenly over it; as many as validate.windows if not given."""


class ValidateConfig(Settings):
    """Loss on held-out text, always on the same windows."""

    every: Interval | None = None
    """How often; if not given, twenty times in the run, or less often where that would take more
    than an eighth of its time. In any case at the start and at the end."""
    windows: Count = 128
    """How many windows, spread evenly over the validation text (fewer if it is shorter)."""
    train_windows: Count | None = None
    """Also measure the loss on so many windows of the training text, spread over it in the same
    way, as nanoGPT does. None are if not given, except with track.log_format = "decentralized",
    whose lines have this loss: then as many as `windows`."""
    sets: Annotated[tuple[ValidationSetConfig, ...], Field(strict=False)] | None = Field(
        default=None, alias="set"
    )
    """Further sets, each with a loss of its own in the records, measured whenever the main text is.
    The best checkpoint is that of the main text."""


class SampleConfig(Settings):
    """Text that the model generates during training."""

    every: Interval
    """How often."""
    prompts: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("",)
    """Prompts to continue; an empty one starts a new document. With data.kind = "chat", messages
    to answer."""
    tokens: Count = 64
    """Length of each sample."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 always takes the likeliest token."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Only this many of the likeliest tokens can be drawn; 0 allows all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that together have this probability can be drawn."""


class EvaluateConfig(Settings):
    """Scores on downstream tasks during training."""

    every: Interval
    """How often, and at the end of the run."""
    tasks: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """The tasks, by the names that `gristmill evaluate --tasks` takes: "hellaswag",
    "lambada=FILE"."""
    items: Count = 500
    """Only this many items of each task. One process computes them while the others wait."""


class CheckpointConfig(Settings):
    """When checkpoints are saved, and which of them are kept."""

    every: SaveInterval = "15m"
    """How often: a wall-clock span such as "15m", or "500 steps". The end of the run is always
    saved."""
    keep: Annotated[int, Field(ge=2)] = 3
    """How many of the newest to keep; at least 2, in case the newest is damaged."""
    keep_every: Interval | None = None
    """Checkpoints at multiples of this are never deleted."""
    keep_best: bool = True
    """Also keep the one with the best validation loss."""
    background: bool = True
    """Write in the background, while training continues. A save that comes due while a large one
    is still being written is skipped."""
    timeout: Timeout = "1h"
    """How long processes wait for one another in a save before the run ends; at least "5s"."""
    load: str | None = None
    """Begin from the newest checkpoint in the folder of another run, which is not changed: from its
    weights, optimizer state and progress. Once this run has a checkpoint of its own, it resumes
    from that. If the folder holds none, the run begins at step 0."""


def any_model(kinds: Mapping[str, type[ModelConfig]]) -> Any:
    """The type of a `[model]` table that is of one of these kinds, told apart by their marks."""

    def kind_of(table: Any) -> str | None:
        if isinstance(table, ModelConfig):
            return next(name for name, kind in kinds.items() if type(table) is kind)
        if not isinstance(table, dict):
            return None
        marked = (name for name, kind in kinds.items() if kind.marks & set(table))
        return next(marked, next(name for name, kind in kinds.items() if not kind.marks))

    tagged = tuple(Annotated[kind, Tag(name)] for name, kind in kinds.items())
    return Annotated[Union[tagged], Discriminator(kind_of)]  # noqa: UP007


MODEL_KINDS: dict[str, type[ModelConfig]] = {"gpt": GPTConfig, "hf": HFConfig}
if TYPE_CHECKING:
    AnyModelConfig = ModelConfig
else:
    AnyModelConfig = any_model(MODEL_KINDS)


class RunConfig(Settings):
    """One training run."""

    _old_names: tuple[str, ...] = PrivateAttr(default=())
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run: letters, digits, dot, dash and underscore."""
    preset: str | None = None
    """A named set of settings, such as "gpt2-small"; `gristmill config --presets` lists them."""
    folder: str | None = None
    """Folder for everything the run writes; runs/NAME if not given."""
    model: AnyModelConfig
    """The model."""
    data: DataConfig
    """The token files or conversations."""
    train: TrainConfig
    """Training length and batch size."""
    optim: AnyOptimizerConfig = AdamWConfig()
    """The optimizer."""
    schedule: ScheduleConfig = CosineSchedule()
    """The schedule of the learning rate."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Device, compilation and kernels."""
    parallel: ParallelConfig = ParallelConfig()
    """How the run is divided over devices."""
    validation: ValidateConfig = Field(default=ValidateConfig(), alias="validate")
    """Validation during training."""
    sample: SampleConfig | None = None
    """Text samples during training; none if not given."""
    evaluate: EvaluateConfig | None = None
    """Downstream tasks during training; none if not given."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    track: TrackConfig = TrackConfig()
    """Metrics."""
    alert: AlertConfig | None = None
    """Alerts when the run needs attention; none if not given."""
    launch: LaunchConfig | None = None
    """The job on a cluster, for `gristmill launch`."""

    @property
    def old_names(self) -> tuple[str, ...]:
        """What to say about settings that were given by an old name."""
        return self._old_names

    @property
    def train_windows(self) -> int:
        """Windows of the training text that every validation measures too."""
        if self.validation.train_windows is None and self.track.log_format == "decentralized":
            return self.validation.windows
        return self.validation.train_windows or 0

    @property
    def recorded_sources(self) -> int:
        """How many sources have their losses recorded with every step; 0 if none."""
        several = len(self.data.sources) > 1
        # A step on XLA devices is one function, which knows the loss of the whole batch only.
        recorded = self.track.sources and several and self.runtime.device != "xla"
        return len(self.data.sources) if recorded else 0

    @property
    def packs_conversations(self) -> bool:
        """Whether several conversations share a sample, kept apart by the model's attention."""
        return self.data.kind == "chat" and Ability.DOCUMENTS in self.model.abilities

    @property
    def masks_documents(self) -> bool:
        """Whether attention stays inside the documents of a sample."""
        data = self.data
        return data.documents == "masked" or data.reset_attention or self.packs_conversations


def parse_model(values: dict[str, Any]) -> ModelConfig:
    """A `[model]` table that was written by this program, of whatever kind of model."""
    model: ModelConfig = TypeAdapter(any_model(MODEL_KINDS)).validate_python(values)
    return model
