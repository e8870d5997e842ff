"""The page about the runs of `slow_links.py`: Markdown, and for each number of workers a picture.

    README.md   loss-4-workers.svg   loss-8-workers.svg

A picture has one chart for each kind of links: validation loss over seconds, on a scale of powers,
since the rows differ by orders of magnitude. It is SVG, as in `loss_page.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from loss_page import GRID, INK, MUTED, markdown_table, ticks
from loss_results import reached

from gristmill.base.files import write_atomic

COLOURS = {
    "ddp": "#1e2024",
    "ddp-bf16": "#8a8f98",
    "gossip-complete": "#0b3d91",
    "gossip-ring": "#2563c9",
    "gossip-exp": "#4aa3df",
    "gossip-alternating-exp-ring": "#1b998b",
    "gossip-random": "#2f8f5b",
    "gossip-hierarchical": "#8ab833",
    "gossip-ring-accum": "#7b5ea7",
    "diloco": "#c8472f",
    "diloco-int8": "#e58a1f",
    "diloco-top-k": "#d4508b",
}
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """Both runs of a row."""

    name: str
    curve: Mapping[str, Any]
    times: Mapping[str, Any]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(step, loss) for step, loss in self.curve["losses"] if step > 0]

    def over_seconds(self, links: str) -> list[tuple[float, float]]:
        seconds = self.times["step_seconds"].get(links)
        return [] if seconds is None else [(step * seconds, loss) for step, loss in self.losses]

    def seconds_to(self, loss: float, links: str) -> float | None:
        """When the line through its validations is down to a loss."""
        return reached(self.over_seconds(links), loss)

    @property
    def difference(self) -> float:
        """The largest difference between the training losses of both runs, step by step."""
        pairs = zip(self.curve["training"], self.times["training"], strict=False)
        return float(max(abs(a - b) for a, b in pairs))


def write_page(results: Mapping[str, Any], folder: Path) -> None:
    """The page and its pictures, from all rows of which both runs are there."""
    made = [
        run for rows in results["runs"].values() for runs in rows.values() for run in runs.values()
    ]
    lines = ["# Training over slow links", "", _origin(made, results["facts"]), ""]
    lines += _protocol(results["facts"])
    for workers, rows in sorted(results["runs"].items(), key=lambda pair: int(pair[0])):
        done = [
            Measured(name, runs["curve"], runs["times"])
            for name, runs in rows.items()
            if {"curve", "times"} <= runs.keys()
        ]
        if not done:
            continue
        links = list(dict.fromkeys(key for row in done for key in row.times["step_seconds"]))
        picture_file = folder / f"loss-{workers}-workers.svg"
        charts = {one: {row.name: row.over_seconds(one) for row in done} for one in links}
        write_atomic(picture_file, picture(charts))
        lines += ["", f"## {workers} workers", "", *_tables(done, links)]
        lines += ["", f"![Validation loss over seconds]({picture_file.name})"]
    write_atomic(folder / "README.md", "\n".join(lines) + "\n")


def _origin(made: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    dates, codes = ({run[name]: None for run in made} for name in ("date", "code"))
    shaped = f"NOT shaped ({facts['unshaped']})" if facts["unshaped"] else "shaped both ways"
    return (
        f"Measured by `slow_links.py`, {', '.join(dates)}, commit {', '.join(codes)}, all workers "
        f"on one machine ({facts['machine']}), links {shaped}."
    )


def _protocol(facts: Mapping[str, Any]) -> list[str]:
    lrs = ", ".join(f"{lr:g}" for lr in facts["lrs"])
    return [
        f"- The same for all rows: model ({facts['model']}), text ({facts['text']}), samples, "
        f"global batch ({facts['batch']}), {facts['steps']} steps.",
        f"- Learning rates: of {lrs}, the best after {facts['tuned_steps']} steps on unlimited "
        "links, each row tuned alike. A rate with a star was not tuned.",
        "- Rates are in Mbit/s. slow-link: one worker has a tenth of the rate. slow-cpu: one "
        "worker computes a fifth of the time.",
        "- MB sent are counted on a worker's interface, without those of validation.",
        "- Losses come from a run on unlimited links, step times from stretches of a second run.",
        "- Each is one run with one seed: rows that differ by rounding alone, ddp and ddp-bf16, "
        "show which differences are chance.",
    ]


def _tables(rows: Sequence[Measured], links: Sequence[str]) -> list[str]:
    target = max(min(loss for _, loss in row.losses) for row in rows)
    steps, seconds = [], []
    for row in rows:
        sent = row.curve["sent_per_step"]
        star = "" if row.curve["tuned"] else "*"
        times = row.times["step_seconds"]
        steps.append(
            {
                "run": row.name,
                "lr": f"{row.curve['lr']:g}{star}",
                "MB sent per step": "" if sent is None else f"{sent / 1e6:.3f}",
                **{f"ms at {one}": f"{1000 * times[one]:.0f}" for one in links if one in times},
                "loss at the end": f"{row.losses[-1][1]:.4f}",
            }
        )
        reached = {one: row.seconds_to(target, one) for one in links}
        cells = {one: f"{value:.1f}" for one, value in reached.items() if value is not None}
        seconds.append({"run": row.name, **cells})
    worst = max(row.difference for row in rows)
    return [
        "Step time:",
        "",
        *markdown_table(steps),
        "",
        f"Seconds until the validation loss is {target:.4f}, which all of these reach:",
        "",
        *markdown_table(seconds),
        "",
        f"Training losses of a row's two runs differ by {worst:.2g} at most, at the same step.",
    ]


# ------------------------------------------------------------------ pictures

WIDTH, HEIGHT, COLUMNS = 420, 280, 2
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 34, 40


def picture(charts: Mapping[str, Mapping[str, Curve]]) -> str:
    """A chart for each kind of links, all with the same scales, and one legend below."""
    points = [point for rows in charts.values() for curve in rows.values() for point in curve]
    losses, places = [loss for _, loss in points], [seconds for seconds, _ in points]
    seconds = min(places) / 1.2, max(places) * 1.2
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3
    names = list(dict.fromkeys(name for rows in charts.values() for name in rows))
    columns = min(COLUMNS, len(charts))
    width, floor = columns * WIDTH, math.ceil(len(charts) / columns) * HEIGHT
    parts = []
    for number, (links, curves) in enumerate(charts.items()):
        x, y = number % columns * WIDTH, number // columns * HEIGHT
        body = "\n".join(_chart(links, curves, seconds=seconds, losses=(low, high)))
        parts.append(f'<g transform="translate({x} {y})">\n{body}\n</g>')
    across = max(1, width // 210)
    for number, name in enumerate(names):
        x, y = 20 + number % across * 210, floor + 18 + number // across * 20
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="8" fill="{_colour(name)}"/>')
        parts.append(_text(x + 20, y, name, anchor="start", fill=INK))
    height = floor + 20 * math.ceil(len(names) / across) + 16
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif" font-size="12">\n'
        f"<title>Validation loss over seconds</title>\n"
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _chart(
    links: str,
    curves: Mapping[str, Curve],
    *,
    seconds: tuple[float, float],
    losses: tuple[float, float],
) -> Iterable[str]:
    (left, right), (low, high) = map(math.log10, seconds), losses

    def to_x(value: float) -> float:
        return LEFT + (math.log10(value) - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def to_y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    yield _text((LEFT + WIDTH - RIGHT) / 2, 20, _title(links), anchor="middle", fill=INK)
    yield from _frame(to_x, to_y, seconds=seconds, losses=losses)
    for name, curve in curves.items():
        dots = [(to_x(x), to_y(y)) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        colour = _colour(name)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        for x, y in dots:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>'


def _frame(
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    *,
    seconds: tuple[float, float],
    losses: tuple[float, float],
) -> Iterable[str]:
    floor = HEIGHT - BOTTOM
    for value in ticks(*losses, wanted=5):
        y = to_y(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 6, y + 4, f"{value:g}", anchor="end", fill=MUTED)
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}" stroke="{MUTED}"/>'
    powers = range(math.floor(math.log10(seconds[0])), math.ceil(math.log10(seconds[1])) + 1)
    for value in (lead * 10.0**power for power in powers for lead in (1, 2, 5)):
        if seconds[0] <= value <= seconds[1]:
            x = to_x(value)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor + 4}" stroke="{GRID}"/>'
            yield _text(x, floor + 16, f"{value:g}", anchor="middle", fill=MUTED)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "seconds", anchor="middle", fill=MUTED)


def _title(links: str) -> str:
    rate, _, slow = links.partition("+")
    words = "unlimited links" if rate == "unlimited" else f"{rate} Mbit/s"
    more = {"slow-link": ", one worker a tenth", "slow-cpu": ", one worker at a fifth of the speed"}
    return words + more.get(slow, "")


def _colour(name: str) -> str:
    return COLOURS.get(name, MUTED)


def _text(x: float, y: float, words: str, *, anchor: str, fill: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )
