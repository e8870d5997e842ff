"""The whole pipeline on the documentation inside Python itself, in a few minutes on a laptop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from gristmill.base.errors import Exit
from gristmill.base.files import write_atomic
from gristmill.base.limits import keep_freed_memory
from gristmill.base.units import format_bytes
from gristmill.cli.prepare import report_prepared
from gristmill.report.page import write_report
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.python_docs import python_documents
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.tokens.store import open_tokens
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import SampleRecord, ValidationRecord

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


def demo(
    folder: Annotated[
        Path, typer.Option(help="Folder of the run; the text and tokens go beside it.")
    ] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="Train for this many steps.")] = None,
) -> None:
    """Run the whole pipeline on this machine, offline: text, tokenizer, training, report."""
    data = folder.with_name(f"{folder.name}-data")
    _title("1. Text: the documentation that comes with Python")
    documents = python_documents()
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
    _train(file)

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


def _train(file: Path) -> None:
    """Resume an interrupted demo; move a finished one aside and start over."""
    keep_freed_memory()
    from gristmill.train.run import Run

    run = Run.open(file)
    outcome = run.train(fresh=run.status.get("state") == "done")
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
