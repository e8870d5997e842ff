"""`plan`: every layout of a run on some devices, with memory, time and cost, before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.base.errors import Problem, UserError
from gristmill.base.files import write_atomic
from gristmill.base.units import described_span, format_bytes, format_count
from gristmill.cli.options import AsJson, Overrides
from gristmill.cli.planning import (
    PlanRequest,
    own_layout,
    parse_hours,
    plan_request,
)
from gristmill.config.load import load_run, load_text
from gristmill.config.parallel import Mesh
from gristmill.hub.downloads import settings_folder
from gristmill.plan.calibration import (
    write_calibration,
)
from gristmill.plan.hardware import open_hardware
from gristmill.plan.layouts import (
    LayoutPlan,
    LayoutPlans,
    plan_layouts,
    with_batch,
)
from gristmill.plan.run_file import with_settings
from gristmill.plan.step import PARTS
from gristmill.plan.timing import planned_work

_ASSUMED = 50257
_REASONS = 6
"""Reasons against layouts that are printed."""
_WORDS = {
    "products": "matrix products",
    "tensor_communication": "waiting for tp",
    "data_communication": "waiting for dp",
    "pipeline_communication": "waiting between stages",
    "bubble": "pipeline bubble",
    "launches": "starting kernels",
}


def plan(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="The run file, or a run folder.")
    ] = None,
    settings: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Devices; those of this machine if not given.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help='Their kind, such as "h100-80gb"; this machine\'s if not given.'),
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices in a node; as such nodes usually have.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help='Network between nodes: a name such as "hdr200", or Gbit/s per device.'),
    ] = None,
    hours: Annotated[
        str | None, typer.Option(metavar="TIME", help='Time there is, such as "24" hours or "3d".')
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Money there is, in dollars.")] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Dollars for a device and hour; else a list price.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts that are shown.")] = 10,
    what: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show layout N in full.")
    ] = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Put layout N of --what, or the first, into the run file."),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine, and plan with that from then on."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Will it fit, how fast will it be, what will it cost, and in which layout.

    Needs no GPU, no network and no token files. All figures are planned from formulas and from the
    published speed of each kind of device.
    """
    if calibrate:
        _calibrate()
    if run is None:
        if calibrate:
            return
        raise UserError("give a run file, or --calibrate", where="plan")
    config = load_run(run, settings or (), find_model=settings_folder)
    asked = plan_request(config, gpus=gpus, gpu=gpu, per_node=per_node, link=link)
    if price is not None:
        asked = replace(asked, price=price)
    plans = plan_layouts(asked.config, gpus=asked.gpus, hardware=asked.hardware, vocab=asked.vocab)
    chosen = _chosen(plans, what)
    if as_json:
        typer.echo(json.dumps(_as_json(asked, plans, top=top), indent=2))
    elif what is not None and chosen is not None:
        typer.echo("\n".join(_in_full(asked, chosen, what)))
    else:
        typer.echo("\n".join(_table(asked, plans, top=top)))
        limits = list(_limits(asked, plans, hours=hours, budget=budget))
        typer.echo("\n".join(["", *limits]) if limits else "", nl=bool(limits))
    if chosen is None and not as_json:
        raise _nothing_fits(asked, plans)
    if write and chosen is not None:
        _write(run, asked, chosen, quiet=as_json)


def _calibrate() -> None:
    """Measure this machine and keep the figures."""
    from gristmill.bench.calibrate import measure_machine, slower_than_kind

    measured = measure_machine()
    usual = open_hardware(measured.kind)
    file = write_calibration(measured)
    typer.echo(f"{measured.device}, as {measured.kind}; kept in {file}")
    typer.echo(f"  {'':<28}{'here':>12}{'table':>12}")
    for name, value in measured.rates.items():
        typer.echo(f"  {name:<28}{value:>12.3g}{getattr(usual.rates, name):>12.3g}")
    if measured.memory_bandwidth:
        table = usual.memory_bandwidth * usual.rates.memory_share
        typer.echo(
            f"  {'memory, GB/s':<28}{measured.memory_bandwidth / 1e9:>12.3g}{table / 1e9:>12.3g}"
        )
    for doubt in slower_than_kind(measured, usual):
        typer.echo(f"warning: slower than its kind: {doubt}", err=True)


def _chosen(plans: LayoutPlans, what: int | None) -> LayoutPlan | None:
    number = 1 if what is None else what
    if what is not None and number > len(plans.layouts):
        raise UserError(f"there are {len(plans.layouts)} layouts that fit", where=f"--what {what}")
    return plans.layouts[number - 1] if plans.layouts else None


def _nothing_fits(asked: PlanRequest, plans: LayoutPlans) -> UserError:
    what = f"no layout of this run fits on {asked.gpus} x {asked.hardware.name}"
    remedy = "see above which sizes are refused"
    if plans.too_large:
        least = plans.too_large[0]
        remedy = (
            f"the least is {format_bytes(least.memory.total)} ({least.described}, micro-batch "
            f"{least.micro_batch}, recompute {least.recompute}): more devices, or larger ones"
        )
    return UserError(what, remedy=remedy)


# ------------------------------------------------------------------ the table


def _table(asked: PlanRequest, plans: LayoutPlans, *, top: int) -> Iterator[str]:
    yield from _header(asked)
    if plans.layouts:
        yield ""
        yield from _rows(asked, _best_of_meshes(plans)[:top])
        yield ""
        count = len(plans.layouts)
        yield (
            f"{count:,} layouts fit; shown is the best micro-batch and recomputation of each mesh. "
            "--what N shows one in full, --write puts one into the run file."
        )
    yield _own_layout(asked)
    yield from _against(plans)


def _header(asked: PlanRequest) -> Iterator[str]:
    config, hardware = asked.config, asked.hardware
    work = planned_work(
        with_batch(config, asked.gpus),
        Mesh(),
        hardware,
        vocab=asked.vocab,
        micro_batch=1,
        recompute="none",
    )
    amount = format_count(work.batch * work.sequence)
    yield (
        f"{config.name}: {format_count(work.shape.parameters)} parameters, "
        f"{work.batch} samples of {work.sequence} tokens a step ({amount}), "
        f"{format_count(asked.tokens)} tokens in all"
    )
    nodes = -(-asked.gpus // hardware.per_node)
    links = f"{hardware.inside.name} inside" + (f", {hardware.between.name} between" * (nodes > 1))
    yield (
        f"{asked.gpus} x {hardware.name}, {format_bytes(hardware.memory)} each, "
        f"{nodes} {'node' if nodes == 1 else 'nodes'}: {links}"
    )
    yield from (f"note: {note}" for note in asked.notes)


_COLUMNS = (
    *("", "layout", "micro", "recompute", "memory", "step", "tokens/s", "MFU", "time"),
    *("GPU-hours", "money", "kWh"),
)


def _rows(asked: PlanRequest, layouts: list[tuple[int, LayoutPlan]]) -> Iterator[str]:
    rows = [_COLUMNS, *(_row(asked, number, layout) for number, layout in layouts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        cells = (
            text.ljust(width) if column in (1, 3) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _row(asked: PlanRequest, number: int, layout: LayoutPlan) -> tuple[str, ...]:
    step, cost = layout.step, asked.cost(layout)
    return (
        str(number),
        layout.described,
        str(layout.micro_batch),
        layout.recompute,
        format_bytes(layout.memory.total),
        _short(step.seconds),
        format_count(step.tokens_per_second),
        f"{step.mfu:.1%}",
        described_span(cost.seconds),
        format_count(cost.device_hours),
        "-" if cost.money is None else f"${format_count(cost.money)}",
        format_count(cost.kwh),
    )


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _best_of_meshes(plans: LayoutPlans) -> list[tuple[int, LayoutPlan]]:
    """The first layout of every mesh, with its number in the ranking."""
    best: dict[str, tuple[int, LayoutPlan]] = {}
    for number, layout in enumerate(plans.layouts, 1):
        best.setdefault(str(layout.mesh), (number, layout))
    return list(best.values())


def _own_layout(asked: PlanRequest) -> str:
    """What the run file says now."""
    layout = own_layout(asked)
    if isinstance(layout, Problem):
        return f"As the run file says: {layout.what}."
    how = f"{layout.described}, micro-batch {layout.micro_batch}, recompute {layout.recompute}"
    if not layout.fits:
        return f"As the run file says, {how}: {layout.why_not}."
    cost = asked.cost(layout)
    return (
        f"As the run file says, {how}: {format_bytes(layout.memory.total)}, "
        f"{_short(layout.step.seconds)} a step, {described_span(cost.seconds)}."
    )


def _against(plans: LayoutPlans) -> Iterator[str]:
    """Why other layouts do not fit, or cannot be."""
    if plans.too_large:
        yield "\ndoes not fit even with full recomputation and one sample at a time:"
        for layout in plans.too_large[:_REASONS]:
            yield f"  {layout.described}: {layout.why_not}"
        yield from _more(len(plans.too_large))
    if plans.refused:
        yield "\ncannot be:"
        for refusal in plans.refused[:_REASONS]:
            yield f"  {refusal.what}: {refusal.why}"
        yield from _more(len(plans.refused))


def _more(count: int) -> Iterator[str]:
    if count > _REASONS:
        yield f"  and {count - _REASONS} more"


def _limits(
    asked: PlanRequest, plans: LayoutPlans, *, hours: str | None, budget: float | None
) -> Iterator[str]:
    """What time and money are enough for."""
    if not plans.layouts:
        return
    best = plans.layouts[0]
    cost = asked.cost(best)
    if hours is not None:
        there = parse_hours(hours, where="--hours")
        yield _enough(asked, f"in {described_span(there)}", there / cost.seconds)
    if budget is not None:
        if cost.money is None:
            what = f"there is no price of {asked.hardware.name}"
            raise UserError(what, where="--budget", remedy="give --price")
        yield _enough(asked, f"for ${budget:,.0f}", budget / max(cost.money, 1e-9))


def _enough(asked: PlanRequest, limit: str, share: float) -> str:
    if share >= 1:
        return f"{limit}: enough, {1 / share:.0%} of it is needed"
    reached = format_count(share * asked.tokens)
    more = "" if "$" in limit else f"; about {asked.gpus / share:,.0f} devices would be needed"
    return f"{limit}: not enough, the first layout reaches {reached} tokens, {share:.0%}{more}"


# ------------------------------------------------------------------ one layout


def _in_full(asked: PlanRequest, layout: LayoutPlan, number: int) -> Iterator[str]:
    yield from _header(asked)
    yield ""
    yield f"layout {number}: {layout.described}, micro-batch {layout.micro_batch}"
    for setting, value in layout.settings.items():
        if value is not None:
            yield f"  {setting} = {json.dumps(value)}"
    yield f"\nmemory of the process that needs most, largest at {layout.memory.moment}"
    total = layout.memory.total
    for kind, amount in layout.memory.parts.items():
        yield f"  {kind:<24}{format_bytes(amount):>10}  {_bar(amount / total)}"
    yield f"  {'together':<24}{format_bytes(total):>10}"
    yield "\nover a step"
    for moment, amount in layout.memory.timeline:
        yield f"  {moment:<24}{format_bytes(amount):>10}  {_bar(amount / total)}"
    yield "\ntime of a step"
    for part in PARTS:
        seconds = layout.step.parts[part]
        if seconds > 0:
            share = seconds / layout.step.seconds
            yield f"  {_WORDS.get(part, part):<24}{_short(seconds):>10}  {_bar(share)}"
    yield f"  {'together':<24}{_short(layout.step.seconds):>10}"
    cost = asked.cost(layout)
    money = "" if cost.money is None else f", ${format_count(cost.money)}"
    day = format_count(layout.step.tokens_per_second * 86400)
    yield (
        f"\n{format_count(layout.step.tokens_per_second)} tokens/s, {day} a day, MFU "
        f"{layout.step.mfu:.1%}; to the horizon {described_span(cost.seconds)}, "
        f"{format_count(cost.device_hours)} GPU-hours{money}, {format_count(cost.kwh)} kWh"
    )


def _bar(share: float) -> str:
    return "#" * round(40 * share)


# ------------------------------------------------------------------ JSON and the run file


def _as_json(asked: PlanRequest, plans: LayoutPlans, *, top: int) -> dict[str, Any]:
    hardware = asked.hardware
    return {
        "run": asked.config.name,
        "gpus": asked.gpus,
        "gpu": hardware.name,
        "per_node": hardware.per_node,
        "link": hardware.between.name,
        "tokens": asked.tokens,
        "notes": list(asked.notes),
        "fitting": len(plans.layouts),
        "layouts": [
            _layout_json(asked, number, layout)
            for number, layout in enumerate(plans.layouts[: max(top, 1)], 1)
        ],
        "too_large": [
            {"layout": layout.mesh.sizes, "why": layout.why_not} for layout in plans.too_large
        ],
        "refused": [{"what": refusal.what, "why": refusal.why} for refusal in plans.refused],
    }


def _layout_json(asked: PlanRequest, number: int, layout: LayoutPlan) -> dict[str, Any]:
    cost = asked.cost(layout)
    return {
        "rank": number,
        **layout.mesh.sizes,
        "keep": layout.variant.keep,
        "schedule": layout.variant.schedule,
        "micro_batch": layout.micro_batch,
        "recompute": layout.recompute,
        "memory": {**layout.memory.parts, "total": layout.memory.total},
        "timeline": [list(moment) for moment in layout.memory.timeline],
        "seconds": layout.step.seconds,
        "parts": layout.step.parts,
        "tokens_per_second": layout.step.tokens_per_second,
        "tokens_per_day": layout.step.tokens_per_second * 86400,
        "mfu": layout.step.mfu,
        "days": cost.seconds / 86400,
        "device_hours": cost.device_hours,
        "dollars": cost.money,
        "kwh": cost.kwh,
        "settings": {name: value for name, value in layout.settings.items() if value is not None},
    }


def _write(run: Path, asked: PlanRequest, layout: LayoutPlan, *, quiet: bool) -> None:
    """Put a layout into the run file, if the file is still right then."""
    file = run / "run.toml" if run.is_dir() else run
    text = file.read_text(encoding="utf-8")
    changes: dict[str, object] = dict(layout.settings)
    changes["parallel.dp_replicate"] = None
    changes["train.accumulate"] = None
    if asked.config.train.batch is None:
        # Of micro-batches of each process: the step's batch is to stay what it is.
        changes["train.batch"] = with_batch(asked.config, asked.gpus).train.batch
    made = with_settings(text, changes, where=file)
    loaded = load_text(made, (), place=str(file), find_model=settings_folder)
    if loaded.train.recompute != layout.recompute:
        # A preset says otherwise.
        made = with_settings(made, {"train.recompute": layout.recompute}, where=file)
        load_text(made, (), place=str(file), find_model=settings_folder)
    write_atomic(file, made)
    if not quiet:
        typer.echo(f"\nwritten to {file}: {layout.described}, micro-batch {layout.micro_batch}")
