"""Chooses model size, training tokens and batch of a new run from its data, machine and time.

    tokens      what the machine processes in the time, less what the command takes besides training
                (overhead.py), but at most 4 epochs of the text [1]
    size        the largest preset of the modern recipe that fits into memory and gets 20 tokens for
                each parameter in a matrix product [2]; the smallest if none does
    batch       a power of two of samples, near 524,288 * sqrt(tokens / 10B) tokens [3]; smaller if
                that would leave less than 1,000 steps
    split       the smallest of the usual validation shares that gives 128 windows
    optimizer   the preset's own; for presets that only set sizes AdamW and a cosine schedule, with
                the peak learning rate of the nearest size in GPT-3's table [4]

[1] Muennighoff et al., Scaling Data-Constrained Language Models, arXiv 2305.16264: up to 4 epochs,
repeated text is nearly as good as new text; after 16 epochs it adds little. Small texts overfit
even the smallest preset before that. With 50 KB (two texts) its validation loss was 1.56 and 2.37
after 4 epochs, its lowest, and 1.67 and 2.43 after 8, lowest at three quarters of the run; after 16
of the first text 2.11, lowest half-way. [2] Hoffmann et al., arXiv 2203.15556. [3] The square root
follows Zhang et al., arXiv 2410.21676; the factor is from the recipes. [4] Brown et al., arXiv
2005.14165. A model of 1M parameters gets the recipes' 3e-3.

These are reasonable starting points, not the result of a sweep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import tomli_w

from gristmill.base.errors import DataError, Problem, UserError
from gristmill.base.units import Duration, Unit, parse_split
from gristmill.config.load import FindModel, load_preset, load_text, preset_names
from gristmill.config.model import GPTConfig
from gristmill.config.parallel import build_mesh
from gristmill.config.resolve import Resolved, divisors, padded, portions, resolve
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.plan.arithmetic import count_multiplied
from gristmill.plan.layouts import (
    MOST_MICRO,
    RECOMPUTES,
    LayoutPlan,
    on_device,
    plan_layout,
    plan_layouts,
)
from gristmill.plan.machine import Machine
from gristmill.plan.overhead import Overhead, run_overhead

FAMILY = "modern"
"""Prefix of the presets to choose from."""
TOKENS_PER_PARAMETER = 20
"""Tokens per parameter in a matrix product."""
GOOD_EPOCHS, MAX_EPOCHS = 4, 16
_BATCH_TOKENS, _BATCH_HORIZON = 2**19, 10**10
_MIN_BATCH, _MIN_STEPS = 8, 1000
_SPLITS = ("999,1", "99,1", "95,5", "90,10")
_WINDOWS = 128
"""Validation windows, if the text is long enough."""
_MIN_TOKENS = 640
_MIN_SEQUENCE = 32
_ROUNDS = 8
_PLACE, _LINE = "the new run", re.compile(r"^the new run(:\d+)?(: |$)")
_PROGRAM_BYTES = 370 * 2**20
"""Bytes of Python and torch on a CPU, measured with torch 2.13 on Linux; plans for GPUs count the
memory of CUDA themselves."""
_HOST_SHARE = 0.5
"""Share of the host memory that a run may use, next to other programs."""
_LEAST_SHARE = 0.1
"""Share of the time for steps and validation, even if the start takes longer."""
_RATES = {
    10**6: 3e-3, 125 * 10**6: 6e-4, 350 * 10**6: 3e-4, 760 * 10**6: 2.5e-4, 13 * 10**8: 2e-4,
    27 * 10**8: 1.6e-4, 67 * 10**8: 1.2e-4, 13 * 10**9: 1e-4, 175 * 10**9: 6e-5,
}  # fmt: skip
"""Peak learning rates of AdamW by number of parameters."""


@dataclass(frozen=True)
class DataFacts:
    """Vocabulary and number of tokens of the data, for a model of some size."""

    vocab: int
    tokens: int | None
    """Estimated; None if unknown."""


@dataclass(frozen=True)
class RunGoal:
    """What the user asked for; the rest is None and will be chosen."""

    name: str
    paths: str
    machine: Machine
    validation: str | None = None
    preset: str | None = None
    seconds: float | None = None
    tokens: int | None = None
    top_level: tuple[tuple[str, str], ...] = ()
    """Further settings above the first table of the file."""
    overrides: Sequence[str] = ()
    """Settings such as train.batch=8."""
    source: str | None = None
    """The names of the text, for messages."""
    has_tokenizer: bool = True
    """Whether there will be a tokenizer, which samples of text need."""


@dataclass(frozen=True)
class NewRun:
    """The chosen run."""

    goal: RunGoal
    settings: dict[str, Any]
    """The tables of its file, without the overrides."""
    config: RunConfig
    """Loaded from the settings and the overrides."""
    resolved: Resolved
    data: DataFacts
    layout: LayoutPlan | None
    """The layout on this machine; None for a candidate that does not fit."""

    @property
    def parameters(self) -> int:
        """Number of parameters in matrix products."""
        return _matrix_parameters(self.config, self.data)

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        return self.resolved.samples * self.resolved.sequence

    @property
    def epochs(self) -> float | None:
        """Number of passes over the training text."""
        available = self.training_tokens
        return None if available is None else self.tokens / available

    @property
    def training_tokens(self) -> int | None:
        """Tokens of the training split."""
        shares = parse_split(self.config.data.split or "") or [1.0]
        return None if self.data.tokens is None else max(1, round(self.data.tokens * shares[0]))

    @property
    def has_own_horizon(self) -> bool:
        """Whether the user's settings decide the horizon."""
        until: str = self.settings["train"]["until"]
        return str(self.config.train.until) != until

    @property
    def plan(self) -> LayoutPlan:
        """The layout of a run that fits."""
        assert self.layout is not None
        return self.layout

    @property
    def precision(self) -> str:
        """The precision of matrix products and activations on this machine."""
        return on_device(self.config, self.goal.machine.hardware).precision.compute

    @property
    def memory(self) -> int:
        """Bytes that a process needs on its device."""
        return self.plan.memory.total + (0 if self.goal.machine.is_gpu else _PROGRAM_BYTES)

    @property
    def seconds(self) -> float:
        """Estimated duration of the command, from its start to its end."""
        return self.training_seconds * self.validation_factor + self.overhead.total

    @property
    def training_seconds(self) -> float:
        """Estimated duration of its steps."""
        return self.tokens / self.plan.step.tokens_per_second

    @cached_property
    def overhead(self) -> Overhead:
        """What it takes besides steps and validation."""
        machine = self.goal.machine
        return run_overhead(
            on_device(self.config, machine.hardware),
            self.resolved,
            machine.hardware,
            devices=machine.count,
            imports=machine.imports,
            training=self.training_seconds,
            validations=self.validations,
        )

    @property
    def validations(self) -> int:
        """How often it validates: at the start, at the end and in between."""
        every = self.resolved.samples_of(self.resolved.validate_every)
        return 2 + (self.resolved.samples - 1) // max(every, 1)

    @property
    def validation_factor(self) -> float:
        """The time of training and validation over that of training alone; the forward pass of
        validation is a third of the work of a step."""
        windows = self.config.validation.windows
        if self.goal.validation is None and self.data.tokens is not None:
            held_out = self.data.tokens - (self.training_tokens or 0)
            windows = min(windows, held_out // self.resolved.sequence)
        return 1 + self.validations * windows / (3 * self.resolved.samples)


def choose_run(
    goal: RunGoal, facts: Callable[[GPTConfig], DataFacts], *, find_model: FindModel
) -> NewRun:
    """Choose the run; `facts` describes the data for a model."""
    planner = _RunPlanner(goal, facts, find_model)
    if goal.preset is not None:
        _require_preset(goal.preset)
        return planner.plan(goal.preset)
    candidates = [name for name in preset_names() if name.startswith(f"{FAMILY}-")]
    best = candidates[0]
    for name in candidates:
        if not planner.is_affordable(name):
            break
        best = name
    return planner.plan(best)


def _require_preset(name: str) -> None:
    try:
        load_preset(name)
    except UserError as error:
        first = error.problems[0]
        raise UserError(first.what, where="--preset", remedy=first.remedy) from error


@dataclass(frozen=True)
class _RunPlanner:
    """Plans candidates for a goal."""

    goal: RunGoal
    facts: Callable[[GPTConfig], DataFacts]
    find_model: FindModel

    def is_affordable(self, preset: str) -> bool:
        """Whether a size fits into memory, and text and time suffice for its tokens."""
        run = self._run(preset, tokens=None)
        wanted = TOKENS_PER_PARAMETER * run.parameters
        return run.layout is not None and wanted <= min(self._token_budget(run), _good_tokens(run))

    def plan(self, preset: str) -> NewRun:
        """A size with its training tokens and batch."""
        run = self._run(preset, tokens=None)
        if run.layout is None:
            what = f"{preset} does not fit into the memory of {self.goal.machine.described}"
            remedy = "leave --preset out, or plan for another machine with --gpu and --gpus"
            raise UserError(what, where="--preset" if self.goal.preset else None, remedy=remedy)
        # Training tokens determine the batch, the batch slightly changes the speed, and the speed
        # the tokens. Tokens only ever decrease here, so that the run stays within the time.
        tokens = self._training_tokens(run)
        for _ in range(_ROUNDS):
            run = self._run(preset, tokens=tokens)
            affordable = self._training_tokens(run)
            if affordable >= tokens:
                break
            tokens = affordable
        return run

    def _training_tokens(self, run: NewRun) -> int:
        if self.goal.tokens is not None:
            return self.goal.tokens
        limit = min(self._token_budget(run), _good_tokens(run))
        return round_down(TOKENS_PER_PARAMETER * run.parameters if math.isinf(limit) else limit)

    def _token_budget(self, run: NewRun) -> float:
        """The tokens that the user asked for, or that the machine processes in the time."""
        if self.goal.tokens is not None:
            return self.goal.tokens
        if self.goal.seconds is None or run.layout is None:
            return math.inf
        # However little time is left, something is trained; the estimate then exceeds the time.
        left = max(self.goal.seconds - run.overhead.total, _LEAST_SHARE * self.goal.seconds)
        seconds = left / run.validation_factor - run.layout.step.seconds  # the last step is whole
        return max(0.0, seconds) * run.layout.step.tokens_per_second

    def _run(self, preset: str, *, tokens: int | None) -> NewRun:
        """A size trained on these tokens, or on `TOKENS_PER_PARAMETER` for each parameter."""
        sized = self._load({**self._top_level(preset), "train": {"until": "1 step", "batch": 8}})
        model = sized.model
        if not isinstance(model, GPTConfig):
            what = "the size of a model of another library is unknown until it is loaded"
            raise UserError(what, where="model", remedy="write the run file by hand")
        data = self.facts(model)
        if data.tokens is not None and data.tokens < _MIN_TOKENS:
            what = f"about {data.tokens:,} tokens are too few to train and validate on"
            raise DataError(what, where=self.goal.source, remedy="give more text")
        if tokens is None:
            tokens = round_down(TOKENS_PER_PARAMETER * _matrix_parameters(sized, data))
        settings = self._settings(preset, sized, data, tokens)
        config = self._load(settings)
        check_mesh(config, processes=config.runtime.devices_of(self.goal.machine.count))
        layout = planned_layout(config, self.goal.machine, vocab=data.vocab)
        if layout is not None:
            settings = _with_layout(settings, layout)
            config = self._load(settings)
        return self._shorten_momentum_warmup(
            NewRun(self.goal, settings, config, resolve(config, vocab=data.vocab), data, layout)
        )

    def _shorten_momentum_warmup(self, run: NewRun) -> NewRun:
        """Replace a momentum warm-up that is longer than the run."""
        rise = run.config.optim.momentum_rise
        if rise is None or run.resolved.samples_of(rise.over) <= run.resolved.samples:
            return run
        table = {**run.settings.get("optim", {}), "momentum_warmup": 0.5}
        settings = {**run.settings, "optim": table}
        config = self._load(settings)
        return replace(run, settings=settings, config=config)

    def _top_level(self, preset: str) -> dict[str, Any]:
        goal = self.goal
        data = {"paths": goal.paths}
        if goal.validation is not None:
            data["validation"] = goal.validation
        return {"name": goal.name, "preset": preset, **dict(goal.top_level), "data": data}

    def _settings(
        self, preset: str, sized: RunConfig, data: DataFacts, tokens: int
    ) -> dict[str, Any]:
        """The tables of the file."""
        tables = self._top_level(preset)
        sequence = sized.data.sequence or sized.model.context
        if self.goal.validation is None and sized.data.split is None:
            split, shortened = choose_split(data.tokens, sequence=sequence)
            tables["data"]["split"] = split
            if shortened != sequence:
                tables["data"]["sequence"] = sequence = shortened
        batch = choose_batch(tokens, sequence=sequence, devices=self.goal.machine.count)
        tables["train"] = {"until": str(Duration(tokens, Unit.TOKENS)), "batch": batch}
        overridden = {override.partition(".")[0] for override in self.goal.overrides}
        if not {"optim", "schedule"} & (load_preset(preset).keys() | overridden):
            rate = learning_rate(_matrix_parameters(sized, data))
            tables["optim"] = {"lr": rate}
            tables["schedule"] = {"type": "cosine", "min_lr": float(f"{rate / 10:.2g}")}
        if self.goal.has_tokenizer:
            tables["sample"] = {"every": str(Duration(round_down(tokens / 10), Unit.TOKENS))}
        return tables

    def _load(self, settings: dict[str, Any]) -> RunConfig:
        text = tomli_w.dumps(settings)
        # Overrides replace what is only our choice, such as the learning rate.
        ours = ("optim.lr", "optim.momentum_warmup", "schedule.min_lr", "train.recompute")
        overrides = tuple(self.goal.overrides)
        try:
            return load_text(
                text, overrides, place=_PLACE, find_model=self.find_model, defaults=ours
            )
        except UserError as error:
            # This text is not a file yet, so its line numbers mean nothing to the user.
            raise UserError(
                [
                    replace(problem, where=_LINE.sub("", problem.where or "") or None)
                    for problem in error.problems
                ],
                exit=error.exit,
            ) from error


def planned_layout(config: RunConfig, machine: Machine, *, vocab: int) -> LayoutPlan | None:
    """The layout of a run on this machine: a replica on every device if that fits without
    recomputation, else the fastest layout; None if nothing fits."""
    hardware = machine.hardware
    if hardware.device == "cpu":
        hardware = replace(hardware, memory=int(hardware.memory * _HOST_SHARE))
    config = on_device(config, hardware)
    mesh = build_mesh(config.parallel, machine.count)
    if isinstance(mesh, Problem):
        raise UserError([mesh])
    shares = portions(config.train, parts=mesh.data)
    if isinstance(shares, Problem):
        raise UserError([shares])
    sizes = [size for size in divisors(shares.batch // mesh.data) if size <= MOST_MICRO]
    recomputes = RECOMPUTES if machine.count == 1 else RECOMPUTES[:1]
    for recompute, size in product(recomputes, reversed(sizes)):
        layout = plan_layout(
            config, mesh, hardware, vocab=vocab, micro_batch=size, recompute=recompute
        )
        if layout.fits:
            return layout
    if machine.count == 1:
        return None
    plans = plan_layouts(config, gpus=machine.count, hardware=hardware, vocab=vocab)
    return plans.layouts[0] if plans.layouts else None


def _with_layout(settings: dict[str, Any], layout: LayoutPlan) -> dict[str, Any]:
    """The settings with those of the layout, except the micro-batch, which the run itself finds."""
    merged = dict(settings)
    for path, value in layout.settings.items():
        table, _, key = path.partition(".")
        if value is not None and path != "train.micro_batch":
            merged[table] = {**merged.get(table, {}), key: value}
    return merged


def choose_split(tokens: int | None, *, sequence: int) -> tuple[str, int]:
    """The split of a text, and the sequence length, which is shortened for a very short text."""
    if tokens is None:
        return _SPLITS[1], sequence
    for split in _SPLITS:
        if tokens * _validation_share(split) >= _WINDOWS * (sequence + 1):
            return split, sequence
    while sequence > _MIN_SEQUENCE and tokens * _validation_share(_SPLITS[-1]) < 2 * (sequence + 1):
        sequence //= 2
    return _SPLITS[-1], sequence


def _validation_share(split: str) -> float:
    """The share of the validation set."""
    shares = parse_split(split)
    assert shares is not None
    return shares[1]


def choose_batch(tokens: int, *, sequence: int, devices: int) -> int:
    """The samples of a step."""
    wanted = round(math.log2(_BATCH_TOKENS * math.sqrt(tokens / _BATCH_HORIZON) / sequence))
    limit = math.floor(math.log2(tokens / _MIN_STEPS / sequence))
    batch = max(_MIN_BATCH, 1 << max(0, min(wanted, limit)))
    return math.ceil(batch / devices) * devices


def learning_rate(parameters: int) -> float:
    """The peak learning rate of AdamW."""
    nearest = min(_RATES, key=lambda size: abs(math.log(size / max(parameters, 1))))
    return _RATES[nearest]


def round_down(tokens: float) -> int:
    """Rounds down to two significant digits."""
    size = int(10 ** max(0, math.floor(math.log10(max(tokens, 1))) - 1))
    return max(1, math.floor(tokens / size)) * size


def _good_tokens(run: NewRun) -> float:
    """Tokens up to which repeated text is nearly as good as new text."""
    available = run.training_tokens
    return math.inf if available is None else GOOD_EPOCHS * available


def _matrix_parameters(config: RunConfig, data: DataFacts) -> int:
    model = config.model
    assert isinstance(model, GPTConfig)
    return count_multiplied(model, rows=padded(model.vocab or data.vocab, model))
