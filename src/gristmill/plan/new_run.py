"""Size, horizon and batch of a new run, chosen from its data, this machine and the time there is.

    tokens      what the machine reads in the time, but at most 4 times the text [1]; where that is
                less than the smallest model wants, up to 16 times
    size        the largest preset of the modern recipe that fits into memory and gets 20 tokens for
                each parameter in a matrix product [2]; the smallest if none does
    batch       a power of two of samples, near 524,288 * sqrt(tokens / 10B) tokens [3]; fewer where
                that would leave less than 1,000 steps
    split       the smallest usual share that validates on 128 windows
    optimizer   the preset's own; for presets that set sizes alone AdamW and a cosine, with the
                peak rate of the nearest size in GPT-3's table [4]

[1] Muennighoff et al., Scaling Data-Constrained Language Models, arXiv 2305.16264: up to 4 times, a
text is nearly as good as new, and after 16 times there is little left in it. [2] Hoffmann et al.,
arXiv 2203.15556. [3] The square root is that of Zhang et al., arXiv 2410.21676; the factor is from
the recipes. [4] Brown et al., arXiv 2005.14165. A model of 1M parameters has the recipes' 3e-3.

All of this is a start that is seldom bad, not what a sweep would find.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

FAMILY = "modern"
"""The presets among which a size is chosen."""
TOKENS_OF_EACH = 20
"""Tokens for each parameter in a matrix product."""
GOOD_EPOCHS, MOST_EPOCHS = 4, 16
_BATCH_TOKENS, _BATCH_HORIZON = 2**19, 10**10
_LEAST_BATCH, _LEAST_STEPS = 8, 1000
_SPLITS = ("999,1", "99,1", "95,5", "90,10")
_WINDOWS = 128
"""Windows that are validated on, where the text has so many."""
_LEAST_TOKENS = 640
_SHORTEST = 32
_ROUNDS = 8
_PLACE, _LINE = "the new run", re.compile(r"^the new run(:\d+)?(: |$)")
_PROGRAM = 370 * 2**20
"""Bytes of Python and torch on a processor, measured with torch 2.13 on Linux; a GPU's plan counts
what CUDA takes."""
_HOST_SHARE = 0.5
"""The part of a host's memory that a run takes, since other programs are there too."""
_RATES = {
    10**6: 3e-3, 125 * 10**6: 6e-4, 350 * 10**6: 3e-4, 760 * 10**6: 2.5e-4, 13 * 10**8: 2e-4,
    27 * 10**8: 1.6e-4, 67 * 10**8: 1.2e-4, 13 * 10**9: 1e-4, 175 * 10**9: 6e-5,
}  # fmt: skip
"""Peak learning rates of AdamW by parameters."""


@dataclass(frozen=True)
class DataFacts:
    """What is known of the tokens that a model of some size would read."""

    vocab: int
    tokens: int | None
    """About; None if nothing is known."""


@dataclass(frozen=True)
class RunGoal:
    """What was asked for; what was not is None, and chosen."""

    name: str
    paths: str
    machine: Machine
    validation: str | None = None
    preset: str | None = None
    seconds: float | None = None
    tokens: int | None = None
    top: tuple[tuple[str, str], ...] = ()
    """Further settings at the top of the file."""
    words: Sequence[str] = ()
    """Settings such as train.batch=8."""
    text: str | None = None
    """What the tokens are made of, for messages."""
    samples: bool = True
    """Whether the run can write text, for which it needs a tokenizer."""


@dataclass(frozen=True)
class NewRun:
    """A run as it was chosen."""

    goal: RunGoal
    settings: dict[str, Any]
    """The tables of its file, without what the words say."""
    config: RunConfig
    """Loaded from both."""
    resolved: Resolved
    data: DataFacts
    layout: LayoutPlan | None
    """How it would run here; None if it does not fit, which only candidates do."""

    @property
    def parameters(self) -> int:
        """In matrix products."""
        return _multiplied(self.config, self.data)

    @property
    def tokens(self) -> int:
        """That the run reads."""
        return self.resolved.samples * self.resolved.sequence

    @property
    def epochs(self) -> float | None:
        """How often it reads the text."""
        kept = self.training_tokens
        return None if kept is None else self.tokens / kept

    @property
    def training_tokens(self) -> int | None:
        """Tokens of the text that are trained on."""
        shares = parse_split(self.config.data.split or "") or [1.0]
        return None if self.data.tokens is None else max(1, round(self.data.tokens * shares[0]))

    @property
    def plan(self) -> LayoutPlan:
        """The layout, of a run that fits."""
        assert self.layout is not None
        return self.layout

    @property
    def precision(self) -> str:
        """Of products and activations, on this machine."""
        return on_device(self.config, self.goal.machine.hardware).precision.compute

    @property
    def memory(self) -> int:
        """Bytes that a process takes on its device."""
        return self.plan.memory.total + (0 if self.goal.machine.is_gpu else _PROGRAM)

    @property
    def seconds(self) -> float:
        """How long it takes, about; without its start, and the texts that it writes."""
        return self.tokens * self.with_validation / self.plan.step.tokens_per_second

    @property
    def with_validation(self) -> float:
        """The time of training and validation by that of training alone: a forward pass is a third
        of the work, done at the start, at the end and between them."""
        every = self.resolved.samples_of(self.resolved.validate_every)
        times = 2 + (self.resolved.samples - 1) // max(every, 1)
        windows = self.config.validation.windows
        if self.goal.validation is None and self.data.tokens is not None:
            held_out = self.data.tokens - (self.training_tokens or 0)
            windows = min(windows, held_out // self.resolved.sequence)
        return 1 + times * windows / (3 * self.resolved.samples)


def choose_run(
    goal: RunGoal, facts: Callable[[GPTConfig], DataFacts], *, find_model: FindModel
) -> NewRun:
    """The run that fits; `facts` says what is known of the tokens for a model."""
    draft = _Draft(goal, facts, find_model)
    if goal.preset is not None:
        _require_preset(goal.preset)
        return draft.finished(goal.preset)
    candidates = [name for name in preset_names() if name.startswith(f"{FAMILY}-")]
    best = candidates[0]
    for name in candidates:
        if not draft.suits(name):
            break
        best = name
    return draft.finished(best)


def _require_preset(name: str) -> None:
    try:
        load_preset(name)
    except UserError as error:
        first = error.problems[0]
        raise UserError(first.what, where="--preset", remedy=first.remedy) from error


@dataclass(frozen=True)
class _Draft:
    """What all candidates have in common."""

    goal: RunGoal
    facts: Callable[[GPTConfig], DataFacts]
    find_model: FindModel

    def suits(self, preset: str) -> bool:
        """Whether a size fits, and gets its tokens from the text and in the time."""
        run = self._run(preset, tokens=None)
        wanted = TOKENS_OF_EACH * run.parameters
        return run.layout is not None and wanted <= min(self._in_time(run), _good(run))

    def finished(self, preset: str) -> NewRun:
        """A size with its horizon, and the batch that suits it."""
        run = self._run(preset, tokens=None)
        if run.layout is None:
            what = f"{preset} does not fit into the memory of {self.goal.machine.described}"
            remedy = "leave --preset out, or plan for another machine with --gpu and --gpus"
            raise UserError(what, where="--preset" if self.goal.preset else None, remedy=remedy)
        # The batch follows from the horizon, and the speed, from which the horizon follows, a
        # little from the batch: it only shrinks, so that the time is kept.
        tokens = self._horizon(run)
        for _ in range(_ROUNDS):
            run = self._run(preset, tokens=tokens)
            again = self._horizon(run)
            if again >= tokens:
                break
            tokens = again
        return run

    def _horizon(self, run: NewRun) -> int:
        if self.goal.tokens is not None:
            return self.goal.tokens
        wanted = TOKENS_OF_EACH * run.parameters
        kept = run.training_tokens
        text = math.inf
        if kept is not None:
            text = kept * (GOOD_EPOCHS if GOOD_EPOCHS * kept >= wanted else MOST_EPOCHS)
        limit = min(self._in_time(run), text)
        return rounded(wanted if math.isinf(limit) else limit)

    def _in_time(self, run: NewRun) -> float:
        """Tokens that are asked for, or that the machine reads in the time."""
        if self.goal.tokens is not None:
            return self.goal.tokens
        if self.goal.seconds is None or run.layout is None:
            return math.inf
        return self.goal.seconds * run.layout.step.tokens_per_second / run.with_validation

    def _run(self, preset: str, *, tokens: int | None) -> NewRun:
        """A size with a horizon, or with as many tokens as it wants."""
        first = self._loaded({**self._top(preset), "train": {"until": "1 step", "batch": 8}})
        model = first.model
        if not isinstance(model, GPTConfig):
            what = "the size of a model from elsewhere is not known before it is loaded"
            raise UserError(what, where="model", remedy="write the run file by hand")
        data = self.facts(model)
        if data.tokens is not None and data.tokens < _LEAST_TOKENS:
            what = f"about {data.tokens:,} tokens are too few to train and validate on"
            raise DataError(what, where=self.goal.text, remedy="give more text")
        if tokens is None:
            tokens = rounded(TOKENS_OF_EACH * _multiplied(first, data))
        settings = self._settings(preset, first, data, tokens)
        config = self._loaded(settings)
        check_mesh(config, processes=config.runtime.devices_of(self.goal.machine.count))
        layout = planned_layout(config, self.goal.machine, vocab=data.vocab)
        if layout is not None:
            settings = _laid_out(settings, layout)
            config = self._loaded(settings)
        return self._calmed(
            NewRun(self.goal, settings, config, resolve(config, vocab=data.vocab), data, layout)
        )

    def _calmed(self, run: NewRun) -> NewRun:
        """Without a rise of momentum that the run would not finish."""
        rise = run.config.optim.momentum_rise
        if rise is None or run.resolved.samples_of(rise.over) <= run.resolved.samples:
            return run
        table = {**run.settings.get("optim", {}), "momentum_warmup": 0.5}
        settings = {**run.settings, "optim": table}
        config = self._loaded(settings)
        return replace(run, settings=settings, config=config)

    def _top(self, preset: str) -> dict[str, Any]:
        goal = self.goal
        data = {"paths": goal.paths}
        if goal.validation is not None:
            data["validation"] = goal.validation
        return {"name": goal.name, "preset": preset, **dict(goal.top), "data": data}

    def _settings(
        self, preset: str, first: RunConfig, data: DataFacts, tokens: int
    ) -> dict[str, Any]:
        """The tables of the file."""
        top = self._top(preset)
        sequence = first.data.sequence or first.model.context
        if self.goal.validation is None and first.data.split is None:
            split, fitting = split_of(data.tokens, sequence=sequence)
            top["data"]["split"] = split
            if fitting != sequence:
                top["data"]["sequence"] = sequence = fitting
        batch = batch_of(tokens, sequence=sequence, devices=self.goal.machine.count)
        top["train"] = {"until": str(Duration(tokens, Unit.TOKENS)), "batch": batch}
        asked = {word.partition(".")[0] for word in self.goal.words}
        if not {"optim", "schedule"} & (load_preset(preset).keys() | asked):
            rate = rate_of(_multiplied(first, data))
            top["optim"] = {"lr": rate}
            top["schedule"] = {"type": "cosine", "min_lr": float(f"{rate / 10:.2g}")}
        if self.goal.samples:
            top["sample"] = {"every": str(Duration(rounded(tokens / 10), Unit.TOKENS))}
        return top

    def _loaded(self, settings: dict[str, Any]) -> RunConfig:
        text = tomli_w.dumps(settings)
        # Words may override what is only our choice, such as the rate of an optimizer.
        ours = ("optim.lr", "optim.momentum_warmup", "schedule.min_lr", "train.recompute")
        words = tuple(self.goal.words)
        try:
            return load_text(text, words, place=_PLACE, find_model=self.find_model, defaults=ours)
        except UserError as error:
            # Nobody has seen the lines of this text.
            raise UserError(
                [
                    replace(one, where=_LINE.sub("", one.where or "") or None)
                    for one in error.problems
                ],
                exit=error.exit,
            ) from error


def planned_layout(config: RunConfig, machine: Machine, *, vocab: int) -> LayoutPlan | None:
    """How a run would be laid out here: whole on every device if that fits without recomputing,
    else the fastest; None if nothing fits."""
    hardware = machine.hardware
    if hardware.device == "cpu":
        hardware = replace(hardware, memory=int(hardware.memory * _HOST_SHARE))
    config = on_device(config, hardware)
    mesh = build_mesh(config.parallel, machine.count)
    if isinstance(mesh, Problem):
        raise UserError([mesh])
    own = portions(config.train, parts=mesh.data)
    if isinstance(own, Problem):
        raise UserError([own])
    sizes = [size for size in divisors(own.batch // mesh.data) if size <= MOST_MICRO]
    ways = RECOMPUTES if machine.count == 1 else RECOMPUTES[:1]
    for recompute, size in product(ways, reversed(sizes)):
        layout = plan_layout(
            config, mesh, hardware, vocab=vocab, micro_batch=size, recompute=recompute
        )
        if layout.fits:
            return layout
    if machine.count == 1:
        return None
    plans = plan_layouts(config, gpus=machine.count, hardware=hardware, vocab=vocab)
    return plans.layouts[0] if plans.layouts else None


def _laid_out(settings: dict[str, Any], layout: LayoutPlan) -> dict[str, Any]:
    """With what the layout needs; the micro-batch is left to the run, which asks its device."""
    made = dict(settings)
    for path, value in layout.settings.items():
        table, _, key = path.partition(".")
        if value is not None and path != "train.micro_batch":
            made[table] = {**made.get(table, {}), key: value}
    return made


def split_of(tokens: int | None, *, sequence: int) -> tuple[str, int]:
    """The split of a text, and the length of samples, which is shorter for a very short text."""
    if tokens is None:
        return _SPLITS[1], sequence
    for split in _SPLITS:
        if tokens * _share(split) >= _WINDOWS * (sequence + 1):
            return split, sequence
    while sequence > _SHORTEST and tokens * _share(_SPLITS[-1]) < 2 * (sequence + 1):
        sequence //= 2
    return _SPLITS[-1], sequence


def _share(split: str) -> float:
    """The part that is validated on."""
    shares = parse_split(split)
    assert shares is not None
    return shares[1]


def batch_of(tokens: int, *, sequence: int, devices: int) -> int:
    """Samples of a step."""
    wanted = round(math.log2(_BATCH_TOKENS * math.sqrt(tokens / _BATCH_HORIZON) / sequence))
    most = math.floor(math.log2(tokens / _LEAST_STEPS / sequence))
    batch = max(_LEAST_BATCH, 1 << max(0, min(wanted, most)))
    return math.ceil(batch / devices) * devices


def rate_of(parameters: int) -> float:
    """The peak learning rate of AdamW."""
    nearest = min(_RATES, key=lambda size: abs(math.log(size / max(parameters, 1))))
    return _RATES[nearest]


def rounded(tokens: float) -> int:
    """An amount with two digits."""
    size = int(10 ** max(0, math.floor(math.log10(max(tokens, 1))) - 1))
    return max(1, math.floor(tokens / size)) * size


def _good(run: NewRun) -> float:
    """Tokens for which the text is nearly as good as new."""
    kept = run.training_tokens
    return math.inf if kept is None else GOOD_EPOCHS * kept


def _multiplied(config: RunConfig, data: DataFacts) -> int:
    model = config.model
    assert isinstance(model, GPTConfig)
    return count_multiplied(model, rows=padded(model.vocab or data.vocab, model))
