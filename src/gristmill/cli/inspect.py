"""`config`, `report` and `doctor`: looking at settings, runs and machines.

`replay`: compute a step again.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gristmill.base.errors import Exit, UserError, on_one_line
from gristmill.base.exits import follow_supervisor
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.options import Overrides
from gristmill.cli.progress import ProgressLine
from gristmill.config.file_schema import run_file_schema
from gristmill.config.load import dump_run, load_preset, load_run, preset_names
from gristmill.config.lora import LinearShape
from gristmill.config.model import GPTConfig
from gristmill.config.resolve import Resolved, resolve
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig
from gristmill.hub.downloads import settings_folder
from gristmill.plan.arithmetic import (
    ModelSize,
    TokenCost,
    count_parameters,
    gpt_size,
    model_size,
    token_cost,
)
from gristmill.plan.preconditioner import describe_preconditioner
from gristmill.report.page import write_report
from gristmill.tokens.store import TokensNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gristmill.train.replay import Replay

_ROWS = 5
"""How many steps are printed."""


_cluster_option = functools.partial(typer.Option, rich_help_panel="With --cluster")


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, or the run file.")],
    step: Annotated[int, typer.Argument(min=1, metavar="STEP", help="The step to compute again.")],
    settings: Overrides = None,
) -> None:
    """Compute a step of a run again, to tell a faulty device from a bad batch.

    All steps from the last checkpoint before it are computed twice, and compared with each other
    and with the run's records. Nothing in the run folder changes.
    """
    from gristmill.train.run import Run

    with ProgressLine("replaying") as line:
        result = Run.open(run, *(settings or ())).replay(
            step,
            progress=lambda number, done, start: line.update(
                (number - 1) * (step - start) + done - start,
                2 * (step - start),
                f"round {number}, step {done}",
            ),
        )
    _print(result)
    if not result.repeats:
        raise UserError(
            "two computations of the same steps differ: this device or its memory is faulty",
            where=f"steps {result.start + 1} to {step}",
            remedy="test the machine, and go back to a checkpoint from before the trouble",
            exit=Exit.DEVICE,
        )


def _print(result: Replay) -> None:
    typer.echo(
        f"steps {result.start + 1} to {result.step}, computed twice from step {result.start}\n"
    )
    typer.echo(f"{'step':>8}  {'loss':>11}  {'again':>11}  {'recorded':>11}  {'grad norm':>10}")
    for number in list(result.first)[-_ROWS:]:
        recorded = result.recorded.get(number)
        then = "-" if recorded is None else f"{recorded.loss:.6f}"
        first, second = result.first[number], result.second[number]
        losses = f"{first.loss:>11.6f}  {second.loss:>11.6f}  {then:>11}"
        typer.echo(f"{number:>8}  {losses}  {first.norm:>10.4g}")
    typer.echo()
    for line in result.changed:
        typer.echo(f"changed since the run: {line}")
    for line in result.differences:
        typer.echo(line)
    if result.repeats and result.departs_at is not None:
        typer.echo(
            "Both computations agree to the bit, but the run recorded something else at step "
            f"{result.departs_at}.\nIts device had a fault then that has passed, or code, data or "
            "settings have changed."
        )
    elif result.repeats and result.step not in result.first:
        typer.echo(
            f"The run passed over the samples of step {result.step} after a rollback, and so did "
            "both\ncomputations: there is nothing to compare."
        )
    elif result.repeats and result.step in result.recorded:
        how = "within rounding" if result.differences else "to the bit"
        typer.echo(
            f"Both computations agree to the bit, and the records agree with them {how}.\n"
            "The device is not to blame: look at the batch and the settings."
        )
    elif result.repeats:
        known = sum(step in result.recorded for step in result.first)
        others = f"; the {known} steps before it that have one agree" if known else ""
        typer.echo(
            f"Both computations agree to the bit. The run has no record of step {result.step} to "
            f"compare with{others}."
        )
    typer.echo(f"\nSamples of step {result.step} with the highest loss, before its update:")
    for sample in result.worst:
        typer.echo(f"{sample.sample:>12}  loss {sample.loss:.4f}  {sample.text!r}")


def config(
    run: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run file.")] = None,
    settings: Overrides = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema, for editors.")
    ] = False,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets.")] = False,
) -> None:
    """Print the complete settings of a run and the values derived from them."""
    if schema:
        typer.echo(json.dumps(run_file_schema(), indent=2))
    elif presets:
        _list_presets()
    elif run is None:
        raise UserError("give a run file, --schema or --presets", where="config")
    else:
        loaded = load_run(run, settings or (), find_model=settings_folder)
        derived = _derived(loaded)
        typer.echo(dump_run(loaded) + "\n" + "\n".join(derived))


def _list_presets() -> None:
    line = "{:<14}{:>11}{:>8}{:>7}{:>7}{:>9}".format
    typer.echo(line("preset", "parameters", "layers", "heads", "width", "context"))
    for name in preset_names():
        model = GPTConfig.model_validate(load_preset(name)["model"])
        rows = 51200 if name.startswith("gpt3") else 50257
        size = format_count(count_parameters(model, rows=rows))
        typer.echo(line(name, size, model.layers, model.heads, model.width, model.context))
    typer.echo("parameters with GPT-2's vocabulary of 50257 (gpt3: padded to 51200)")


def _derived(config: RunConfig) -> list[str]:
    """The numbers that follow from the settings and the token files, as comments."""
    from gristmill.data.conversations import open_chat
    from gristmill.data.dataset import open_data

    vocab, source = 50257, "assumed: the token files do not say"
    try:
        # As `train` opens them, so that what it would refuse is refused here.
        data = config.data.model_copy(update={"in_memory": False})
        if data.kind == "chat":
            vocab, source = open_chat(config).tokenizer.size, "the tokenizer"
        else:
            first = open_data(data, sequence=data.sequence or config.model.context).train.splits[0]
            if first.reader.info.vocab_size is not None:
                vocab, source = first.reader.info.vocab_size, first.path
    except TokensNotFoundError:
        source = "assumed: the token files are not there yet"
    if config.model.vocab is not None:
        source = "model.vocab"
    resolved = resolve(config, vocab=vocab)
    size, cost, linears = _size_and_cost(config, resolved)
    preconditioner = describe_preconditioner(config.optim, linears, processes=1)
    total, sampled = resolved.samples * resolved.sequence, resolved.sampled_softmax
    *growing, full = resolved.ramp.ramp_steps
    ramp = (
        f"from {resolved.ramp.first} samples in {len(growing)} stages before the full batch, "
        f"which begins after {resolved.ramp.steps_to(full.begin):,} steps"
    )
    rows = {
        "parameters": f"{size.parameters:,}"
        f"{f', of which {size.trained:,} are trained' if size.frozen else ''}",
        "vocabulary": f"{resolved.vocab:,}, padded to {resolved.padded_vocab:,} ({source})"
        f"{f', {sampled:,} of it in the loss of a training step' if sampled else ''}",
        "batch": f"{resolved.batch} samples of {resolved.sequence} tokens = {resolved.micro_batch} "
        f"x {resolved.accumulate} accumulated = {resolved.tokens_per_step:,} tokens",
        **({"ramp": ramp} if growing else {}),
        "run": f"{resolved.steps:,} steps, {format_count(total)} tokens",
        "compute": f"{cost.palm * total:.3g} floating-point operations "
        f"({format_count(cost.palm)} a token; {format_count(cost.causal)} counting attention as "
        "causal)",
        **({"curvature": preconditioner} if preconditioner else {}),
        "validate": f"every {resolved.validate_every}",
        "checkpoint": f"every {config.checkpoint.every}, {format_bytes(size.checkpoint)} each"
        f"{' with one worker' if size.copies else ''}",
    }
    lines = (*rows.items(), *(("warning", doubt) for doubt in config_warnings(config, resolved)))
    return ["# which means", *(f"# {name:<11} {text}" for name, text in lines)]


def _size_and_cost(
    config: RunConfig, resolved: Resolved
) -> tuple[ModelSize, TokenCost, Mapping[str, LinearShape]]:
    """By formula for our own models; others are outlined, which loads torch."""
    if isinstance(config.model, GPTConfig):
        rows = resolved.padded_vocab
        in_loss = resolved.sampled_softmax or rows
        cost = token_cost(config.model, rows=in_loss, sequence=resolved.sequence)
        linears = {} if config.optim.preconditioning is None else config.model.linears()
        return gpt_size(config, rows=rows), cost, linears
    from gristmill.models.build import build_meta_model
    from gristmill.models.spec import linear_shapes

    meta_model = build_meta_model(config.model, vocab=resolved.vocab)
    linears, frozen = linear_shapes(meta_model), meta_model.base_size()
    size = model_size(config, meta_model.size_by_role(), linears=linears, frozen=frozen)
    return size, meta_model.token_cost(resolved.sequence), linears


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; RUN/report.html for one run.")
    ] = None,
) -> None:
    """Write one HTML page with the curves of a run, or a comparison of several."""
    if output is None and len(runs) > 1:
        output = Path("report.html")
    page = write_report(
        runs,
        output or runs[0] / "report.html",
        warn=lambda text: typer.echo(f"warning: {on_one_line(text)}", err=True),
    )
    typer.echo(f"written to {page}")


def doctor(
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Check several GPUs or nodes together before a long run: start it exactly like "
            "`train`. Without a launcher, it uses all GPUs of this machine.",
        ),
    ] = False,
    processes: Annotated[
        int | None,
        _cluster_option(
            min=1,
            metavar="N",
            help="Start N processes on this machine, instead of one for each GPU.",
        ),
    ] = None,
    folder: Annotated[
        Path, _cluster_option(help="Where run folders would be, on all nodes.")
    ] = Path(),
    json: Annotated[
        Path | None,
        _cluster_option(
            metavar="FILE", help="Also write all findings and measurements to this file."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        _cluster_option(
            metavar="CHECK",
            help="Run this check only (repeatable): network, clocks, folder, devices, "
            "collectives, pairs.",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        _cluster_option(metavar="CHECK", help="Skip this check (repeatable)."),
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        _cluster_option(help="The devices to check; auto: GPUs, if there are any."),
    ] = "auto",
    start_timeout: Annotated[
        str,
        _cluster_option(metavar="TIME", help="How long to wait for all processes to join."),
    ] = "2m",
    timeout: Annotated[
        str | None,
        _cluster_option(
            metavar="TIME",
            help="Time limit of each check, instead of its own; the processes that exceed it are "
            "reported.",
        ),
    ] = None,
) -> None:
    """Show what this machine has for training, and what is wrong with it.

    With --cluster, several GPUs or nodes are checked together: links, results, clocks, folders.
    """
    supervised = follow_supervisor()
    if cluster:
        from gristmill.cli.cluster import ClusterOptions, check_cluster, parse_timeout

        options = ClusterOptions(
            processes,
            folder,
            json,
            only or (),
            skip or (),
            device,
            parse_timeout(start_timeout, "--start-timeout"),
            None if timeout is None else parse_timeout(timeout, "--timeout"),
        )
        raise typer.Exit(check_cluster(options, supervised=supervised))
    given = {"--processes": processes, "--json": json, "--only": only, "--skip": skip}
    for option, value in given.items():
        if value is not None:
            remedy = f"doctor --cluster {option}"
            raise UserError("is for --cluster", where=option, remedy=remedy, exit=Exit.USAGE)
    from gristmill.cli.doctor import examine

    problems = 0
    for finding in examine():
        problems += not finding.good
        typer.echo(f"{'ok     ' if finding.good else 'PROBLEM'}  {finding.name:<14} {finding.what}")
        if finding.remedy:
            typer.echo(f"{'':>25}{finding.remedy}")
    raise typer.Exit(1 if problems else 0)
