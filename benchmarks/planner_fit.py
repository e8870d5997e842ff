"""Fit the constants of each kind of GPU to the published rows, and say how well they predict.

    python benchmarks/planner_fit.py            each kind: constants, errors in and out of the fit
    python benchmarks/planner_fit.py a100-80gb  one of them

Every constant starts where measurements of single kernels put it, and is drawn back to there with
the strength of a few rows, so that it stays what its name says. Errors are those of logarithms; far
ones count linearly (Huber), since some rows are of machines that were in trouble. Out of the fit:
each row is predicted with constants that were fitted without any row of a model of its size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from planner_rows import Row, multi_rows, on, own_rows, predict, published_rows

from gristmill.plan.hardware import Hardware, Rates, known_links, open_hardware

FITTED = (
    *("product_share", "half_rows", "half_features", "attention_share", "attention_share_native"),
    *("memory_share", "link_share", "network_share", "exposed_tensor", "hidden_data", "gap"),
    "product_share_fp8",
)
HUBER = 0.1
PRIOR = 0.01
"""How strongly a constant is held where it starts: the square of its change (of its logarithm)
counts this much for each row, as the square of a row's error counts 1."""

Fit = tuple[Rates, np.ndarray]


def fit(rows: Sequence[Row], start: Rates, machines: dict[str, Hardware], strength: float) -> Rates:
    """Constants that predict the rows, by Gauss and Newton on the logarithms of both."""
    links = known_links()
    first = np.log([getattr(start, name) for name in FITTED])

    def errors(point: np.ndarray) -> np.ndarray:
        rates = replace(start, **dict(zip(FITTED, map(float, np.exp(point)), strict=True)))
        made = {name: replace(one, rates=rates) for name, one in machines.items()}
        return np.array(
            [math.log(predict(row, on(row, made, links)) / row.seconds) for row in rows]
        )

    def cost(error: np.ndarray, point: np.ndarray) -> float:
        size = np.abs(error)
        far = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(far.sum() + strength * len(rows) * ((point - first) ** 2).sum() / 2)

    point, damping = first.copy(), 1e-2
    error = errors(point)
    now = cost(error, point)
    for _ in range(30):
        slope = np.stack(
            [(errors(point + 1e-3 * unit) - error) / 1e-3 for unit in np.eye(len(FITTED))], axis=1
        )
        weight = np.minimum(1, HUBER / np.maximum(np.abs(error), 1e-9))
        hold = strength * len(rows)
        matrix = slope.T @ (slope * weight[:, None]) + hold * np.eye(len(FITTED))
        downhill = slope.T @ (weight * error) + hold * (point - first)
        before = now
        for _ in range(6):
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -downhill)
            tried = point + np.clip(step, -0.5, 0.5)
            found = errors(tried)
            if cost(found, tried) < now:
                point, error, now, damping = tried, found, cost(found, tried), damping / 4
                break
            damping *= 4
        if before - now < 1e-5 * before:
            break
    return replace(start, **dict(zip(FITTED, map(float, np.exp(point)), strict=True)))


STARTS = {
    # Large products: 0.80 of the peak on an A100, 0.70 on a Hopper at its power limit, memory 0.85,
    # NCCL 0.78 of NVLink and 0.75 of InfiniBand, as single kernels are usually measured.
    "a100-80gb": Rates(
        0.80, 0.6, 250, 140, 0.42, 0.42, 16, 0.85, link_share=0.78, network_share=0.75
    ),
    "h100-80gb": Rates(
        0.70, 0.6, 260, 140, 0.30, 0.5, 16, 0.75, link_share=0.75, network_share=0.7
    ),
    # Where the H100 of 700 W ended, times the root of 500 / 700.
    "h100-96gb": Rates(
        0.53, 0.51, 262, 145, 0.20, 0.45, 16, 0.69, link_share=0.75, network_share=0.65
    ),
    "h200": Rates(0.72, 0.6, 260, 140, 0.30, 0.5, 16, 0.75, link_share=0.75, network_share=0.7),
}


def all_rows() -> list[Row]:
    """Every row that constants are fitted to: all but those of one node of vTrain."""
    return [*multi_rows(), *published_rows(), *own_rows()]


def held_out(rows: Sequence[Row], machines: dict[str, Hardware], start: Rates) -> list[float]:
    """Predicted over published, each size with constants that were fitted without it."""
    links, found = known_links(), dict[str, dict[str, Hardware]]()
    for size in {row.size for row in rows}:
        others = [row for row in rows if row.size != size]
        rates = fit(others, start, machines, PRIOR)
        found[size] = {name: replace(one, rates=rates) for name, one in machines.items()}
    return [predict(row, on(row, found[row.size], links)) / row.seconds for row in rows]


def main() -> None:
    for kind in sys.argv[1:] or STARTS:
        rows = [row for row in all_rows() if row.gpu == kind]
        machines = {kind: open_hardware(kind)}
        rates = fit(rows, STARTS[kind], machines, PRIOR)
        print(f"# {kind}: {len(rows)} rows")
        for name in FITTED:
            print(f"{name} = {getattr(rates, name):.3g}")
        made = {kind: replace(machines[kind], rates=rates)}
        inside = [predict(row, on(row, made, known_links())) / row.seconds for row in rows]
        for label, ratios in {
            "in the fit": inside,
            "size held out": held_out(rows, machines, STARTS[kind]),
        }.items():
            for group in ("", *dict.fromkeys(row.group for row in rows)):
                error = [
                    abs(ratio - 1)
                    for row, ratio in zip(rows, ratios, strict=True)
                    if group in ("", row.group)
                ]
                within = sum(one <= 0.15 for one in error) / len(error)
                print(
                    f"#   {label:<14}{group or 'all':<8}{len(error):>4} rows  within 15 %: "
                    f"{within:4.0%}  median {np.median(error):5.1%}  worst {max(error):4.0%}"
                )


if __name__ == "__main__":
    main()
