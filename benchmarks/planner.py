"""How well `gristmill plan` predicts steps that other people published.

    python benchmarks/planner.py            the tables, and results/planner.md
    python benchmarks/planner.py --rows     every row: published, planned, error
    python benchmarks/planner.py FOLDER     rows of other files in the same form, one by one

Two errors are given for each row: with the constants of hardware.toml, which were fitted to all
rows of that kind of GPU, and with constants that were fitted without any row of a model of that
size. Regret is how much slower than the fastest measured layout the one is that is planned to be
fastest.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from planner_fit import STARTS, all_rows, held_out
from planner_rows import Row, on, predict, published_rows, single_rows

from gristmill.plan.hardware import known_links, open_hardware

RESULT = Path(__file__).parent / "results" / "planner.md"
NAMES = {
    "vTrain": "vTrain, up to 512 GPUs",
    "M21": "Megatron-LM 2021, table 1",
    "M21b": "Megatron-LM 2021, table 2",
    "SP": "Megatron-LM 2022 (sequence parallelism)",
    "MT": "MT-NLG 530B",
    "MS": "MegaScale 175B",
    "MS530": "MegaScale 530B",
    "M24": "Megatron-LM 2024",
    "L3": "Llama 3 405B",
    "NT": "nanotron",
    "NTtp": "nanotron, tp alone",
    "TT": "torchtitan",
    "LF": "llm-foundry",
    "MB": "Megatron-Bridge",
    "own": "this program and nanoGPT",
}

Ratios = Mapping[str, float]
"""Planned over published, by the row's id."""


def planned(rows: Sequence[Row]) -> Ratios:
    """With the constants of the table."""
    kinds = {row.gpu: open_hardware(row.gpu) for row in rows}
    return {row.id: predict(row, on(row, kinds, known_links())) / row.seconds for row in rows}


def planned_unseen(rows: Sequence[Row]) -> Ratios:
    """With constants that were fitted without models of the row's size."""
    ratios: dict[str, float] = {}
    for kind, start in STARTS.items():
        own = [row for row in rows if row.gpu == kind]
        found = held_out(own, {kind: open_hardware(kind)}, start)
        ratios |= {row.id: ratio for row, ratio in zip(own, found, strict=True)}
    return ratios


def errors(rows: Sequence[Row], ratios: Ratios) -> list[float]:
    """Relative errors."""
    return [abs(ratios[row.id] - 1) for row in rows]


def regrets(rows: Sequence[Row], ratios: Ratios) -> dict[str, float]:
    """Of each group of rows of one model, one number of GPUs and one batch."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        name = f"{row.size}, {row.work.mesh.processes} GPUs, batch {row.work.batch}"
        groups[name].append((ratios[row.id] * row.seconds, row.seconds))
    several = {name: one for name, one in groups.items() if len(one) > 1}
    return {
        name: min(one)[1] / min(seconds for _, seconds in one) - 1 for name, one in several.items()
    }


def summary(rows: Sequence[Row], ratios: Ratios) -> str:
    """Share within 15 %, median and worst, as cells of a table."""
    found = errors(rows, ratios)
    within = sum(error <= 0.15 for error in found) / len(found)
    return f"{within:.0%} | {statistics.median(found):.1%} | {max(found):.0%}"


def report() -> Iterator[str]:
    """The tables in Markdown."""
    rows = all_rows()
    seen, unseen = planned(rows), planned_unseen(rows)
    yield "# Planned against published steps\n"
    yield "`benchmarks/planner.py` writes this page; errors are of the time of a step.\n"
    cells = "within 15 % | median | worst"
    yield f"| source | rows | {cells} | size held out: {cells} |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    printed = [row for row in rows if row.printed]
    groups = {
        "**all**": rows,
        "**all that print shape, layout and micro-batch**": printed,
        **{f"**{kind}**": [row for row in rows if row.gpu == kind] for kind in STARTS},
        **{
            NAMES[group]: [row for row in rows if row.group == group]
            for group in dict.fromkeys(row.group for row in rows)
        },
    }
    for name, some in groups.items():
        yield f"| {name} | {len(some)} | {summary(some, seen)} | {summary(some, unseen)} |"
    yield "\nRegret on vTrain's groups (constants fitted without the group's size in brackets):\n"
    multi = [row for row in rows if row.group == "vTrain"]
    apart = regrets(multi, unseen)
    for name, regret in regrets(multi, seen).items():
        yield f"* {name}: {regret:.1%} ({apart[name]:.1%})"
    single = list(single_rows())
    found = errors(single, planned(single))
    near = sum(one <= 0.15 for one in found) / len(found)
    yield (
        f"\nvTrain's {len(single):,} rows of one node are not counted: with equal shapes, their "
        "time is a straight line in the number of micro-batches to the last digit, which measured "
        f"steps never are. With the constants above, {near:.0%} of them are within 15 %; nearly "
        "all are bound by the host that launches kernels, which `--calibrate` measures."
    )
    yield "\nRows that are more than 15 % off:\n"
    yield "| row | GPUs | layout | micro-batch | published | planned | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if abs(seen[row.id] - 1) > 0.15:
            yield _line(row, seen[row.id])


def _line(row: Row, ratio: float) -> str:
    work = row.work
    micro = str(work.micro_batch) if row.printed else "not printed"
    return (
        f"| {row.id} ({NAMES.get(row.group, row.group)}) | {work.mesh.processes} | {work.mesh} | "
        f"{micro} | {row.seconds:.3g} s | {ratio * row.seconds:.3g} s | {ratio - 1:+.0%} |"
    )


def main() -> None:
    if len(sys.argv) > 1:
        own = sys.argv[1] == "--rows"
        rows = all_rows() if own else list(published_rows(Path(sys.argv[1])))
        for row, ratio in zip(rows, planned(rows).values(), strict=True):
            print(_line(row, ratio))
        print(f"within 15 % | median | worst: {summary(rows, planned(rows))}")
        return
    text = "\n".join(report()) + "\n"
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
