"""How a run fits the grid of processes that it is divided over, and what would fit it.

    when the file is read       sizes that are given, with the model and the sequence
    with so many processes      these and those that follow; the parts of the batch, their
                                micro-batches, and those of every batch of a ramp

A rule says what does not fit, and which settings could be changed to what. Before any of it is
said, it is tried: what is advised mends what it is said about and breaks no other of these rules.
Rules see a mesh in which a size that is not known yet is 1, so that a run that is refused without
the number of processes would be refused with any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.base.errors import Problem
from gristmill.config.parallel import AXES, SEVERAL, Mesh, build_mesh
from gristmill.config.resolve import Portions, divisors, nearest, portions
from gristmill.config.schema import RampConfig, RunConfig, TrainConfig
from gristmill.config.settings import Broken, Path_, Settings

Option = dict[str, int]
"""Settings, by dotted name, and the values that they could have."""

PROCESSES = "processes"
"""The name of their number in an option."""


@dataclass(frozen=True)
class Misfit:
    """What does not fit, and the ways out."""

    path: Path_
    what: str
    options: tuple[Sequence[Option], ...] = ()
    """Each is a row of values of the same settings, the best first, of which none was tried."""
    otherwise: str | None = None
    """What to do if no option helps."""


Rule = Callable[[RunConfig, Mesh], Iterator[Misfit]]


def given_sizes_fit(config: RunConfig) -> Iterator[Broken]:
    """What is wrong with the sizes that are given, on any number of processes."""
    return _broken(config, None)


def mesh_fits(config: RunConfig, *, processes: int) -> Iterator[Broken]:
    """What is wrong with a run on so many processes."""
    return _broken(config, processes)


# ------------------------------------------------------------------ trying


def _broken(config: RunConfig, processes: int | None) -> Iterator[Broken]:
    misfits = _misfits(config, processes)
    paths = {misfit.path for misfit in misfits}
    for misfit in misfits:
        remedy = _remedy(config, processes, misfit, known=paths - {misfit.path})
        yield misfit.path, Problem(misfit.what, remedy=remedy)


def _misfits(config: RunConfig, processes: int | None) -> list[Misfit]:
    mesh = build_mesh(config.parallel, processes)
    if isinstance(mesh, Problem):
        return [_no_mesh(config, processes, mesh)]
    rules = _GIVEN if processes is None else _GIVEN + _COUNTED
    return [misfit for rule in rules for misfit in rule(config, mesh)]


def _no_mesh(config: RunConfig, processes: int | None, problem: Problem) -> Misfit:
    """Sizes whose product is not the number of processes, any one of which may be the wrong one."""
    if processes is None or problem.remedy is not None:
        return Misfit(("parallel",), problem.what, otherwise=problem.remedy)
    given = {axis: getattr(config.parallel, axis) for axis in AXES}
    sizes = {axis: size for axis, size in given.items() if isinstance(size, int) and size > 1}
    product = math.prod(sizes.values())
    counts = _row(PROCESSES, _multiples(product, around=processes), processes)
    rows = (_row(f"parallel.{axis}", divisors(processes), size) for axis, size in sizes.items())
    exact = all(isinstance(size, int) for size in given.values())
    otherwise = f"start {'' if exact else 'a multiple of '}{product} processes"
    return Misfit(("parallel",), problem.what, (counts, *rows), otherwise)


def _remedy(
    config: RunConfig, processes: int | None, misfit: Misfit, *, known: set[Path_]
) -> str | None:
    """The options that help, in words; of several settings at once only if nothing before helps."""
    ways: list[str] = []
    for row in filter(None, misfit.options):
        if ways and len(row[0]) > 1:
            continue
        fitting = _helping(config, processes, row, known=known)
        if fitting:
            ways.append(_words(fitting, misfit.path))
    return ", or ".join(ways) or misfit.otherwise


def _helping(
    config: RunConfig, processes: int | None, options: Iterable[Option], *, known: set[Path_]
) -> list[Option]:
    """Options after which only known misfits are left, and as few of them as possible."""
    left: list[tuple[int, Option]] = []
    for option in options:
        settings = {name: value for name, value in option.items() if name != PROCESSES}
        started = option.get(PROCESSES, processes)
        paths = {misfit.path for misfit in _misfits(_having(config, settings), started)}
        if paths <= known:
            left.append((len(paths), option))
    fewest = min((count for count, _ in left), default=0)
    return [option for count, option in left if count == fewest]


def _having(config: RunConfig, option: Option) -> RunConfig:
    for name, value in option.items():
        config = _changed(config, name.split("."), value)
    return config


def _changed(settings: Any, path: Sequence[str], value: int) -> Any:
    assert isinstance(settings, Settings)
    key, *rest = path
    inner = _changed(getattr(settings, key), rest, value) if rest else value
    return settings.model_copy(update={key: inner})


def _words(options: Sequence[Option], path: Path_) -> str:
    """Options in words, the best first; settings of the misfit's table go by their last name."""
    own = ".".join(path[:-1] if len(path) > 1 else path) + "."
    first = {name.removeprefix(own): value for name, value in options[0].items()}
    if len(first) > 1:
        return "set " + " and ".join(f"{name} = {value}" for name, value in first.items())
    ((key, value),) = options[0].items()
    (name,) = first
    if key == PROCESSES:
        counts = sorted(option[key] for option in options[:2])
        return f"start {' or '.join(map(str, counts))} processes"
    if len(options) == 1 and value == 1 and key.startswith("parallel."):
        return f"leave {'it' if key == '.'.join(path) else name} out"
    values = sorted(option[key] for option in options[:3])
    return f"{name} could be {', '.join(map(str, values))}"


def _row(name: str, values: Iterable[int], wanted: int) -> list[Option]:
    """Values of one setting, the nearest first."""
    return [{name: value} for value in sorted(values, key=lambda value: abs(value - wanted))]


# ------------------------------------------------------------------ sizes that are given


def _settings_act(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    parallel = config.parallel
    for name, axis in (
        ("keep", "dp_shard"),
        ("sequence", "tp"),
        ("attention", "cp"),
        ("schedule", "pp"),
        ("stages", "pp"),
    ):
        if getattr(parallel, name) is not None and getattr(parallel, axis) == 1:
            what = f"has no effect without parallel.{axis}"
            otherwise = f"remove it, or give parallel.{axis} a size above 1"
            yield Misfit(("parallel", name), what, otherwise=otherwise)
    several = parallel.schedule in SEVERAL
    if parallel.stages is not None and parallel.pp != 1 and (parallel.stages > 1) != several:
        what = f"{parallel.stages} groups of layers on a device do not fit this schedule"
        otherwise = "interleaved and zero-bubble take 2 or more, the others 1"
        yield Misfit(("parallel", "stages"), what, otherwise=otherwise)


def _tensor_divides(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    if mesh.tp == 1:
        return
    model, sequence = config.model, config.data.sequence or config.model.context
    sizes = {
        "heads": (f"the heads {model.heads}", model.heads),
        "kv_heads": (f"the key and value heads {model.groups}", model.groups),
        "mlp_width": (f"the inner width {model.inner}", model.inner),
    }
    if model.groups == model.heads:
        del sizes["kv_heads"]
    uneven = {name: words for name, (words, size) in sizes.items() if size % mesh.tp}
    if uneven:
        what = f"{mesh.tp} does not divide {', nor '.join(uneven.values())}"
        row = _row("parallel.tp", divisors(math.gcd(*(n for _, n in sizes.values()))), mesh.tp)
        otherwise = f"change {' and '.join(f'model.{name}' for name in uneven)}"
        yield Misfit(("parallel", "tp"), what, (row,), otherwise)
    elif config.parallel.sequence in (None, True) and sequence % (mesh.tp * mesh.cp):
        what = f"a sequence of {sequence // mesh.cp} on each device cannot be divided by tp"
        otherwise = "set it to false, or change tp or data.sequence"
        yield Misfit(("parallel", "sequence"), what, otherwise=otherwise)
    if config.precision.fp8:
        what = "a head that is divided over tp has no products in fp8"
        yield Misfit(("precision", "fp8"), what, otherwise="leave it out, or set parallel.tp = 1")


def _context_divides(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    if mesh.cp == 1:
        return
    model, sequence = config.model, config.data.sequence or config.model.context
    if sequence % 2:
        what = f"a sequence of {sequence} cannot be divided evenly by cp"
        yield Misfit(("data", "sequence"), what, otherwise="make it even")
    elif sequence // 2 % mesh.cp:
        what = f"{mesh.cp} does not divide half the sequence {sequence // 2}"
        row = _row("parallel.cp", divisors(sequence // 2), mesh.cp)
        yield Misfit(("parallel", "cp"), what, (row,), "change data.sequence")
    if config.parallel.attention == "heads" and model.heads % (mesh.cp * mesh.tp):
        what = f"{_product(cp=mesh.cp, tp=mesh.tp)} the heads {model.heads}"
        rows = tuple(
            _row(f"parallel.{axis}", divisors(model.heads), mesh.sizes[axis])
            for axis in ("cp", "tp")
        )
        otherwise = 'set parallel.attention = "ring"'
        yield Misfit(("parallel", "cp"), what, rows, otherwise)
    if model.dropout:
        what = "attention over divided sequences has no dropout"
        yield Misfit(("model", "dropout"), what, otherwise="set it to 0, or parallel.cp = 1")


def _layers_divide(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    each, layers = config.parallel.stages_each, config.model.layers
    if mesh.pp == 1 or layers % (mesh.pp * each) == 0:
        return
    rows = {
        "stages": _row("parallel.stages", divisors(layers), each),
        "pp": _row("parallel.pp", divisors(layers), mesh.pp),
    }
    given = "pp" if config.parallel.stages is None else "stages"
    if each == 1:
        rows.pop("stages")
    what = f"{_product(pp=mesh.pp, stages=each)} the layers {layers}"
    yield Misfit(("parallel", given), what, tuple(rows.values()), "change model.layers")


def _product(**sizes: int) -> str:
    """The beginning of a sentence on sizes that do not divide something together."""
    several = {name: size for name, size in sizes.items() if size > 1}
    if len(several) == 1:
        return f"{next(iter(several.values()))} does not divide"
    (one, first), (other, second) = several.items()
    return f"{one} {first} x {other} {second} = {first * second} does not divide"


def _pipeline_settings_fit(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    if mesh.pp == 1:
        return
    if config.parallel.keep in ("nothing", "weights"):
        what = "a pipeline keeps weights and gradients whole within a step"
        otherwise = 'leave it out, or set it to "gradients"'
        yield Misfit(("parallel", "keep"), what, otherwise=otherwise)
    if config.parallel.schedule == "zero-bubble" and config.train.recompute != "none":
        what = "zero-bubble divides the backward pass, so that nothing can be computed again in it"
        otherwise = "leave it out, or change the schedule"
        yield Misfit(("train", "recompute"), what, otherwise=otherwise)


# ------------------------------------------------------------------ with so many processes


def _batch_divides(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    train, data = config.train, mesh.data
    parts = portions(train, parts=data)
    if not isinstance(parts, Problem):
        for path, problem in ramp_broken(train, parts):
            yield Misfit(path, problem.what, otherwise=problem.remedy)
        return
    row: list[Option] = []
    if train.batch is not None and train.batch % data:
        unit = data * (train.micro_batch or 1) * (train.accumulate or 1)
        row = _row("train.batch", _multiples(unit, around=train.batch), train.batch)
    yield Misfit(("train", "batch"), parts.what, (row,) if row else (), parts.remedy)


def _multiples(unit: int, *, around: int) -> list[int]:
    """Multiples of a number, some on each side of another."""
    middle = around // unit
    return [unit * times for times in range(max(1, middle - 1), middle + 4)]


def _reduce_acts(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    if config.precision.reduce is not None and mesh.data * mesh.cp == 1:
        what = f"has no effect with {mesh}: no gradients of data-parallel processes are summed"
        yield Misfit(("precision", "reduce"), what, otherwise="remove it")


def _pipeline_is_fed(config: RunConfig, mesh: Mesh) -> Iterator[Misfit]:
    """Every step, those of a ramp too, must have enough micro-batches for the schedule."""
    train = config.train
    parts = portions(train, parts=mesh.data)
    if mesh.pp == 1 or isinstance(parts, Problem) or any(ramp_broken(train, parts)):
        return
    feed = _Feed(config, mesh, parts)
    if not feed.enough(parts.accumulate):
        what = f"{feed.need}, and there {_are(parts.accumulate)}"
        otherwise = "set train.micro_batch lower, or train.batch higher"
        yield Misfit(("parallel", "schedule"), what, feed.options(), otherwise)
    elif train.ramp is not None:
        sizes = range(train.ramp.start, parts.batch, train.ramp.by)
        hungry = next((n for n in sizes if not feed.enough(n // feed.portion)), None)
        if hungry is not None:
            name = "start" if hungry == train.ramp.start else "by"
            times = hungry // feed.portion
            what = f"{feed.need}, and in the ramp's batch of {hungry} there {_are(times)}"
            rows = (*feed.ramp_options(train.ramp), *feed.options())
            yield Misfit(("train", "ramp", name), what, rows, "leave the ramp out")


def _are(count: int) -> str:
    return f"is {count}" if count == 1 else f"are {count}"


@dataclass(frozen=True)
class _Feed:
    """The micro-batches that a pipeline needs, and how to have them."""

    config: RunConfig
    mesh: Mesh
    parts: Portions

    @property
    def several(self) -> bool:
        return self.config.parallel.schedule in SEVERAL

    @property
    def portion(self) -> int:
        """Samples that all processes together take at once."""
        return self.mesh.data * self.parts.micro_batch

    @property
    def need(self) -> str:
        amount = "a multiple of" if self.several else "at least"
        schedule = self.config.parallel.schedule or "1f1b"
        return f"{schedule} needs {amount} {self.mesh.pp} micro-batches in a step"

    def enough(self, times: int) -> bool:
        return times >= self.mesh.pp and not (self.several and times % self.mesh.pp)

    def options(self) -> tuple[list[Option], ...]:
        """Smaller micro-batches, in terms of what is given; a larger batch for the case that there
        are none."""
        train, data, pp = self.config.train, self.mesh.data, self.mesh.pp
        times, micro = self.parts.accumulate, self.parts.micro_batch
        if train.batch is None:
            more = [n for n in range(times, times + 2 * pp + 1) if self.enough(n)]
            return (_row("train.accumulate", more, times),)
        own = self.parts.batch // data
        smaller = [n for n in divisors(own) if self.enough(own // n)]
        smaller = sorted(smaller, key=lambda n: abs(n - micro))
        finer = [self._divided(size, own // size) for size in smaller]
        micro = train.micro_batch or 1
        unit = data * micro * pp
        larger = [
            {"train.batch": batch, **self._divided(micro, batch // data // micro, new=False)}
            for batch in _multiples(unit, around=self.parts.batch)
        ]
        return finer, larger

    def _divided(self, micro: int, times: int, *, new: bool = True) -> Option:
        """How to say that micro-batches are so large, which may be `new`, and so many."""
        train = self.config.train
        by_size = train.micro_batch is not None if train.accumulate is not None else True
        said = {"train.accumulate": times} if train.accumulate is not None else {}
        if by_size and (new or train.micro_batch is None):
            said["train.micro_batch"] = micro
        return said

    def ramp_options(self, ramp: RampConfig) -> tuple[list[Option], ...]:
        """Other beginnings and increases, one of the two or both."""
        batch, unit = self.parts.batch, self.portion * (self.mesh.pp if self.several else 1)
        least = self.portion * self.mesh.pp
        starts = [n for n in range(batch - ramp.by, 0, -ramp.by) if n >= least and n % unit == 0]
        increases = [n for n in divisors(batch - ramp.start) if n % unit == 0]
        multiples = [n for n in range(unit, batch, unit) if n >= least]
        both = [
            {"train.ramp.start": start, "train.ramp.by": by}
            for start in sorted(multiples, key=lambda n: abs(n - ramp.start))[:8]
            for by in sorted(divisors(batch - start), key=lambda n: abs(n - ramp.by))
            if by % unit == 0
        ]
        return (
            _row("train.ramp.by", increases, ramp.by),
            _row("train.ramp.start", starts, ramp.start)[:8],
            both,
        )


_GIVEN: tuple[Rule, ...] = (
    _settings_act,
    _tensor_divides,
    _context_divides,
    _layers_divide,
    _pipeline_settings_fit,
)

_COUNTED: tuple[Rule, ...] = (_batch_divides, _pipeline_is_fed, _reduce_acts)


def ramp_broken(train: TrainConfig, parts: Portions) -> Iterator[Broken]:
    """What is wrong with a ramp in itself and with the portions of its batches."""
    ramp, batch = train.ramp, parts.batch
    if ramp is None:
        return
    if (ramp.over if isinstance(ramp.over, float) else ramp.over.amount) == 0:
        yield ("train", "ramp", "over"), Problem("must be above 0", remedy="or leave the ramp out")
    if ramp.start >= batch:
        what = f"{ramp.start} is not below the full batch {batch}"
        remedy = "the batch grows from train.ramp.start to train.batch"
        yield ("train", "ramp", "start"), Problem(what, remedy=remedy)
        return
    growth = batch - ramp.start
    if growth % ramp.by:
        what = f"growing by {ramp.by}, a batch of {ramp.start} never becomes {batch}"
        remedy = f"by could be {nearest(divisors(growth), ramp.by)}"
        yield ("train", "ramp", "by"), Problem(what, remedy=remedy)
        return
    yield from _not_in_portions(train, ramp, parts)


def _not_in_portions(train: TrainConfig, ramp: RampConfig, parts: Portions) -> Iterator[Broken]:
    common, micro = math.gcd(ramp.start, ramp.by), parts.micro_batch
    ranks = parts.batch // (micro * parts.accumulate)
    sizes = range(ramp.start, parts.batch, ramp.by)
    if common % ranks:
        odd = next(n for n in sizes if n % ranks)
        what = f"the ramp's batch of {odd} cannot be divided among {ranks} data-parallel processes"
        name = "start" if odd == ramp.start else "by"
        remedy = f"start and by could be multiples of {ranks}"
        yield ("train", "ramp", name), Problem(what, remedy=remedy)
    elif common % (ranks * micro):
        odd = next(n for n in sizes if n % (ranks * micro))
        each, be = f"the ramp's batch of {odd}", "is"
        if ranks > 1:
            each, be = f"each process's {odd // ranks} samples of {each}", "are"
        fitting = divisors(common // ranks)
        if train.micro_batch is not None:
            name, choices = "micro_batch", nearest(fitting, micro)
        else:
            name = "accumulate"
            own = parts.batch // ranks
            choices = nearest([own // size for size in fitting], parts.accumulate)
        what = f"{each} {be} not a multiple of micro_batch {micro}"
        yield ("train", name), Problem(what, remedy=f"{name} could be {choices}")
