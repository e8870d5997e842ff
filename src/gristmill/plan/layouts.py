"""All layouts of a run on a number of devices: which fit, how fast they are, and why others do not.

A layout is a mesh of processes, what sharding keeps whole, a micro-batch and a recomputation mode.

    tp          divides heads, inner width and the devices of a node
    cp          parts of at least 2,048 tokens
    pp          divides the layers; the micro-batches of a step are at least as many
    dp_shard    none, what is left of a node, or all that is left; dp_replicate is the rest
    keep        nothing, or gradients and weights
    schedule    1f1b, or interleaved with two groups of layers on each device
    micro       samples, of which each process's part of the batch is a multiple

What the settings' own rules refuse (config/layouts.py) is refused here in their words. Of two
layouts that are equally fast within 1 %, the one that needs less memory comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import format_bytes
from gristmill.config.layouts import layout_problems, xla_fits
from gristmill.config.model import Ability
from gristmill.config.parallel import SEVERAL, Mesh, build_mesh
from gristmill.config.resolve import divisors, portions, with_formats
from gristmill.config.schema import RunConfig
from gristmill.plan.hardware import Hardware
from gristmill.plan.memory import MemoryPlan, plan_memory
from gristmill.plan.shape import planned_model
from gristmill.plan.timing import StepPlan, plan_step, planned_batch

RECOMPUTES = ("none", "selective", "full")
MOST_MICRO = 64
FINE, COARSE = 1.5, 2.0
"""Micro-batches that are nearer to each other than this factor are not all tried."""
MANY = 120
"""From so many meshes on, micro-batches are tried in coarse steps."""
LEAST_PART = 2048
"""Tokens of a part of a sequence below which cp is not tried."""
HEADROOM = 0.02
"""The part of a device's memory that a plan leaves alone."""
EQUAL = 0.01
"""Layouts whose speeds differ by less are ranked by memory."""


_NEEDED = {"sequence": "tp", "attention": "cp", "schedule": "pp", "stages": "pp"}
"""Settings that have no effect unless an axis is above 1."""


@dataclass(frozen=True)
class Variant:
    """How a mesh is used, in the words of `[parallel]`; None where a setting is left out."""

    keep: str | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class LayoutPlan:
    """One layout, with what it needs and how fast it is."""

    mesh: Mesh
    variant: Variant
    micro_batch: int
    recompute: str
    memory: MemoryPlan
    step: StepPlan
    fits: bool
    why_not: str | None = None

    @property
    def settings(self) -> dict[str, object]:
        """What a run file has to say to be laid out like this; None where a setting is left out."""
        sizes: dict[str, object] = {
            f"parallel.{axis}": size if size > 1 else None
            for axis, size in self.mesh.sizes.items()
            if axis != "dp_replicate"
        }
        unused = {
            f"parallel.{name}": None for name, axis in _NEEDED.items() if self.mesh.sizes[axis] == 1
        }
        return {
            **sizes,
            **unused,
            "parallel.keep": self.variant.keep,
            "parallel.schedule": self.variant.schedule,
            "train.micro_batch": self.micro_batch,
            "train.recompute": None if self.recompute == "none" else self.recompute,
        }

    @property
    def described(self) -> str:
        """In words, for a table."""
        keep = f", keep {self.variant.keep}" if self.variant.keep else ""
        schedule = f", {self.variant.schedule}" if self.variant.schedule else ""
        return f"{self.mesh}{keep}{schedule}"


@dataclass(frozen=True)
class Refusal:
    """Layouts that cannot be, or do not fit."""

    what: str
    """Which."""
    why: str


@dataclass(frozen=True)
class LayoutPlans:
    """All layouts on some devices, the best first."""

    hardware: Hardware
    gpus: int
    layouts: tuple[LayoutPlan, ...]
    """Those that fit."""
    too_large: tuple[LayoutPlan, ...]
    """Of meshes that do not fit, what needs least; least first."""
    refused: tuple[Refusal, ...]
    """Sizes that the settings' rules refuse."""


def plan_layouts(
    config: RunConfig, *, gpus: int, hardware: Hardware, per_node: int | None = None, vocab: int
) -> LayoutPlans:
    """Every layout of a run on some devices."""
    if per_node is not None:
        hardware = replace(hardware, per_node=per_node)
    config = with_batch(on_device(config, hardware), gpus)
    search = _Search(config, gpus, hardware, vocab)
    fitting, too_large = [], []
    meshes = list(search.meshes())
    step = FINE if len(meshes) < MANY else COARSE
    for mesh, variant in meshes:
        found = list(search.of_mesh(mesh, variant, step=step))
        fitting += [layout for layout in found if layout.fits]
        if found and not any(layout.fits for layout in found):
            too_large.append(min(found, key=lambda layout: layout.memory.total))
    fitting.sort(key=lambda layout: layout.step.seconds)
    too_large.sort(key=lambda layout: layout.memory.total)
    refused = tuple(Refusal(what, why) for what, why in search.refused.items())
    return LayoutPlans(hardware, gpus, tuple(_ranked(fitting)), tuple(too_large), refused)


def with_batch(config: RunConfig, gpus: int) -> RunConfig:
    """The settings with the batch of a step as a number: it stays the same in every layout, even
    where a run file gives it as micro-batches of each process."""
    mesh = build_mesh(config.parallel, gpus)
    parts = portions(config.train, parts=None if isinstance(mesh, Problem) else mesh.data)
    batch = config.train.batch if isinstance(parts, Problem) else parts.batch
    changes = {"batch": batch, "micro_batch": None, "accumulate": None}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def on_device(config: RunConfig, hardware: Hardware) -> RunConfig:
    """The settings on a kind of device; refuses what cannot run there."""
    runtime = config.runtime.model_copy(update={"device": hardware.device})
    made = with_formats(
        config.model_copy(update={"runtime": runtime}),
        has_bf16=hardware.has_bf16,
        on_gpu=hardware.device == "cuda",
    )
    problems = list(xla_fits(made))
    if made.precision.fp8 and hardware.device == "cuda" and not hardware.has_fp8:
        what = f"{hardware.name} has no products in fp8, which precision.fp8 asks for"
        problems.append(Problem(what, remedy="leave precision.fp8 out, or choose another device"))
    if problems:
        raise UserError(problems[0].what, where=f"--gpu {hardware.name}", remedy=problems[0].remedy)
    return made


def plan_layout(
    config: RunConfig,
    mesh: Mesh,
    hardware: Hardware,
    *,
    vocab: int,
    micro_batch: int,
    recompute: str,
) -> LayoutPlan:
    """One layout, with the other settings as they are."""
    common = {"vocab": vocab, "micro_batch": micro_batch, "recompute": recompute}
    step = plan_step(config, mesh, hardware, **common)  # type: ignore[arg-type]
    memory = _largest_stage(config, mesh, hardware, **common)  # type: ignore[arg-type]
    room = hardware.memory * (1 - HEADROOM)
    why = None
    if memory.total > room:
        kind = max(memory.parts, key=lambda name: memory.parts[name])
        why = (
            f"needs {format_bytes(memory.total)} of {format_bytes(room)}, most of it {kind} "
            f"({format_bytes(memory.parts[kind])})"
        )
    variant = Variant(config.parallel.keep, config.parallel.schedule)
    return LayoutPlan(mesh, variant, micro_batch, recompute, memory, step, why is None, why)


def _largest_stage(
    config: RunConfig,
    mesh: Mesh,
    hardware: Hardware,
    *,
    vocab: int,
    micro_batch: int,
    recompute: str,
) -> MemoryPlan:
    """The memory of the stage that needs most: the first, which has most micro-batches in flight,
    or the last, which has the head."""
    plans = [
        plan_memory(
            config,
            mesh,
            vocab=vocab,
            micro_batch=micro_batch,
            recompute=recompute,
            stage=stage,
        )
        for stage in sorted({0, mesh.pp - 1})
    ]
    return max(plans, key=lambda plan: plan.total)


def _ranked(layouts: list[LayoutPlan]) -> Iterator[LayoutPlan]:
    """By speed, and by memory among those that are as fast as the first of them."""
    start = 0
    while start < len(layouts):
        limit = layouts[start].step.seconds * (1 + EQUAL)
        end = start
        while end < len(layouts) and layouts[end].step.seconds <= limit:
            end += 1
        yield from sorted(layouts[start:end], key=lambda layout: layout.memory.total)
        start = end


@dataclass(frozen=True)
class _Search:
    """What is tried for one run."""

    config: RunConfig
    gpus: int
    hardware: Hardware
    vocab: int

    @cached_property
    def refused(self) -> dict[str, str]:
        """Sizes that cannot be, and why; filled by `meshes`."""
        return {}

    def meshes(self) -> Iterator[tuple[Mesh, Variant]]:
        """Meshes that the rules allow, and how they can be used."""
        model, per_node = planned_model(self.config.model), self.hardware.per_node
        sequence = self.config.data.sequence or self.config.model.context
        for tp in self._allowed("tp", divisors(self.gpus), at_most=per_node):
            parts = [cp for cp in divisors(self.gpus // tp) if sequence // cp >= LEAST_PART]
            for cp in self._allowed("cp", parts or [1], tp=tp):
                rest = self.gpus // (tp * cp)
                stages = [pp for pp in divisors(rest) if pp <= model.layers]
                for pp in self._allowed("pp", stages, tp=tp, cp=cp):
                    yield from self._data(pp, cp, tp)

    def _data(self, pp: int, cp: int, tp: int) -> Iterator[tuple[Mesh, Variant]]:
        left = self.gpus // (pp * cp * tp)
        inside = max(1, self.hardware.per_node // (cp * tp))
        sizes = {1, left, *([inside] if left % inside == 0 else [])}
        if self.config.parallel.decentralized:
            sizes -= {left} if left > 1 else set()
        for shard in sorted(sizes):
            mesh = Mesh(pp, left // shard, shard, cp, tp)
            for variant in self._variants(mesh):
                if self._accepts(mesh, variant):
                    yield mesh, variant

    def _variants(self, mesh: Mesh) -> list[Variant]:
        asked = self.config.parallel.schedule
        if mesh.pp == 1:
            keeps = (None, "gradients") if mesh.dp_shard > 1 else (None,)
            return [Variant(keep) for keep in keeps]
        if asked is not None:
            return [Variant(schedule=asked)]
        even = planned_model(self.config.model).layers % (2 * mesh.pp) == 0
        return [Variant(), Variant(schedule="interleaved")] if even else [Variant()]

    def _allowed(
        self, axis: str, sizes: list[int], *, at_most: int | None = None, **others: int
    ) -> Iterator[int]:
        """Sizes of an axis that the rules allow beside those of other axes."""
        abilities = {"tp": Ability.TENSOR, "cp": Ability.CONTEXT, "pp": Ability.PIPELINE}
        if abilities[axis] not in self.config.model.abilities and len(sizes) > 1:
            kind = self.config.model.kind
            self.refused.setdefault(
                f"{axis} above 1", f"needs {abilities[axis]}, which {kind} models do not have"
            )
            sizes = [1]
        if self.hardware.device == "xla" and axis in ("pp", "cp"):
            sizes = [1]
        for size in sizes:
            if at_most is not None and size > at_most:
                why = f"collectives of every layer would leave the node of {at_most}"
                self.refused.setdefault(f"{axis} above {at_most}", why)
                return
            if size == 1:
                yield size
                continue
            if at_most is not None and at_most % size:
                self.refused.setdefault(f"{axis} {size}", f"does not divide a node of {at_most}")
                continue
            made = Mesh(**{axis: size, **others})
            config = self.laid_out(made, Variant())
            path = f"parallel.{axis}"
            problems = [one for one in layout_problems(config) if _about(one.where, path)]
            if problems:
                self.refused.setdefault(f"{axis} {size}", problems[0].what)
            else:
                yield size

    def _accepts(self, mesh: Mesh, variant: Variant) -> bool:
        config = self.laid_out(mesh, variant)
        batch = self.config.train.batch
        assert batch is not None
        if batch % mesh.data:
            what = f"{mesh.data} parts of the batch"
            self.refused.setdefault(what, f"do not divide the batch of {batch} samples")
            return False
        if mesh.pp > 1 and batch // mesh.data < mesh.pp:
            why = f"needs at least {mesh.pp} micro-batches in a step, and has {batch // mesh.data}"
            self.refused.setdefault(f"pp {mesh.pp} with {mesh.data} parts of the batch", why)
            return False
        bad = ("parallel.gossip", "runtime.device", "model.")
        for problem in layout_problems(config):
            if str(problem.where or "").startswith(bad):
                self.refused.setdefault(str(mesh), problem.what)
                return False
        return True

    def laid_out(self, mesh: Mesh, variant: Variant) -> RunConfig:
        """The settings with a mesh's sizes; those without effect on it are left out."""
        parallel = self.config.parallel
        changes: dict[str, object] = {
            **mesh.sizes,
            "keep": variant.keep,
            "schedule": variant.schedule,
            **{name: None for name, axis in _NEEDED.items() if mesh.sizes[axis] == 1},
        }
        return self.config.model_copy(update={"parallel": parallel.model_copy(update=changes)})

    def of_mesh(self, mesh: Mesh, variant: Variant, *, step: float) -> Iterator[LayoutPlan]:
        """A mesh with every micro-batch and recomputation that fits, and the smallest of those that
        do not."""
        config = self.laid_out(mesh, variant)
        for recompute in RECOMPUTES:
            if recompute != "none" and config.parallel.schedule == "zero-bubble":
                continue
            if recompute != "none" and config.train.recompute == "none":
                # A setting for every n-th block needs a mode to be of.
                config = config.model_copy(
                    update={"train": config.train.model_copy(update={"recompute_every": None})}
                )
            for micro in self.micro_batches(config, mesh, step=step):
                layout = plan_layout(
                    config,
                    mesh,
                    self.hardware,
                    vocab=self.vocab,
                    micro_batch=micro,
                    recompute=recompute,
                )
                yield layout
                if not layout.fits:
                    break

    def micro_batches(self, config: RunConfig, mesh: Mesh, *, step: float) -> list[int]:
        """Samples at once that divide a process's part of the batch."""
        own = planned_batch(config, mesh, micro_batch=1) // mesh.data
        ramp = config.train.ramp
        several = config.parallel.schedule in SEVERAL

        def allowed(micro: int) -> bool:
            count = own // micro
            unit = micro * mesh.data
            if ramp is not None and (ramp.start % unit or ramp.by % unit):
                return False
            return mesh.pp == 1 or (count >= mesh.pp and not (several and count % mesh.pp))

        sizes = [micro for micro in divisors(own) if micro <= MOST_MICRO and allowed(micro)]
        kept = sizes[-1:]
        for micro in reversed(sizes[:-1]):
            if kept[-1] >= step * micro:
                kept.append(micro)
        return sorted({*kept, *sizes[:1]})


def _about(where: object, path: str) -> bool:
    """Whether a problem comes from a size of this axis."""
    place = str(where or "")
    return place == path or (not place.startswith("parallel.") and place != "parallel")
