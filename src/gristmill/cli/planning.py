"""What `plan` and `launch` plan for: a run, a kind of devices and how many of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.units import parse_seconds
from gristmill.config.parallel import build_mesh
from gristmill.config.resolve import divisors, leaves_micro_batch, portions, resolve
from gristmill.config.schema import RunConfig
from gristmill.plan.calibration import Calibration, calibrated, read_calibrations, this_machine
from gristmill.plan.costs import Cost, run_cost
from gristmill.plan.hardware import Hardware, on_network, open_hardware, open_link
from gristmill.plan.layouts import LayoutPlan, on_device, plan_layout, with_batch
from gristmill.tokens.store import TokensNotFoundError

_ASSUMED = 50257
"""The vocabulary of a run that does not say."""


@dataclass(frozen=True)
class PlanRequest:
    """What is planned, and for what."""

    config: RunConfig
    hardware: Hardware
    gpus: int
    price: float | None
    vocab: int
    tokens: int
    """To the horizon."""
    notes: tuple[str, ...]

    def cost(self, layout: LayoutPlan) -> Cost:
        return run_cost(
            layout.step,
            tokens=self.tokens,
            devices=self.gpus,
            hardware=self.hardware,
            price=self.price,
        )


def plan_request(
    config: RunConfig,
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    per_node: int | None = None,
    link: str | None = None,
) -> PlanRequest:
    """A run on some devices; what is not given is that of `launch.gpu`, or else of this machine."""
    where = "--gpu"
    if gpu is None and config.launch is not None and config.launch.gpu is not None:
        gpu, where = config.launch.gpu, "launch.gpu"
        gpus, per_node = gpus or config.launch.processes, per_node or config.launch.each
    hardware, devices = this_machine() if gpu is None else (open_hardware(gpu, where=where), 1)
    gpus = gpus or devices
    notes = []
    calibration = read_calibrations().get(hardware.name)
    if calibration is not None:
        hardware = calibrated(hardware, calibration)
        notes.append(_calibration_note(calibration))
    chosen = None if link is None else open_link(link)
    hardware = on_network(hardware, per_node=per_node, link=chosen)
    config = on_device(config, hardware)
    vocab, note = _vocabulary(config)
    notes += [note] if note else []
    if config.precision.compute == "fp32" and hardware.device != "cpu":
        notes.append('precision.compute is fp32: "bf16" is faster and needs less memory')
    tokens = _horizon(with_batch(config, gpus), vocab)
    return PlanRequest(config, hardware, gpus, hardware.price, vocab, tokens, tuple(notes))


def own_layout(request: PlanRequest) -> LayoutPlan | Problem:
    """The layout that the run file says, or why it cannot be. A micro-batch that it leaves open is
    the largest that fits, as in the run itself."""
    config = request.config
    mesh = build_mesh(config.parallel, request.gpus)
    if isinstance(mesh, Problem):
        return mesh
    parts = portions(config.train, parts=mesh.data)
    if isinstance(parts, Problem):
        return replace(parts, what=f"{mesh}: {parts.what}")
    own = parts.batch // mesh.data
    sizes = reversed(divisors(own)) if leaves_micro_batch(config.train) else [parts.micro_batch]
    layouts = (
        plan_layout(
            config,
            mesh,
            request.hardware,
            vocab=request.vocab,
            micro_batch=size,
            recompute=config.train.recompute,
        )
        for size in sizes
        if size <= parts.micro_batch
    )
    first = next(layouts)
    return next((layout for layout in chain([first], layouts) if layout.fits), first)


def parse_hours(text: str, *, where: str) -> float:
    """Seconds of a time such as "24", which are hours, or "3d"."""
    if text.replace(".", "", 1).isdigit():
        return float(text) * 3600
    try:
        return parse_seconds(text)
    except UserError as error:
        remedy = 'write hours, such as 24, or a time such as "3d" or "1h30m"'
        what = f"{text!r} is not a time"
        raise UserError(what, where=where, remedy=remedy, exit=Exit.USAGE) from error


def _calibration_note(calibration: Calibration) -> str:
    return f"speeds are those measured on {calibration.device} on {calibration.when[:10]}"


def _horizon(config: RunConfig, vocab: int) -> int:
    """Tokens of the whole run."""
    resolved = resolve(config, vocab=vocab)
    return resolved.samples * resolved.sequence


def _vocabulary(config: RunConfig) -> tuple[int, str | None]:
    """The size of the vocabulary, and a note if it is a guess."""
    if config.model.vocab is not None:
        return config.model.vocab, None
    from gristmill.data.conversations import open_chat
    from gristmill.data.dataset import open_data

    guess = f"vocabulary of {_ASSUMED:,} assumed: "
    try:
        data = config.data.model_copy(update={"in_memory": False})
        if data.kind == "chat":
            return open_chat(config).tokenizer.size, None
        first = open_data(data, sequence=data.sequence or config.model.context).train.splits[0]
        size = first.reader.info.vocab_size
        return (_ASSUMED, f"{guess}the token files do not say") if size is None else (size, None)
    except TokensNotFoundError:
        return _ASSUMED, f"{guess}the token files are not there yet"
    except DataError as error:
        return _ASSUMED, f"{guess}{error.problems[0].what}"
