"""`prepare --engine` and `prepare --status`: all parts of a preparation.

What `prepare` is asked for by name: corpora, the tokenizer of a text's own characters, and the
sets that become of one command.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.exits import stop_signals
from gristmill.base.process import usable_cores
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.parts_page import PartsPage, check_page, status_as_json
from gristmill.cli.prepare_dedup import show_dedup
from gristmill.cli.progress import ProgressLine
from gristmill.text.prepare.all_parts import log_pattern, prepare_in_parts
from gristmill.text.prepare.part_status import PartState, PartStatus, finished_sets, part_statuses
from gristmill.text.prepare.parts_run import PartsListener, PartsProgress, TaskEngine
from gristmill.text.prepare.prepare import PrepareResult
from gristmill.text.prepare.request import PrepareRequest, split_name
from gristmill.text.sources import corpora
from gristmill.text.sources.corpora import Corpus
from gristmill.tokens.convert import CopyProgress


def find_corpus(sources: Sequence[str]) -> Corpus | None:
    """The corpus that is asked for by its name, if one is."""
    named = [name for name in sources if not Path(name).exists() and corpora.find_corpus(name)]
    if named and len(sources) > 1:
        raise UserError(
            "a corpus known by name is prepared on its own",
            where=named[0],
            remedy="prepare each on its own, then: gristmill tokens merge",
        )
    return corpora.find_corpus(named[0]) if named else None


def fetch_corpus(corpus: Corpus, request: PrepareRequest, quiet: bool) -> str:
    """Tell about a corpus and download its file if it has one; what is read then."""
    if not quiet:
        typer.echo(corpora.describe(corpus), err=True)
    corpora.check_disk(corpus, output=request.output)
    with ProgressLine("downloading", quiet=quiet) as line:
        return corpora.fetch_corpus(
            corpus, progress=lambda done, total: line.update(done, total, format_bytes(done))
        )


def sets_of(
    request: PrepareRequest, corpus: Corpus | None, hold_out_end: float | None
) -> list[tuple[PrepareRequest, int | None]]:
    """The preparations that a command asks for, each with the bytes of text it will read, if they
    are known: two, if train and val are not documents of the same source."""

    def named(split: str, **changes: Any) -> tuple[PrepareRequest, None]:
        output = Path(split_name(str(request.output), split))
        return replace(request, output=output, **changes), None

    if hold_out_end is not None:
        cut = 1 - hold_out_end
        return [
            named(split, options=replace(request.options, portion=portion))
            for split, portion in (("train", (0.0, cut)), ("val", (cut, 1.0)))
        ]
    if corpus and corpus.validation and not request.holdout:
        # The corpus has a validation set of its own.
        own = corpus.source(corpus.validation)
        return [named("train"), named("val", sources=[own])]
    return [(request, corpus.text_bytes if corpus else None)]


def check_hold_out_end(
    share: float | None, *, split: str | None, corpus: Corpus | None, in_parts: bool
) -> None:
    """Refuse a share that is none, or that is not alone."""
    if share is None:
        return
    what, remedy = "", "leave one of the two out"
    if not 0 < share < 1:
        what, remedy = (
            f"{share:g} is no share of a text",
            "give one above 0 and below 1, such as 0.1",
        )
    elif split is not None:
        what = "--split holds documents out already"
    elif corpus and corpus.dataset:
        what, remedy = f"{corpus.name} has documents to hold out", "leave it out"
    elif in_parts:
        what, remedy = "a plain text file is not divided into parts", "prepare it as a whole"
    if what:
        raise UserError(what, where="--hold-out-end", remedy=remedy, exit=Exit.USAGE)


ATTEMPTS = 3
_NOT_OF_A_PART = frozenset(
    "engine at_once attempts ray_address launch status page part parts workers as_json quiet "
    "corpora dialect dedup_group".split()
)
"""Options that concern all parts together, or that each part is given anew."""
_MAX_SHOWN = 20
_parts_option = functools.partial(typer.Option, rich_help_panel="All parts")


class PartsEngine(enum.StrEnum):
    """Who runs the parts."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"


EngineName = Annotated[
    PartsEngine | None,
    _parts_option(
        "--engine",
        metavar="ENGINE",
        help="Do all --parts, and merge them: local on this machine, slurm as an array of jobs, "
        "ray on a Ray cluster.",
    ),
]
AtOnce = Annotated[
    int | None,
    _parts_option(
        min=1,
        metavar="N",
        help="How many parts run at the same time; as many as there are cores for if not given.",
    ),
]
Attempts = Annotated[
    int | None,
    _parts_option(
        min=1,
        metavar="N",
        help=f"How often a part that dies may be started; {ATTEMPTS} if not given.",
    ),
]
RayAddress = Annotated[
    str | None,
    _parts_option(
        metavar="ADDRESS",
        help="The cluster of --engine ray; RAY_ADDRESS or the one of this machine if not given.",
    ),
]
JobSettings = Annotated[
    list[str] | None,
    _parts_option(
        "--launch",
        metavar="KEY=VALUE",
        help="What to ask Slurm for, by the settings of a run file's launch table: account=abc, "
        "queue=cpu, time=2h, memory=8G. May be repeated.",
    ),
]
Status = Annotated[
    bool,
    _parts_option(
        "--status",
        help="Show how far the parts of NAME are, whoever runs them, and exit: with 0 if all are "
        "done, with 75 if not.",
    ),
]

Page = Annotated[
    Path | None,
    _parts_option(
        metavar="FILE.html",
        help="With --status, write a page of how far all parts are; with --engine, keep it up to "
        "date while they run.",
    ),
]


@dataclass(frozen=True)
class PartsOptions:
    """How all parts are run."""

    engine: PartsEngine
    parts: int
    at_once: int | None
    attempts: int
    workers: int
    """Processes of one part."""
    ray_address: str | None
    launch: Sequence[str]
    """Settings of the jobs of Slurm."""
    page: Path | None = None


def check_parts_options(
    engine: PartsEngine | None,
    *,
    part: str | None,
    parts: int | None,
    workers: int | None,
    at_once: int | None,
    attempts: int | None,
    ray_address: str | None,
    launch: Sequence[str],
    page: Path | None,
) -> PartsOptions | None:
    """How all parts are run; None if this command does one part or the whole."""
    check_page(page, for_parts=engine is not None)
    if engine is None:
        given = {"--at-once": at_once, "--attempts": attempts, "--ray-address": ray_address}
        given["--launch"] = len(launch) or None
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    "this says how all parts are run, and no engine runs them",
                    where=name,
                    remedy="add --engine, or leave it out",
                )
        return None
    if part is not None:
        raise UserError(
            "an engine runs all parts, and this names one of them",
            where=f"--part {part}",
            remedy="leave out --part, or --engine to do this part here",
        )
    if parts is None:
        raise UserError(
            "the number of parts is not given",
            where=f"--engine {engine}",
            remedy="add --parts, such as --parts 8",
        )
    if ray_address is not None and engine is not PartsEngine.RAY:
        what, remedy = "only --engine ray has an address", "leave it out, or choose that engine"
        raise UserError(what, where="--ray-address", remedy=remedy)
    if launch and engine is not PartsEngine.SLURM:
        what, remedy = "only --engine slurm submits jobs", "leave it out, or choose that engine"
        raise UserError(what, where="--launch", remedy=remedy)
    return PartsOptions(
        engine,
        parts,
        at_once,
        ATTEMPTS if attempts is None else attempts,
        workers or 1,
        ray_address,
        launch,
        page,
    )


def part_arguments(context: typer.Context, options: PartsOptions, *, output: Path) -> list[str]:
    """The arguments of `gristmill` for one part: those of this command, and room for its number."""
    words = ["prepare"]
    arguments: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name in _NOT_OF_A_PART or source is None or source.name != "COMMANDLINE":
            continue
        value: Any = output if name == "output" else context.params[name]
        if parameter.param_type_name == "argument":
            arguments += map(str, value)
        elif isinstance(value, bool):
            # Options with a name of their own for "no" have it second.
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            option = max(parameter.opts, key=len)
            values = value if isinstance(value, list | tuple) else [value]
            texts = (part.value if isinstance(part, enum.Enum) else part for part in values)
            words += [f"{option}={text}" for text in texts]
    tail = ["--workers", str(options.workers), "--parts", str(options.parts), "--part"]
    # A name must not be taken for an option; standard input, which is "-", has no parts.
    sources = [f"./{name}" if name.startswith("-") else name for name in arguments]
    return [*words, *sources, *tail]


def prepare_parts(
    request: PrepareRequest, arguments: Sequence[str], options: PartsOptions, *, quiet: bool
) -> PrepareResult:
    """Run all parts and merge them, with progress."""
    logs = str(Path(log_pattern(request, options.parts)).absolute())
    engine = _build_engine(arguments, options, logs=logs, name=request.name)
    page = PartsPage(options.page, request.output)
    with ProgressLine("preparing", quiet=quiet) as line, _stopped_by_signals():

        def note(message: str) -> None:
            line.say(message)
            page.note(message)

        def show(state: PartsProgress) -> None:
            page.follow(state)
            waiting = state.parts - state.done - state.running - state.failed
            failed = f", {state.failed:,} failed" if state.failed else ""
            rate = format_bytes(state.new_text_bytes / max(state.seconds, 1e-9))
            parts = (
                f"{state.done:,} of {state.parts:,} parts done, {state.running:,} running, "
                f"{waiting:,} to do{failed}"
            )
            if state.stage:
                line.update(state.bytes_done, state.bytes_total, f"{state.stage}: {parts}")
                return
            line.update(
                state.bytes_done,
                state.bytes_total,
                f"{parts}; {format_count(state.counts.documents)} documents, "
                f"{format_count(state.counts.tokens)} tokens, {rate} of text/s",
            )

        def show_copy(state: CopyProgress) -> None:
            page.merging()
            line.update(
                state.tokens, state.tokens_total, f"merging, {format_count(state.tokens)} tokens"
            )

        def show_check(done: int, total: int) -> None:
            line.update(done, total, f"verifying, {format_bytes(done)}")

        deduplicating = functools.partial(show_dedup, line)
        listener = PartsListener(show, show_copy, show_check, deduplicating, note)
        try:
            result = prepare_in_parts(
                request, options.parts, engine, attempts=options.attempts, listener=listener
            )
        except KeyboardInterrupt:
            line.say("interrupted: run the same command again to resume")
            page.write("Interrupted: the same command resumes.", of=options.parts)
            raise
        except UserError as error:
            page.note(error.problems[0].what)
            page.write("Stopped by an error.", of=options.parts)
            raise
    page.finish()
    shutil.rmtree(_job_folder(request.name), ignore_errors=True)
    return result


def _build_engine(
    arguments: Sequence[str], options: PartsOptions, *, logs: str, name: Path
) -> TaskEngine:
    at_once = options.at_once
    if options.engine is PartsEngine.SLURM:
        return _slurm_engine(arguments, options, logs=logs, name=name)
    if options.engine is PartsEngine.RAY:
        from gristmill.launch.tasks import RayTasks

        address = options.ray_address
        return RayTasks(
            arguments, logs=logs, at_once=at_once, cores=options.workers, address=address
        )

    from gristmill.launch.tasks import LocalTasks

    command = [sys.executable, "-m", "gristmill", *arguments]
    fitting = max(1, usable_cores() // options.workers)
    return LocalTasks(command, logs=logs, at_once=at_once or fitting)


def _slurm_engine(
    arguments: Sequence[str], options: PartsOptions, *, logs: str, name: Path
) -> TaskEngine:
    # A preparation without jobs starts sooner without their settings.
    from gristmill.config.load import load_launch
    from gristmill.launch.jobs.batch import has_no_effect
    from gristmill.launch.jobs.slurm import Slurm
    from gristmill.launch.jobs.submit import gristmill_command
    from gristmill.launch.tasks import SlurmTasks

    # A part is one process on one node, whatever it is asked for.
    settings = (f"cpus_per_process={options.workers}", *options.launch)
    launch = load_launch(settings)
    unused = (*Slurm().unused, "on", "nodes", "processes_per_node", "starter", "stop_early")
    if problems := [*has_no_effect(launch, unused, "for parts"), *Slurm().problems(launch)]:
        raise UserError(problems)
    return SlurmTasks(
        [*gristmill_command(launch), *arguments],
        logs=logs,
        at_once=options.at_once,
        launch=launch,
        folder=_job_folder(name),
    )


def _job_folder(name: Path) -> Path:
    """Where the scripts of arrays are until all parts are merged."""
    return name.with_name(f".{name.name}.jobs")


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Signals that ask to stop do what Ctrl-C does, and have the exit status of a run."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        yield
    except KeyboardInterrupt:
        if seen and seen[0] != signal.SIGINT:
            raise typer.Exit(Exit.STOPPED) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_parts(
    output: Path, parts: int | None, *, page: Path | None, as_json: bool, quiet: bool
) -> None:
    """Print how far all parts are; exits with 75 if any is not done."""
    statuses = part_statuses(output, parts)
    counts = Counter(status.state.value for status in statuses)
    complete = all(status.state is PartState.DONE for status in statuses)
    if statuses:
        doing = "All parts are done." if complete else "Not all parts are done."
        PartsPage(page, output).write(doing, of=parts)
    elif page is not None:
        typer.echo(f"note: no parts are left to show, so {page} is not written", err=True)
    if as_json:
        value = {
            "name": str(output),
            "parts": len(statuses),
            "complete": complete,
            "counts": counts,
            "sets": [str(prefix) for prefix in finished_sets(output)],
            "status": [status_as_json(status) for status in statuses],
        }
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
    elif not quiet:
        _print_statuses(output, statuses, counts)
    if not complete:
        raise typer.Exit(Exit.STOPPED)


def _print_statuses(output: Path, statuses: Sequence[PartStatus], counts: Counter[str]) -> None:
    if not statuses:
        names = ", ".join(str(prefix) for prefix in finished_sets(output))
        typer.echo(f"{output}: complete, no parts are left: {names}")
        return
    tokens = sum(status.counts.tokens for status in statuses)
    documents = sum(status.counts.documents for status in statuses)
    states = ", ".join(f"{counts[state]:,} {state}" for state in PartState if counts[state])
    typer.echo(
        f"{output}: {len(statuses):,} parts: {states}; "
        f"{format_count(documents)} documents, {format_count(tokens)} tokens"
    )
    rest = [status for status in statuses if status.state is not PartState.DONE]
    for status in rest[:_MAX_SHOWN]:
        words = f"  {status.part!s:<9} {status.state:<11}"
        if status.counts.documents:
            words += f" {format_count(status.counts.documents)} documents"
        words += f" {status.what}" if status.what else ""
        words += f" ({os.path.relpath(status.log)})" if status.log else ""
        typer.echo(words.rstrip())
    if len(rest) > _MAX_SHOWN:
        typer.echo(f"  and {len(rest) - _MAX_SHOWN:,} more; --json lists all")
