"""The page about the runs of `time_to_loss.py`: Markdown, and two pictures in SVG beside it.

    docs/time-to-loss.md   docs/time-to-loss-seconds.svg   docs/time-to-loss-tokens.svg

The charts of the report are drawn by a script in a browser, which a Markdown page does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from loss_results import (
    REFERENCE,
    UNTIMED,
    WORDS,
    Cells,
    FirstSteps,
    Group,
    Point,
    Result,
    Row,
    ablation_table,
    first_to_reach,
    horizon_table,
    in_the_same_time,
    rows_of,
    run_cells,
    target_of,
    verdict,
)

from gristmill.base.files import write_atomic
from gristmill.base.units import format_count

# ------------------------------------------------------------------ the page


def write_page(
    results: Sequence[Result], page: Path, *, given: float | None = None, notes: str = ""
) -> None:
    """The Markdown page, with notes at its end, and, if there are curves to compare, its two
    pictures beside it."""
    target = target_of(results, given)
    rows = rows_of(results, "ours")
    base = first_to_reach(rows_of(results, "baseline"), target)
    names = dict.fromkeys(row.first.name for row in rows)
    each = [
        first_to_reach([row for row in rows if row.first.name == name], target) for name in names
    ]
    ours = [row for row in each if row is not None]
    pictures = []
    if base is not None and ours:
        assert target is not None
        shown = {row.first.name: row.middle.curve for row in (base, *ours)}
        whole = in_the_same_time(rows, base)
        if whole is not None:
            shown[f"{whole.first.name}, in the baseline's time"] = whole.middle.curve
        for axis, words in (("seconds", "seconds of training"), ("tokens", "tokens")):
            file = page.with_name(f"{page.stem}-{axis}.svg")
            write_atomic(file, picture(shown, axis=axis, label=words, target=target))
            pictures.append(f"![Validation loss over {words}]({file.name})")
    lines = _page_lines(results, target, pictures)
    write_atomic(page, "\n".join([*lines, *(["", notes.strip()] if notes else [])]) + "\n")


def _page_lines(
    results: Sequence[Result], target: float | None, pictures: Sequence[str]
) -> list[str]:
    baseline, ours, ablation = (rows_of(results, g) for g in ("baseline", "ours", "ablation"))
    dates = sorted({run.date for run in results})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = ["# Time to loss", "", _QUESTION, "", f"Measured {when} by `time_to_loss.py`.", ""]
    if baseline or ours:
        lines += [f"- {line}" for line in verdict(results, target)]
    for image in pictures:
        lines += ["", image]
    lines += ["", "## What was measured", "", *protocol(results, first_steps="median")]
    if baseline:
        told = [text for peer, text in _PEERS.items() if any(_of(row, peer) for row in baseline)]
        lines += ["", "## The baseline", "", *_paragraphs([*told, _BEST]), ""]
        lines += [_models(results, "baseline"), ""]
        lines += markdown_table([run_cells(row) for row in baseline], without=["run", "steps"])
    if ours:
        lines += ["", "## Ours", "", _OURS, "", _models(results, "ours"), ""]
        lines += markdown_table(horizon_table(ours, target), without=["run", "steps", "seeds"])
    if ablation:
        timed = all(row.seconds for row in ablation)
        lines += ["", "## One part at a time", "", _ABLATION, "", _TIMED if timed else _UNTIMED]
        if any(row.spread is None for row in ablation):
            lines += ["", "A row of one seed does not say how much of its difference is chance."]
        lines += ["", _models(results, "ablation", name=REFERENCE), ""]
        columns = ["run", "steps", "tokens", "tokens/s"]
        lines += markdown_table(ablation_table(ablation), without=columns)
    failed = [f"- {run.name}, seed {run.seed}: {_first(run.error)}" for run in results if run.error]
    if failed:
        lines += ["", "## Runs that failed", "", *failed]
    return lines


_QUESTION = """\
The recipes of nanoGPT and nanochat train a model of GPT-2's size to some validation loss. After how
many seconds, and how many tokens of the same text, is a run of ours there, with a model that
computes no more for a token?"""

_PEERS = {
    "nanogpt": """\
nanoGPT's model (no biases, no dropout) with its recipe: random windows, AdamW with betas 0.9 and
0.95, decay 0.1 on matrices, clipping at 1, warm-up over 5 % of the steps, a cosine to 10 % of the
rate; bf16 autocast and compiled on a GPU.""",
    "nanochat": """\
nanochat's model and optimizer (Muon and AdamW) with its schedules of rate, momentum and decay and
GPT-2's vocabulary, compiled on a GPU; whole windows in random order, as ours. Without
FlashAttention 3 all its layers attend to the whole window.""",
}

_BEST = "The best row is the one to compare with."

_OURS = """\
Every run is a whole one: its learning rate ends with its own horizon. "Reach" counts the seeds
whose last validation loss is at or below the loss to reach, ± is the standard deviation. Rates and
sizes of the preset were chosen by runs on this text, as the baseline's rate and batch are here."""

_ABLATION = """\
Each row changes one thing about the preset and nothing else, at the same number of tokens, unless
it says so. The difference is that of the loss from the preset's (above zero is worse). One of the
size of ±, the standard deviation, means nothing."""

_FIRST = {"median": "median ones", "mean": "the mean of the others"}

_TIMED = "The time ratio is that of the seconds to the preset's."
_UNTIMED = "Runs shared the device with others, so their times are not compared."


def _of(row: Row, peer: str) -> bool:
    return row.first.name.partition("/")[0] == peer


def _paragraphs(texts: Iterable[str]) -> list[str]:
    """With an empty line between two."""
    return "\n\n".join(texts).splitlines()


def _first(text: str) -> str:
    return text.splitlines()[0]


def fact(results: Iterable[Result], name: str) -> str:
    """A fact about some runs, or all of them where they differ."""
    return "; ".join(dict.fromkeys(run.facts[name] for run in results if run.facts))


def _models(results: Iterable[Result], group: Group, *, name: str | None = None) -> str:
    chosen = [run for run in results if run.group == group and name in (None, run.name)]
    asked = "" if name is None else f", {format_count(chosen[0].asked)} tokens" if chosen else ""
    return f"The model: {fact(chosen, 'model')}{asked}."


def protocol(results: Sequence[Result], *, first_steps: FirstSteps) -> list[str]:
    """A table of what has to be known about the machine, the versions, the text and the clock."""
    facts = next(run.facts for run in results if run.facts)
    return [
        "| what | in these runs |",
        "| --- | --- |",
        f"| device | {fact(results, 'device')} |",
        f"| software | {fact(results, 'software')} |",
        f"| code | {fact(results, 'code')} |",
        f"| training text | {facts['training']} |",
        f"| validation | {facts['windows']} windows that do not overlap, all of "
        f"{facts['validation']}, in order; the same for all |",
        f"| time | of training steps alone: no compiling, no validation; the first {UNTIMED} steps "
        f"of a run, which compile, count as {_FIRST[first_steps]} |",
    ]


# ------------------------------------------------------------------ pictures

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 20, 52
INK, MUTED, GRID = "#1e2024", "#5c6270", "#e6e2d8"
COLOURS = ("#c8472f", "#2563c9", "#2f8f5b", "#e58a1f", "#7b5ea7", "#d4508b", "#1b998b", "#8a8f98")


def ticks(low: float, high: float, *, wanted: int) -> list[float]:
    """Round numbers from low to high, about as many as wanted."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * lead for lead in (1, 2, 2.5, 5, 10) if lead * power >= rough * 0.999999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def picture(
    curves: Mapping[str, Sequence[Point]],
    *,
    axis: str,
    label: str,
    target: float,
    target_label: str = "loss to reach",
    top: float | None = None,
) -> str:
    """Loss over seconds, steps or tokens, with a line at the loss to reach; what is above `top` is
    cut off.

    It brings its own background, since a picture on a page is not told whether that page is dark.
    """
    curves = {
        name: [point for point in curve if top is None or point.loss <= top]
        for name, curve in curves.items()
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    places = {name: [float(getattr(p, axis)) for p in curve] for name, curve in curves.items()}
    losses = [point.loss for curve in curves.values() for point in curve] + [target]
    right_end = 1.02 * max(x for xs in places.values() for x in xs)
    low, high = min(losses), max(losses)
    low, high = low - 0.06 * (high - low), high + 0.04 * (high - low)

    def to_x(value: float) -> float:
        return LEFT + value / right_end * (WIDTH - LEFT - RIGHT)

    def to_y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [*_frame(to_x, to_y, right_end=right_end, low=low, high=high, label=label)]
    y = to_y(target)
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{MUTED}" '
        'stroke-dasharray="5 4"/>'
    )
    for number, (name, curve) in enumerate(curves.items()):
        colour, xs = COLOURS[number % len(COLOURS)], places[name]
        dots = [(to_x(x), to_y(point.loss)) for x, point in zip(xs, curve, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
    parts += _legend(curves, axis=axis, target=f"{target_label}: {target:.3f}")
    body = "\n".join(parts)
    above = _legend_height(curves)
    size = f"{WIDTH} {HEIGHT + above}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-above} {size}" role="img" '
        f'font-family="system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif" font-size="13">\n'
        f"<title>{escape(f'Validation loss over {label}')}</title>\n"
        f'<rect y="{-above}" width="{WIDTH}" height="{HEIGHT + above}" rx="6" fill="#ffffff"/>\n'
        f"{body}\n</svg>\n"
    )


def _frame(
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    *,
    right_end: float,
    low: float,
    high: float,
    label: str,
) -> Iterable[str]:
    for value in ticks(low, high, wanted=6):
        y = to_y(value)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        )
        yield _text(LEFT - 8, y + 4, f"{value:g}", anchor="end", fill=MUTED)
    floor = HEIGHT - BOTTOM
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}" stroke="{MUTED}"/>'
    for value in ticks(0, right_end, wanted=8):
        x = to_x(value)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}" stroke="{MUTED}"/>'
        yield _text(x, floor + 18, format_count(value), anchor="middle", fill=MUTED)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, label, anchor="middle", fill=INK)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle" '
        f'fill="{INK}">validation loss</text>'
    )


def _legend(curves: Mapping[str, Sequence[Point]], *, axis: str, target: str) -> Iterable[str]:
    """Above the frame, so that it touches no curve."""
    x, y = LEFT, 24 - _legend_height(curves)
    for number, (name, curve) in enumerate(curves.items()):
        end = getattr(curve[-1], axis)
        amount = f"{end:.1f} s" if axis == "seconds" else f"{format_count(end)} {axis.rstrip('s')}s"
        words = f"{name}: {curve[-1].loss:.3f} after {amount}"
        colour = COLOURS[number % len(COLOURS)]
        yield _text(x, y + 20 * number, words, anchor="start", fill=colour, weight=600)
    yield _text(x, y + 20 * len(curves), target, anchor="start", fill=MUTED)


def _legend_height(curves: Mapping[str, Sequence[Point]]) -> int:
    return 20 * len(curves) + 24


def _text(x: float, y: float, words: str, *, anchor: str, fill: str, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def markdown_table(rows: Sequence[Cells], *, without: Sequence[str] = ()) -> list[str]:
    names = [name for name in rows[0] if name not in without and any(r.get(name) for r in rows)]
    rules = ["---" if name in WORDS else "---:" for name in names]
    lines = [[row.get(name, "").replace("|", "\\|") for name in names] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (names, rules, *lines)]
