"""The page about the sweeps of `optimizers.py`: Markdown, and two pictures in SVG for each sweep.

    docs/second-order.md   docs/second-order-124m-steps.svg   docs/second-order-124m-seconds.svg

Everything comes from the result files, except the answer: what stands between its two marks is
written by hand, and kept when the page is made again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from loss_page import fact, markdown_table, picture, protocol
from loss_results import UNTIMED, Cells, Result, odds
from optimizer_results import BEST, Sweeping, result_table, verdict
from optimizer_rows import REFERENCE, SIZES, Sweep

from gristmill.base.files import write_atomic
from gristmill.base.units import format_count

PAGE = "second-order.md"
BEGIN, END = (
    "<!-- answer: written by hand, kept when the page is made again -->",
    "<!-- /answer -->",
)
UNWRITTEN = "*The answer is not written yet.*"

TITLES = {"cpu": "A small model on the CPU", "124m": "GPT-2 small's size on a GPU"}


def write_pages(sweeps: Sequence[Sweeping], folder: Path) -> Path:
    """The page and its pictures; returns where the page is."""
    page = folder / PAGE
    lines = ["# Does second order pay?", "", _QUESTION, "", BEGIN, "", answer_of(page), "", END]
    for sweeping in sweeps:
        problem = odds(sweeping.runs)
        if problem:
            raise SystemExit(problem)
        lines += ["", *_sweep_lines(sweeping, folder)]
    lines += ["", "## How it was measured", "", _PROTOCOL, "", "## Reproduce", ""]
    lines += _commands(sweeping.sweep for sweeping in sweeps)
    write_atomic(page, "\n".join(lines) + "\n")
    return page


def answer_of(page: Path) -> str:
    """What was written by hand into a page."""
    text = page.read_text() if page.exists() else ""
    _, begun, rest = text.partition(BEGIN)
    written, ended, _ = rest.partition(END)
    if text and not (begun and ended):
        raise SystemExit(
            f"{page} has lost the marks around its answer, {BEGIN} and {END}: put them back, or "
            "move the page away"
        )
    return written.strip() or UNWRITTEN


def _sweep_lines(sweeping: Sweeping, folder: Path) -> list[str]:
    sweep, runs = sweeping.sweep, sweeping.runs
    lines = [f"## {TITLES.get(sweep.size, sweep.size)}"]
    if sweeping.finals():
        lines += ["", *(f"- {line}" for line in verdict(sweeping))]
        lines += ["", *markdown_table(result_table(sweeping))]
        for image in _pictures(sweeping, folder):
            lines += ["", image]
    made = [run for run in runs if run.facts]
    if made:
        facts = protocol(made, first_steps="mean")
        model = f"| model | {fact(made, 'model')} |"
        dates = sorted({run.date for run in made})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines += ["", *facts[:2], f"| measured | {when} |", model, *facts[2:], *_amounts(sweep)]
    trials = [cells for row in sweep.rows for cells in sweeping.trial_cells(row)]
    if trials:
        lines += ["", f"<details><summary>All {len(trials)} trials</summary>"]
        lines += [*html_table(trials), "</details>"]
    failed = [f"- {run.name}, seed {run.seed}: {first_line(run)}" for run in runs if run.error]
    if failed:
        lines += ["", "Runs that failed:", "", *failed]
    return lines


def first_line(run: Result) -> str:
    return (run.error or "").partition("\n")[0]


def _amounts(sweep: Sweep) -> list[str]:
    seeds = ", ".join(map(str, sweep.seeds))
    return [
        f"| tuning | {sweep.trials} trials of {format_count(sweep.trial_tokens)} tokens for each "
        f"row, seed {sweep.seeds[0]} |",
        f"| final runs | {format_count(sweep.tokens)} tokens, {sweep.common['batch']} windows a "
        f"step, seeds {seeds} |",
    ]


def _pictures(sweeping: Sweeping, folder: Path) -> Iterable[str]:
    """Loss over steps and, if the runs were timed, over seconds."""
    finals = sweeping.finals()
    base = next((one for one in finals if one.row.name == REFERENCE), finals[0])
    # The first losses are so high that all the rest would be one line.
    tops = [one.curve[len(one.curve) // 5].loss for one in finals]
    timed = all(one.step_seconds for one in finals)
    axes = {"step": "steps", "seconds": "seconds of training"}
    for axis in ("step", "seconds") if timed else ("step",):
        file = folder / f"second-order-{sweeping.sweep.size}-{axes[axis].split()[0]}.svg"
        drawn = picture(
            {one.row.title: one.curve for one in finals},
            axis=axis,
            label=axes[axis],
            target=base.loss,
            target_label=f"{base.row.title}'s final loss",
            top=max(tops),
        )
        write_atomic(file, drawn)
        yield f"![Validation loss over {axes[axis]}]({file.name})"


def html_table(rows: Sequence[Cells]) -> list[str]:
    """A table for a place in which Markdown is not read, such as a details block."""

    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    names = list(rows[0])
    body = (line((row.get(name, "") for name in names), "td") for row in rows)
    return ["<table>", line(names, "th"), *body, "</table>"]


def _changed(sweep: Sweep) -> str:
    """Options that were not left at those of the size."""
    usual = asdict(SIZES[sweep.size])
    found = []
    for name, value in sweep.common.items():
        if name in usual and value is not None and value != json.loads(json.dumps(usual[name])):
            words = [value] if isinstance(value, str | int) else map(shlex.quote, value)
            found.append(f" --{name} {' '.join(map(str, words))}")
    return "".join(found)


def _commands(sweeps: Iterable[Sweep]) -> list[str]:
    lines = [
        "```shell",
        "gristmill prepare train.jsonl -o tokens/train      # --tokenizer bytes for --size cpu",
        "gristmill prepare val.jsonl -o tokens/val",
    ]
    names = []
    for sweep in sweeps:
        names.append(f"{sweep.size}.json")
        seeds = " ".join(map(str, sweep.seeds))
        lines += [
            f"python benchmarks/optimizers.py --size {sweep.size} --data tokens/train \\",
            f"    --validation tokens/val --rows {','.join(row.name for row in sweep.rows)} \\",
            f"    --trials {sweep.trials} --trial-tokens {sweep.trial_tokens} "
            f"--tokens {sweep.tokens} --seeds {seeds} \\",
            f"    --points {sweep.points}{_changed(sweep)} --output {names[-1]}",
        ]
    return [*lines, f"python benchmarks/optimizers.py --page docs {' '.join(names)}", "```"]


_QUESTION = """\
K-FAC and SOAP spend a part of each step on an estimate of the curvature, in order to need fewer
steps. Do AdamW and Muon reach the same loss sooner with them, in steps and in seconds?"""

_PROTOCOL = f"""\
- **The table.** Settings are the best ones of the search. "Steps to" and "seconds to" tell when a
  row has the loss that Muon ends with, in brackets as a multiple of Muon's own; "-" is never. The
  difference is that of the loss from Muon's (above zero is worse), and ± the standard deviation
  over the seeds. A difference of that size means nothing, and a row of one seed does not say how
  much of its difference is chance. "Preconditioner" is the part of a step that the same optimizer
  without the preconditioner does not need.
- **The same for all rows:** the model, its start and the text in its order for a seed, batch,
  number of tokens, schedule and clipping. Adam updates embeddings, tables, head and vectors in all
  rows, with the rates of the preset, which are not tuned; its betas are 0.8 and 0.95 in rows with
  Muon, and those of the row in rows with AdamW. Rows differ in what they do with the matrices
  inside blocks.
- **Tuning.** All rows get the same number of trials by the same search. It starts at the defaults,
  doubles the rate, or halves it if that was worse, and goes on in the better direction while it
  improves. Then it does the same with one further setting, and starts over with steps of half the
  size until the trials are used up. The lowest validation loss at the end of a trial wins. Trials
  are shorter than final runs, for all rows alike.
- **Final runs.** Each row runs once with its best settings; the {BEST} best rows, and Muon as the
  reference, run with all seeds. A curve is the mean over the seeds. The loss is plain
  cross-entropy on the whole validation text.
- **Steps and seconds to a loss** are read off the line between two validations. All runs have the
  same number of tokens, and the rate falls only at their end. So a row that is ahead would need
  still fewer steps in a run that was planned to be that short.
- **Time** is that of training steps alone, without validation and saving. The first {UNTIMED} steps
  compile. They count as the mean of all others, not as the median, so that what a preconditioner
  does once in 10 or 100 steps has its place in them too. What it does in the very first step alone
  is not counted."""
