"""Assembles a run from its settings: data, model, optimizer, strategy, and the hooks around them.

    data, tokenizer -> resolved numbers -> strategy (model, optimizer) -> state

User errors are found here, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from gristmill.base.errors import DataError, UserError
from gristmill.base.limits import memory_limit
from gristmill.base.units import Progress, format_bytes, format_count
from gristmill.checkpoint.model import Started, load_start_weights
from gristmill.checkpoint.state import TrainState
from gristmill.checkpoint.state_file import STATE
from gristmill.checkpoint.writer import CheckpointWriter, require_checkpoint_room
from gristmill.config.model import GPTConfig
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import Resolved, resolve
from gristmill.config.schema import RunConfig
from gristmill.data.build import MIXTURE, build_rules, build_stream
from gristmill.data.conversations import (
    open_chat,
)
from gristmill.data.dataset import (
    Mixture,
    RunData,
)
from gristmill.data.intact import ContentCheck
from gristmill.data.loader import Batch, DocumentRules, Loader, validation_batches
from gristmill.data.mixture import same_until
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.device import memory_explained
from gristmill.distributed.liveness.stragglers import Pace
from gristmill.distributed.world import World
from gristmill.evaluate.tasks import OpenTask, TaskOptions, open_tasks
from gristmill.models.build import build_meta_model
from gristmill.models.spec import CausalLM, linear_shapes
from gristmill.optim.schedule import build_schedule
from gristmill.plan.arithmetic import ModelSize, TokenCost, gpt_size, model_size
from gristmill.plan.expectation import Expectation, expect
from gristmill.strategies.decentralized.workers import WorkerSet
from gristmill.strategies.strategy import Strategy
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.track.account import WallAccount
from gristmill.track.folder import RunFolder
from gristmill.train.build import build_strategy, open_run_world
from gristmill.train.checkpoints import Checkpoint
from gristmill.train.compare import CompareReplicas
from gristmill.train.defaults import describe_changes, with_device_defaults
from gristmill.train.health import RunHealth
from gristmill.train.hooks import Hook, StopOnDamage
from gristmill.train.identity import model_settings, run_identity
from gristmill.train.memory import explainer, fitted, note_of
from gristmill.train.meter import AHEAD, Meter
from gristmill.train.order import order_spec
from gristmill.train.run_data import open_run_data
from gristmill.train.samples import Sample
from gristmill.train.task_evaluation import EvaluateTasks
from gristmill.train.tracker import Tracker
from gristmill.train.validation import Validate


@dataclass(frozen=True)
class BuiltRun:
    """Everything that was built for a run."""

    config: RunConfig
    resolved: Resolved
    folder: RunFolder
    data: RunData
    tokenizer: Tokenizer
    world: World
    state: TrainState
    strategy: Strategy
    control: ControlGroup
    meta_model: CausalLM
    """The whole model on the meta device."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the weights that the run starts from."""
    changes: tuple[str, ...] = ()
    """Messages about settings that were changed to suit the device."""
    chat: ChatEncoder | None = None
    """Encodes conversations; None for a run on token files."""

    @property
    def best_loss(self) -> float | None:
        """The best validation loss so far; None without validation data."""
        best = self.state.best if self.data.validation is not None else None
        return None if best is None else best.loss

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.meta_model.parameters())

    @property
    def token_cost(self) -> TokenCost:
        """FLOPs to train on one token."""
        sampled = self.resolved.sampled_softmax
        return self.meta_model.token_cost(self.resolved.sequence, sampled=sampled)

    @property
    def expected(self) -> Expectation | None:
        """The planned speed and memory of a step; None for an unknown device, or one that several
        processes share or could share."""
        device, resolved = self.world.device, self.resolved
        if device.sharers is not None and self.world.mesh.processes > 1:
            return None
        return expect(
            self.config,
            self.world.layout,
            vocab=resolved.vocab,
            micro_batch=resolved.micro_batch,
            device_kind=device.kind,
            device_name=device.name,
            device_memory=device.total_memory(),
            per_node=self.world.place.local_world,
        )

    @property
    def described_size(self) -> str:
        """The number of parameters as text and, if not all are trained, how many are."""
        size = f"{format_count(self.parameters)} parameters"
        if not self.meta_model.adapters:
            return size
        trained, layers = (
            sum(self.meta_model.size_by_role().values()),
            len(self.meta_model.adapters),
        )
        share = trained / self.parameters
        return (
            f"{size}, of which {format_count(trained)} ({share:.2%}) are trained, in adapters of "
            f"{layers} layers"
        )


def assemble(
    config: RunConfig,
    folder: RunFolder,
    world: World | None = None,
    control: ControlGroup | None = None,
    *,
    saves: bool = False,
    workers: WorkerSet | None = None,
    fit: bool = False,
) -> BuiltRun:
    """Open and build everything, with initial weights loaded. `world`: None for a single process.
    `saves`: whether checkpoints are saved, so that the disk must have room for one. `workers`: the
    participants of a decentralized run, if not all. `fit`: whether the micro-batch size and
    recomputation may be changed so that the run fits into memory."""
    world = world or open_run_world(config)
    control = control or ControlGroup()
    asked, config = config, with_device_defaults(config, folder, world, control)
    chat = open_chat(config) if config.data.kind == "chat" else None
    data, tokenizer = open_run_data(config, folder, chat, shows=saves and control.is_rank0)
    resolved = resolve(config, vocab=tokenizer.size, mesh=world.layout)
    chosen = fitted(config, resolved, world, control, fit=fit)
    changed = describe_changes(asked, config)
    if chosen is not None:
        changed.append(note_of(chosen, config))
        config = chosen.config
        resolved = resolve(config, vocab=tokenizer.size, mesh=world.layout)
    identity = run_identity(config, resolved, data, tokenizer, chat)
    size = _model_size(config, resolved, world.layout)
    require_memory(config, size, world)
    if saves:
        require_checkpoint_room(folder.path, size.checkpoint)
    with memory_explained(
        "the model itself does not fit: shard it with [parallel], or choose a smaller one",
        explainer(config, resolved, world, folder.path),
    ):
        strategy = build_strategy(
            config,
            vocab=resolved.vocab,
            world=world,
            control=control,
            resolved=resolved,
            workers=workers,
        )
    started, start = Started(), config.model.initial_weights
    if start is not None:
        started = load_start_weights(
            strategy.model, start, strategy.parameters, run=folder.path, control=control
        )
        strategy.weights_changed()
    meta_model = build_meta_model(config.model, vocab=resolved.vocab, pad_for=world.layout.tp)
    apart = config.parallel.decentralized
    copied = ("pp", "dp_replicate") if apart else ("pp",)
    all_members = tuple(range(world.mesh.dp_replicate))
    unsaved = meta_model.base_parameters()
    state = TrainState(
        model=strategy.model,
        optimizer=strategy.optimizer,
        parameters={
            n: parameter for n, parameter in strategy.parameters.items() if n not in unsaved
        },
        padded=meta_model.vocabulary_parameters(),
        names=frozenset(meta_model.roles()) - unsaved,
        base=None if started.base is None else asdict(started.base),
        identity=identity,
        identity_defaults=model_settings(config.model.identity_defaults()),
        identity_retired=model_settings(config.model.retired),
        identity_until={MIXTURE: same_until},
        settings={"model": config.model.model_dump(exclude_none=True), "vocab": resolved.vocab},
        strategy=strategy.state(),
        strategy_tensors=strategy.tensors,
        layout=world.layout.sizes,
        micro_batch=resolved.micro_batch,
        workers=() if not apart else workers.members if workers else all_members,
        worker=world.at["dp_replicate"],
        rank=world.rank,
        ranks=world.mesh.processes,
        writes_unowned=not any(place for axis, place in world.at.items() if axis not in copied),
    )
    return BuiltRun(
        *(config, resolved, folder, data, tokenizer, world, state, strategy, control, meta_model),
        notes=started.notes,
        changes=tuple(changed),
        chat=chat,
    )


def _model_size(config: RunConfig, resolved: Resolved, mesh: Mesh) -> ModelSize:
    """The size of the whole model, before anything is built."""
    if isinstance(config.model, GPTConfig):
        # By formula: an absurdly large model takes minutes to build, even on the meta device.
        return gpt_size(config, rows=resolved.padded_vocab, workers=mesh.dp_replicate)
    meta_model = build_meta_model(config.model, vocab=resolved.vocab, pad_for=mesh.tp)
    sizes = meta_model.size_by_role()
    linears, frozen = linear_shapes(meta_model), meta_model.base_size()
    return model_size(config, sizes, linears=linears, frozen=frozen, workers=mesh.dp_replicate)


def require_memory(config: RunConfig, size: ModelSize, world: World) -> None:
    """Refuse a model whose weights, gradients and optimizer state alone, without any activations,
    exceed the memory that this process can have. Decentralized workers also hold the buffers of
    their exchanges."""
    on_device, contents = world.device.total_memory(), "weights, gradients and optimizer state"
    if size.copies:
        contents = "weights, gradients, optimizer state and what workers exchange"
    if world.device.kind == "meta":
        return
    limits: list[tuple[str, int, int | None]] = []
    host = memory_limit(processes=world.place.local_world or 1)
    if on_device is None:
        limits.append((contents, size.training, host))
    elif config.runtime.offload is None:
        limits.append((contents, size.training, on_device))
    else:
        limits.append(("weights and gradients", size.on_device, on_device))
        limits.append((contents, size.training, host))
    for what, whole, most in limits:
        needed = whole // world.layout.shards
        if most is not None and needed > most:
            each = " in each process" if world.mesh.processes > 1 else ""
            has = "the GPU has" if most == on_device else "this process can have at most"
            sharers = world.device.sharers or 1
            shared = f" for each of the {sharers} processes that share it" if sharers > 1 else ""
            raise UserError(
                f"{format_count(size.parameters)} parameters do not fit: {what} alone are at "
                f"least {format_bytes(needed)}{each}, and {has} {format_bytes(most)}"
                f"{shared if most == on_device else ''}",
                where="model",
                remedy="choose a smaller model, or shard it over more devices with [parallel]",
            )


def document_rules(run: BuiltRun) -> DocumentRules:
    """How document boundaries are treated."""
    if run.config.packs_conversations:
        return DocumentRules(doc_starts="files", attention=True, positions=True)
    return build_rules(run.config.data, end_of_text=run.tokenizer.end_of_text)


def build_loader(run: BuiltRun) -> Loader:
    """The loader of training batches."""
    resolved, data = run.resolved, run.config.data
    return Loader(
        build_stream(data, run.data.train, order_spec(data, resolved, run.folder)),
        micro_batch=resolved.micro_batch * run.world.data_shards_here,
        accumulate=resolved.accumulate,
        rules=document_rules(run),
        rank=run.world.data_rank,
        ranks=run.world.mesh.data,
        pin=run.world.device.pins_memory,
        vocab=resolved.vocab,
        ramp=resolved.ramp,
        notes_sources=run.config.recorded_sources > 0,
    )


def build_content_check(run: BuiltRun) -> ContentCheck:
    """The check of the token files against their checksums, by one process of each node."""
    has_manifests = run.config.data.kind == "tokens" and run.config.data.verify
    wanted = has_manifests and run.world.place.local_rank == 0
    mixtures = run.data.mixtures if wanted else ()
    return ContentCheck(split.path for data in mixtures for split in data.splits)


def build_validate(run: BuiltRun, tracker: Tracker) -> Validate | None:
    """The validation hook, if there is validation data."""
    held_out = run.data.validation
    if held_out is None:
        return None

    def batches(text: Mixture, windows: int) -> Iterator[Batch]:
        return validation_batches(
            text,
            sequence=run.resolved.sequence,
            windows=windows,
            batch=run.resolved.micro_batch * run.world.data_shards_here,
            rules=document_rules(run),
            vocab=run.resolved.vocab,
            pin=run.world.device.pins_memory,
        )

    train_windows = run.config.train_windows
    return Validate(
        run.resolved.validate_every,
        strategy=run.strategy,
        batches=lambda: batches(held_out, run.config.validation.windows),
        train_batches=(lambda: batches(run.data.train, train_windows)) if train_windows else None,
        sets={one.name: partial(batches, one.text, one.windows) for one in run.data.sets},
        tokenizer=run.tokenizer,
        tracker=tracker,
        state=run.state,
    )


def build_evaluation(run: BuiltRun, tracker: Tracker) -> EvaluateTasks | None:
    """The hook for downstream tasks, if the run file names any. Their data is read here."""
    config = run.config.evaluate
    if config is None:
        return None
    options, opened = TaskOptions(items=config.items), list[OpenTask]()

    def open_here() -> None:
        opened.extend(open_tasks(config.tasks, options, where="evaluate.tasks"))

    run.control.on_rank0(open_here)
    return EvaluateTasks(
        config.every,
        tasks=opened,
        items=config.items,
        precision=run.config.precision.compute,
        strategy=run.strategy,
        tokenizer=run.tokenizer,
        tracker=tracker,
        state=run.state,
        folder=run.folder,
    )


def build_health(run: BuiltRun, tracker: Tracker) -> RunHealth:
    """The health check, in the state of the checkpoint."""

    def warn(text: str) -> None:
        tracker.say(text, level="warning")

    health = RunHealth(run.config.train.guard, lag=AHEAD, warn=warn)
    try:
        health.load(run.state.health)
    except (KeyError, TypeError, ValueError) as error:
        what = f"`health` cannot be read: {type(error).__name__}: {error}"
        where = f"{STATE} of step {run.state.progress.steps}"
        raise DataError(what, where=where, remedy="go back with --from STEP") from error
    return health


def build_hooks(
    run: BuiltRun,
    tracker: Tracker,
    writer: CheckpointWriter,
    validate: Validate | None,
    health: RunHealth,
    check: ContentCheck,
) -> list[Hook]:
    """All hooks, in the order in which they run."""
    config, hooks = run.config, list[Hook]()
    if check.in_background:
        hooks.append(StopOnDamage(check, tracker=tracker, state=run.state))
    if validate is not None:
        hooks.append(validate)
    if config.sample is not None:
        hooks.append(
            Sample(
                config.sample,
                strategy=run.strategy,
                tokenizer=run.tokenizer,
                tracker=tracker,
                state=run.state,
                seed=config.train.seed,
                folder=run.folder,
                chat=run.chat,
            )
        )
    evaluation = build_evaluation(run, tracker)
    if evaluation is not None:
        hooks.append(evaluation)
    compare = None
    if config.parallel.compare is not None:
        compare = CompareReplicas(
            config.parallel.compare,
            strategy=run.strategy,
            control=run.control,
            state=run.state,
            writer=writer,
        )
        hooks.append(compare)
    hooks.append(
        Checkpoint(
            config.checkpoint.every,
            writer=writer,
            state=run.state,
            strategy=run.strategy,
            validate=validate,
            keep_best=config.checkpoint.keep_best,
            health=health,
            control=run.control,
            folder=run.folder,
            agreed_at=None if compare is None else lambda: compare.agreed_at,
        )
    )
    return hooks


def build_meter(
    run: BuiltRun,
    tracker: Tracker,
    health: RunHealth,
    compile_seconds: Callable[[], float] = float,
    *,
    account: WallAccount | None = None,
    pace: Pace | None = None,
) -> Meter:
    """The meter that turns step results into records."""
    config, resolved = run.config, run.resolved
    return Meter(
        tracker,
        counters=run.state.counters,
        every=config.track.every,
        cost=run.token_cost,
        world=run.world,
        peak_flops=run.world.device.peak_flops(
            config.precision.compute, tf32=config.precision.tf32
        ),
        health=health,
        bad_steps=config.train.bad_steps,
        compile_seconds=compile_seconds,
        marks_steps=run.strategy.compiled is None,
        account=account,
        pace=pace,
        next_lr=_next_lr(config, resolved) if config.track.log_format == "megatron" else None,
    )


def _next_lr(config: RunConfig, resolved: Resolved) -> Callable[[Progress, int], float]:
    schedule = build_schedule(config, resolved)
    return lambda progress, skipped: schedule.rate(progress, skipped_samples=skipped)
