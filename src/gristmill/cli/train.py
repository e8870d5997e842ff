"""`train` and `demo`.

The whole pipeline on the documentation inside Python itself, in a few minutes on a laptop.
"""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_atomic
from gristmill.base.memory import keep_freed_memory
from gristmill.base.units import format_bytes
from gristmill.cli.dialects import DialectName, TranslatedRun, translate_run
from gristmill.cli.options import Overrides
from gristmill.cli.prepare import report_prepared
from gristmill.config.load import load_run
from gristmill.report.page import write_report
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.python_docs import python_documents
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.tokens.store import open_tokens
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import SampleRecord, ValidationRecord, read_metrics

if TYPE_CHECKING:
    from gristmill.config.schema import RunConfig

VOCABULARY = 2048
STEPS = 300

RUN = """\
# The run file of the demo. Change something, and run it under another name:
#   gristmill train {file} name=second folder=runs/second optim.lr=0.01
name   = "demo"
preset = "modern-nano"
folder = "{folder}"

[data]
paths = "{tokens}"
split = "95,5"

[train]
until = "{steps} steps"
batch = 8

[validate]
every   = "{validate} steps"
windows = 128

[sample]
every   = "{sample} steps"
prompts = ["Return a new"]
tokens  = 60
"""


def run_demo(folder: Path, *, steps: int | None) -> None:
    """Text, tokenizer, tokens, training, validation, samples, report."""
    data = folder.with_name(f"{folder.name}-data")
    _title("1. Text: the documentation that comes with Python")
    documents = list(python_documents())
    size = sum(len(document.text.encode()) for document in documents)
    typer.echo(f"{len(documents):,} documents, {format_bytes(size)}")

    _title("2. Tokenizer: byte-level BPE, learned from that text")
    tokenizer = train_tokenizer((d.text for d in documents), vocab_size=VOCABULARY)
    longest = sorted(range(tokenizer.size), key=lambda id: -len(tokenizer.token_bytes(id)))[:5]
    examples = ", ".join(repr(tokenizer.decode([id])) for id in longest)
    typer.echo(f"{tokenizer.size:,} tokens, for example {examples}")

    _title("3. Token files")
    tokens = data / "python"
    data.mkdir(parents=True, exist_ok=True)
    result = prepare_documents(documents, tokenizer=tokenizer, output=tokens, overwrite=True)
    report_prepared(result)

    _title("4. Training a small GPT")
    file, steps = data / "demo.toml", steps or STEPS
    intervals = {"validate": max(1, steps // 10), "sample": max(1, steps // 3)}
    text = RUN.format(file=file, folder=folder, tokens=tokens, steps=steps, **intervals)
    write_atomic(file, text)
    _train(file, folder=folder)

    _title("5. What it learned")
    _compare(folder, unigram=_unigram_entropy(tokens))
    page = write_report([folder], RunFolder(folder).report)

    _title("What to do next")
    mine = "name=mine folder=runs/mine data.paths=tokens/mine"
    typer.echo(f"""\
  look at the curves     open {page} in a browser
  generate text          gristmill generate {folder} 'The function returns'
  train it longer        gristmill train {file} train.until='{3 * STEPS} steps'
  use your own text      gristmill tokenizer train TEXT -o my-tokenizer -n 4096
                         gristmill prepare TEXT -o tokens/mine -t my-tokenizer
                         gristmill train {file} {mine}""")


def _train(file: Path, *, folder: Path) -> None:
    """Resume an interrupted demo; move a finished one aside and start over."""
    config = load_run(file)
    keep_freed_memory()
    from gristmill.train.run import run_training

    fresh = RunFolder(folder).read_status().get("state") == "done"
    outcome = run_training(config, fresh=fresh)
    if outcome.exit is not Exit.DONE:
        raise typer.Exit(outcome.exit)


def _unigram_entropy(tokens: Path) -> float:
    """Nats per token of the best guess without context: a loss that any model must beat."""
    reader = open_tokens(tokens)
    counts = np.bincount(reader.read(0, len(reader)))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _compare(folder: Path, *, unigram: float) -> None:
    records = read_metrics(RunFolder(folder).metrics)
    losses = [record.loss for record in records if isinstance(record, ValidationRecord)]
    samples = [record for record in records if isinstance(record, SampleRecord)]
    rows = {
        "validation loss before": losses[0],
        "guessing by frequency": unigram,
        "validation loss after": losses[-1],
    }
    for name, loss in rows.items():
        typer.echo(f"{name:<24} {loss:.3f} nats per token, perplexity {math.exp(loss):,.0f}")
    for name, record in (("before", samples[0]), ("after", samples[-1])):
        typer.secho(f"\nA sample {name} training:", bold=True)
        typer.echo(record.prompt + record.text)


def _title(text: str) -> None:
    typer.secho(f"\n{text}", bold=True)


class LogFormat(enum.StrEnum):
    """Whose lines standard output has."""

    GRISTMILL = "gristmill"
    MEGATRON = "megatron"
    DECENTRALIZED = "decentralized"


def train(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN.toml", help="The run file, or a run folder to resume."),
    ] = None,
    settings: Overrides = None,
    dialect: DialectName = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start over; an existing run is moved aside, not deleted."),
    ] = False,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STEP",
            help="Go back to the checkpoint of this step, or to the best one (--from best), and "
            "train from there; what came after it is set aside, not deleted.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train with N processes on this machine, one per device. Not needed under a "
            "launcher, which starts them itself.",
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="After a crash, restart all processes from the last checkpoint, at most N times "
            "and only if a new checkpoint was reached. With parallel.elastic: restart the process "
            "that crashed, at most N times in all.",
        ),
    ] = 0,
    validate_only: Annotated[
        bool,
        typer.Option(
            "--validate-only",
            help="Do not train: compute the run's own validation at its newest checkpoint (or "
            "--from STEP), or for the weights that it starts from. Changes nothing.",
        ),
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Print the lines of another program, for scripts that parse them; the same as "
            "track.log_format.",
            show_default="gristmill",
        ),
    ] = None,
) -> None:
    """Train a model, or resume the run in the folder."""
    from gristmill.launch.lifeline import follow_supervisor

    supervised = follow_supervisor()
    words = [*([] if run is None else [run]), *(settings or ())]
    if log_format is not None:
        ours = f"track.log_format={log_format.value}"
        # Settings of ours stand before the words of another program.
        words = [*words, ours] if dialect is None else [ours, *words]
    config, translated = _load(words, dialect)
    validate_only = validate_only or (translated is not None and translated.validates_only)
    if fresh and start_from is not None:
        what = "--fresh starts over, and --from goes back to a checkpoint"
        raise UserError(what, where="command line", remedy="leave out one of them", exit=Exit.USAGE)
    if fresh and validate_only:
        what = "--fresh starts a run over, and --validate-only changes nothing"
        raise UserError(what, where="command line", remedy="leave out one of them", exit=Exit.USAGE)
    if translated is not None and not supervised:
        _begin(translated)
    if (processes > 1 or restarts > 0) and not supervised:
        from gristmill.base.process import Place
        from gristmill.config.rules import check_mesh
        from gristmill.launch.gpus import require_gpus
        from gristmill.launch.processes import Job, supervise
        from gristmill.track.folder import move_aside, run_folder

        place = Place.current()
        if place.world > 1:
            raise UserError(
                f"this is one of {place.world} processes of a launcher, and each would start "
                f"{processes} more",
                where="command line",
                remedy="leave out --processes and --restarts, or start one process without a "
                "launcher",
            )
        # Wrong settings are reported once, here, and not by every process.
        check_mesh(config, processes=config.runtime.devices_of(processes))
        # The workers of an elastic run exchange tensors on the host, and may share a GPU.
        if not config.parallel.elastic:
            require_gpus(config.runtime.device, processes=processes)
        folder = run_folder(config)
        if fresh:
            move_aside(folder)
        if start_from is not None and not validate_only:
            from gristmill.base.locks import FolderLock
            from gristmill.train.go_back import choose_step, go_back

            # Once, here: a restart continues from what was reached since.
            step = choose_step(folder, start_from)
            with FolderLock(folder.path):
                go_back(folder, step)
        # As typed, since the run folder keeps it; a supervised process starts no others.
        options = (f"--processes={processes}", *([f"--restarts={restarts}"] if restarts else ()))
        if validate_only:
            chosen = () if start_from is None else (f"--from={start_from}",)
            options = (*options, "--validate-only", *chosen)
        if dialect is not None:
            options = (f"--dialect={dialect}", *options)
        command = (sys.executable, "-m", "gristmill", "train", *options, "--", *words)
        job = Job(command, processes, folder, restarts, elastic=config.parallel.elastic)
        raise typer.Exit(supervise(job))
    if validate_only:
        _validate(config, start_from)
        return
    from gristmill.base.collector import collector_paused
    from gristmill.base.memory import keep_freed_memory
    from gristmill.base.process import Place
    from gristmill.launch.gpus import start_cuda
    from gristmill.track.folder import run_folder
    from gristmill.train.stop import StopRequest

    keep_freed_memory()
    place = Place.current()
    start_cuda(config.runtime.device, local_rank=place.local_rank)
    if place.rank == 0:
        typer.echo(f"info: {config.name}: starting in {run_folder(config).path}")
    # The next import takes seconds, and a signal may arrive meanwhile.
    with StopRequest() as stop, collector_paused():
        from gristmill.train.run import run_training

        text = "" if translated is None else translated.translation.text
        outcome = run_training(
            config, fresh=fresh, start_from=start_from, stop=stop, translation=text
        )
    raise typer.Exit(outcome.exit)


def _load(words: list[str], dialect: str | None) -> tuple[RunConfig, TranslatedRun | None]:
    """The settings of a run file, or of another program's words."""
    from gristmill.base.downloads import settings_folder
    from gristmill.config.load import load_run

    if dialect is not None:
        translated = translate_run(dialect, words)
        return translated.config, translated
    return load_run(Path(words[0]), words[1:], find_model=settings_folder), None


def _begin(translated: TranslatedRun) -> None:
    """Say what became of the other program's options, and make the token files it would make."""
    from gristmill.base.process import Place

    place = Place.current()
    if place.rank == 0:
        translated.tell()
    translated.prepare(alone=place.world == 1)


def _validate(config: RunConfig, step: str | None) -> None:
    """Print the validation of a run, beside what it recorded."""
    from gristmill.track.sinks import line
    from gristmill.train.validate import validate_run

    found = validate_run(config, checkpoint=step)
    if not found.leads:
        return
    typer.echo(line(replace(found.record, best=False)))
    if found.recorded is not None:
        then, now = found.recorded.loss, found.record.loss
        same = "the same to the bit" if then == now else f"now {now:.9g}"
        typer.echo(f"recorded by the run: loss {then:.9g}, {same}")


def demo(
    folder: Annotated[
        Path, typer.Option(help="Folder of the run; the text and tokens go beside it.")
    ] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="Train for this many steps.")] = None,
) -> None:
    """Run the whole pipeline on this machine, offline: text, tokenizer, training, report."""

    run_demo(folder, steps=steps)
